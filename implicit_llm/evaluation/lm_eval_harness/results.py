"""Asking the tasks and reading the harness's results; nothing of the machine or the moment gets into a record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from lm_eval.evaluator import evaluate
from lm_eval.utils import hash_string

from implicit_llm.evaluation.lm_eval_harness.model import ImplicitLM

NO_FILTER = "none"
PACKAGE = "lm_eval"


def ask(lm: ImplicitLM, name: str, task: Any, *, limit: int | None, bootstrap_draws: int) -> dict[str, Any]:
    """One task's part of a record; metrics are None where one of the answers was not finite.

    `metrics` and `stderr` are by metric, with the harness's filter behind a comma unless it is "none".
    """
    results = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=bootstrap_draws, log_samples=True)
    assert results is not None  # of ranks above 0 only
    numbers = results["results"][name]
    keys = [key for key in numbers if "," in key and not key.partition(",")[0].endswith("_stderr")]
    is_whole = lm.cost.num_nonfinite == 0
    return {
        "metrics": {_short(key): _finite(numbers[key]) if is_whole else None for key in keys},
        "stderr": {_short(key): _finite(numbers.get(_stderr(key))) if is_whole else None for key in keys},
        "higher_is_better": dict(results["higher_is_better"].get(name, {})),
        "nonfinite_share": lm.cost.num_nonfinite / lm.cost.num_requests if lm.cost.num_requests else None,
        "num_documents": results["n-samples"][name]["effective"],
        "num_requests": lm.cost.num_requests,
        "num_fewshot": results["n-shot"][name],
        "task_version": results["versions"][name],
        "task_hash": task_hash(results["samples"][name]),
        "harness_version": version(PACKAGE),
    }


def task_hash(samples: Sequence[Mapping[str, Any]]) -> str:
    """sha256 over documents, prompts and targets, as the harness's own result files have it."""
    return hash_string(
        "".join(sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"] for sample in samples)
    )


def _short(key: str) -> str:
    metric, _, filtered_by = key.partition(",")
    return metric if filtered_by == NO_FILTER else key


def _stderr(key: str) -> str:
    metric, _, filtered_by = key.partition(",")
    return f"{metric}_stderr,{filtered_by}"


def _finite(value: Any) -> float | None:
    """The harness writes "N/A" for a standard error that it does not know."""
    if value is None or isinstance(value, str):
        return None
    return float(value) if math.isfinite(value) else None
