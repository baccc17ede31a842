"""Accuracy and cost of one model on one word-problem data set, in one mode."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from implicit_llm.evaluation.accuracy import AccuracyTally
from implicit_llm.evaluation.answers import Evaluation, EvaluationJob, answers
from implicit_llm.evaluation.solver_tally import SolverTally
from implicit_llm_jobs.progress import Progress

log = logging.getLogger(__name__)

# Tokens of a batch. A model of the published size takes 15 KiB for each of them, most of it for its injection, however
# small the blocks are that it solves: 1 GiB on a CPU, which has no second try, and 15 GiB on a card, which has.
BATCH_TOKENS, BATCH_TOKENS_ON_DEVICE = 2**16, 2**20
MAX_BATCH_SIZE = 4096


def default_batch_size(length: int, device_type: str) -> int:
    """Sequences of `length` tokens in a batch, at least one."""
    tokens = BATCH_TOKENS if device_type == "cpu" else BATCH_TOKENS_ON_DEVICE
    return min(MAX_BATCH_SIZE, max(1, tokens // length))


def evaluate_word_problem(job: EvaluationJob) -> Evaluation:
    """Answer the problems; the predictions are kept for comparing modes. Raises: EvaluationOutOfMemory."""
    accuracy, solver = AccuracyTally(job.dataset.length), SolverTally()
    kind = np.min_scalar_type(job.dataset.vocab_size - 1)
    predictions = np.zeros((job.num_samples, job.dataset.length), dtype=kind)
    progress = Progress(job.where, job.num_samples)
    for start, batch, answer in answers(job, _read):
        labels_BL = np.asarray(batch["labels"])
        if answer is None:
            accuracy.add_nonfinite(len(labels_BL))
        else:
            predictions_BL, is_finite_B, stats = answer
            accuracy.add(predictions_BL, labels_BL, is_finite_B)
            solver.add(stats, labels_BL.shape)
            predictions[start : start + len(labels_BL)] = predictions_BL
        progress.tell(accuracy.num_samples, lambda: _words(accuracy, solver))
    values = accuracy.values() | solver.values(job.is_implicit) | {"num_samples": job.num_samples}
    values["nonfinite_share"] = accuracy.num_nonfinite_samples / job.num_samples
    if accuracy.num_nonfinite_samples:
        counts = (accuracy.num_nonfinite_samples, job.num_samples)
        log.warning("%s: %d of %d sequences have non-finite logits: no accuracy is reported", job.where, *counts)
    return Evaluation(values, predictions)


def match(result: Evaluation, other: Evaluation | None) -> float | None:
    """Share of tokens with the same prediction, over the samples both have; None where that says nothing."""
    if other is None or other is result or not _is_finite(result) or not _is_finite(other):
        return None
    mine, theirs = result.predictions_NL, other.predictions_NL
    if mine is None or theirs is None or not (count := min(len(mine), len(theirs))):
        return None
    return float((mine[:count] == theirs[:count]).mean())


def _read(out: Any, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, Any]:
    is_finite_B = torch.isfinite(out.logits).all(dim=-1).all(dim=-1)
    stats = getattr(out, "solver_stats", None)
    return out.logits.argmax(dim=-1).cpu().numpy(), is_finite_B.cpu().numpy(), stats


def _is_finite(result: Evaluation) -> bool:
    return result.values["nonfinite_share"] == 0


def _words(accuracy: AccuracyTally, solver: SolverTally) -> str:
    last = accuracy.last()
    shown = "not finite" if last is None else f"{last:.3f}"
    cost = solver.f_evaluations_per_token or 0
    return f"accuracy on the last ten tokens {shown}, {cost:.1f} f-evaluations per token"
