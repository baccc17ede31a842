"""Downstream tasks of the lm-eval harness: one language model on each of them, in every mode.

Nothing of the machine or the moment gets into a record.
"""

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from numbers import Real
from typing import Any

from lm_eval.evaluator import evaluate
from lm_eval.utils import hash_string

from implicit_llm.evaluation.answers import EvaluationJob, EvaluationResult
from implicit_llm.evaluation.frame import ModelEvaluation, model_directory, model_input
from implicit_llm.evaluation.lm_eval_harness.model import (
    DEFAULT_BATCH_SIZE,
    ImplicitLM,
    RequestCost,
    load_tokenizer,
    run_tokenizer,
)
from implicit_llm.evaluation.lm_eval_harness.tasks import load_tasks
from implicit_llm_contracts.config.evaluation import LmEvalConfig
from implicit_llm_contracts.runs.fetched_files import TOKENIZER_FILE
from implicit_llm_contracts.runs.stage_context import TOKENIZER_ROLE, StageContext, StageResult


def run(context: StageContext) -> StageResult:
    """Body of the stage evaluate: writes metrics.json, a record for each task and mode. Raises: UserError."""
    config = context.settings(LmEvalConfig)
    tasks = load_tasks(config)
    evaluation = ModelEvaluation(context, config, tracked=())
    precision = "bfloat16" if config.precision == "bf16" else None
    lm = ImplicitLM(evaluation.model, _tokenizer(context), mixed_precision_dtype=precision)
    for name, task in tasks.items():
        described = {"data": name, "task": name, "length": None, "limit": config.limit, "precision": config.precision}
        evaluation.add(described, _results(evaluation, lm, name, task, config))
    return evaluation.finish(evaluation.headline("metrics"))


def _results(
    evaluation: ModelEvaluation, lm: ImplicitLM, name: str, task: Any, config: LmEvalConfig
) -> dict[str, EvaluationResult]:
    """The results of one task, by mode."""

    def evaluate(job: EvaluationJob) -> EvaluationResult:
        lm.batches, lm.where, lm.cost = job.batch_size, job.where, RequestCost()
        limit = job.num_samples if job.num_samples < len(documents) else None
        values = ask(lm, name, task, limit=limit, bootstrap_draws=config.bootstrap_draws)
        return EvaluationResult(values | lm.cost.solver.values())

    documents: Any = task.eval_docs
    size = DEFAULT_BATCH_SIZE
    return evaluation.in_each_mode(name, documents, evaluate, batch_size=size, max_samples=config.limit)


def _tokenizer(context: StageContext) -> Any:
    """The model's own if it brought one, else that of the data set. Raises: TokenizerMissing."""
    folder = model_directory(model_input(context))
    if TOKENIZER_ROLE in context.inputs and not (folder / TOKENIZER_FILE).is_file():
        return run_tokenizer(context.inputs[TOKENIZER_ROLE])
    return load_tokenizer(None, folder)


NO_FILTER = "none"


def ask(lm: ImplicitLM, name: str, task: Any, *, limit: int | None, bootstrap_draws: int) -> dict[str, Any]:
    """One task's part of a record; metrics are None where one of the answers was not finite.

    `metrics` and `stderr` are by metric, with the harness's filter behind a comma unless it is "none".
    """
    results = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=bootstrap_draws, log_samples=True)
    assert results is not None  # of ranks above 0 only
    numbers = results["results"][name]
    metrics: dict[str, float | None] = {}
    stderr: dict[str, float | None] = {}
    for key, value in numbers.items():
        metric, comma, filtered_by = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            name_of = metric if filtered_by == NO_FILTER else key
            metrics[name_of] = _finite(value, lm)
            stderr[name_of] = _finite(numbers.get(f"{metric}_stderr,{filtered_by}"), lm)
    return {
        "metrics": metrics,
        "stderr": stderr,
        "higher_is_better": dict(results["higher_is_better"].get(name, {})),
        "nonfinite_share": lm.cost.num_nonfinite / lm.cost.num_requests if lm.cost.num_requests else None,
        "num_documents": results["n-samples"][name]["effective"],
        "num_requests": lm.cost.num_requests,
        "num_fewshot": results["n-shot"][name],
        "task_version": results["versions"][name],
        "task_hash": task_hash(results["samples"][name]),
        "harness_version": version("lm_eval"),
    }


def task_hash(samples: Sequence[Mapping[str, Any]]) -> str:
    """sha256 over documents, prompts and targets, as the harness's own result files have it."""
    return hash_string(
        "".join(sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"] for sample in samples)
    )


def _finite(value: Any, lm: ImplicitLM) -> float | None:
    """None once an answer was not finite, and for "N/A", which the harness writes for an unknown standard error."""
    is_known = isinstance(value, Real) and math.isfinite(value) and lm.cost.num_nonfinite == 0
    return float(value) if is_known else None
