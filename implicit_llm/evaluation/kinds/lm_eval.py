"""Evaluate a language model in every mode on downstream tasks of the lm-eval harness.

Records contain nothing that depends on the machine or the time.
"""

import math
import random
from collections.abc import Mapping
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import hash_string

from implicit_llm.evaluation.answers import EvaluationJob, EvaluationResult
from implicit_llm.evaluation.frame import ModelEvaluation, model_directory
from implicit_llm.evaluation.lm_eval_harness import (
    DEFAULT_BATCH_SIZE,
    ImplicitLM,
    RequestCost,
    load_tokenizer,
)
from implicit_llm_contracts.config.evaluation import LmEvalConfig
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.fetched_files import TOKENIZER_FILE
from implicit_llm_contracts.runs.places import TASK_FOLDERS, file_digests, find_task_folder
from implicit_llm_contracts.runs.stage_context import MODEL_ROLE, TOKENIZER_ROLE, StageContext, StageResult


def run(context: StageContext) -> StageResult:
    """Run an evaluation job: write metrics.json with a record for each task and mode. Raises: UserError."""
    config = context.settings(LmEvalConfig)
    tasks = load_tasks(config)
    evaluation = ModelEvaluation(context, config, tracked=())
    precision = "bfloat16" if config.precision == "bf16" else None
    lm = ImplicitLM(evaluation.model, _tokenizer(context), mixed_precision_dtype=precision)
    for name, task in tasks.items():
        described = {"data": name, "task": name, "length": None, "limit": config.limit, "precision": config.precision}
        evaluation.add(described, _results(evaluation, lm, name, task, config))
    return evaluation.finish(evaluation.headline("metrics"))


def _tokenizer(context: StageContext) -> Any:
    """Return the tokenizer of the model's folder, or that of the data set if the folder has no tokenizer.json.

    Raises: TokenizerMissing.
    """
    folder = model_directory(context.given(MODEL_ROLE))
    is_needed = TOKENIZER_ROLE in context.inputs and not (folder / TOKENIZER_FILE).is_file()
    return load_tokenizer(context.inputs[TOKENIZER_ROLE].dir if is_needed else None, folder)


def _results(
    evaluation: ModelEvaluation, lm: ImplicitLM, name: str, task: Any, config: LmEvalConfig
) -> dict[str, EvaluationResult]:
    """Return the results of one task, by mode."""
    documents: Any = task.eval_docs

    def ask(job: EvaluationJob) -> EvaluationResult:
        lm.batches, lm.where, lm.cost = job.batch_size, job.where, RequestCost()
        limit = job.num_samples if job.num_samples < len(documents) else None
        draws = config.bootstrap_draws
        found = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=draws, log_samples=True)
        return EvaluationResult(_values(name, found, lm.cost))

    return evaluation.in_each_mode(name, documents, ask, batch_size=DEFAULT_BATCH_SIZE, max_samples=config.limit)


def _values(name: str, results: Any, cost: RequestCost) -> dict[str, Any]:
    """Return one task's part of a record; metrics and standard errors are None if any request's result is not finite.

    The keys of `metrics` and `stderr` are "<metric>" or, for a filter of the harness other than "none",
    "<metric>,<filter>". task_hash: the hash over documents, prompts and targets in the harness's own result files.
    """
    numbers = {key: value for key, value in results["results"][name].items() if "," in key}
    metrics, stderr = (
        {
            key.removesuffix(",none"): _finite(numbers.get(key.replace(",", ending)), cost)
            for key in numbers
            if "_stderr," not in key
        }
        for ending in (",", "_stderr,")
    )
    hashes = [sample[of] for sample in results["samples"][name] for of in ("doc_hash", "prompt_hash", "target_hash")]
    return {
        "metrics": metrics,
        "stderr": stderr,
        "higher_is_better": dict(results["higher_is_better"].get(name, {})),
        "nonfinite_share": cost.num_nonfinite / cost.num_requests if cost.num_requests else None,
        "num_documents": results["n-samples"][name]["effective"],
        "num_requests": cost.num_requests,
        "num_fewshot": results["n-shot"][name],
        "task_version": results["versions"][name],
        "task_hash": hash_string("".join(hashes)),
        "harness_version": version("lm_eval"),
        **cost.solver.values(),
    }


def _finite(value: Any, cost: RequestCost) -> float | None:
    """Return the value; None if it is no number (such as "N/A"), or if it or any request's result is not finite."""
    is_known = isinstance(value, Real) and math.isfinite(value) and cost.num_nonfinite == 0
    return float(value) if is_known else None


class TaskError(UserError):
    """A task is unknown, or its files or its data are missing, changed or unreadable."""


def load_tasks(config: LmEvalConfig) -> dict[str, Any]:
    """Return the tasks by name, in the order of `config.tasks`.

    Also set the global random seeds of Python, NumPy and PyTorch to the defaults of the harness's command line.
    Raises: TaskError; if data is not in the cache of `datasets`, the message names the command that fetches it.
    """
    folder = None
    if config.task_path is not None:
        folder = find_task_folder(config.task_path)
        if folder is None:
            raise TaskError(
                f"task_path: neither {config.task_path} nor {TASK_FOLDERS / config.task_path} is a folder; "
                "give one with YAML files of tasks"
            )
        _require_planned_files(folder, config.task_files)
    manager = _manager(folder, config.tasks)
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    tasks = {name: _load(manager, name) for name in config.tasks}
    for task in tasks.values():
        if task.get_config("num_fewshot") != 0:  # a task that forbids examples has 0
            task.set_config(key="num_fewshot", value=config.num_fewshot)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return tasks


def _require_planned_files(folder: Path, digests: Mapping[str, str] | None) -> None:
    """Raise TaskError if files below `folder` are missing, new or changed; if `digests` is None, accept all files."""
    if digests is None:
        return
    found = file_digests(folder)
    for name in sorted(found.keys() | digests.keys()):
        if found.get(name) != digests.get(name):
            what = "is missing" if name not in found else "is new" if name not in digests else "changed"
            raise TaskError(f"{folder / name}: {what} after the workflow was planned; run the workflow again")


def _manager(folder: Path | None, names: tuple[str, ...]) -> TaskManager:
    """Return a manager that has these tasks. Raises: TaskError if a name is unknown or means several tasks.

    Indexing the harness's own 14,000 tasks takes seconds. With a folder, this happens only if a task is not in it.
    """
    path = None if folder is None else str(folder)
    for has_defaults in (True,) if path is None else (False, True):
        manager = TaskManager(include_path=path, include_defaults=has_defaults)
        unknown = [name for name in names if name not in manager.all_subtasks]
        if not unknown:
            return manager
    if unknown[0] in manager.all_tasks:
        raise TaskError(f"tasks: {unknown[0]} stands for several tasks; name those that are wanted")
    hint = nearest(unknown[0], manager.all_subtasks, "`implicit-llm evaluate harness ls tasks` lists them")
    raise TaskError(f"tasks: the harness has no task {unknown[0]}; {hint}")


def _load(manager: TaskManager, name: str) -> Any:
    try:
        return manager.load([name])["tasks"][name]
    except (OSError, ValueError) as error:  # `datasets` and the hub raise only subclasses of these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise TaskError(
            f"task {name}: its data cannot be read ({reason}); where there is a network, run `implicit-llm prefetch "
            "EXPERIMENT` with the same HF_HOME; if evaluation-data.yaml lacks the task, add it there first"
        ) from error
