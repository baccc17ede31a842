"""Perplexity of one model on rows of one length, in one mode."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from implicit_llm.evaluation.answers import Evaluation, EvaluationJob, answers, token_losses
from implicit_llm.evaluation.loss_tally import LossTally
from implicit_llm.evaluation.progress import Progress
from implicit_llm.evaluation.solver_tally import SolverTally

log = logging.getLogger(__name__)


def evaluate_perplexity(job: EvaluationJob) -> Evaluation:
    """Loss and perplexity of the next token within each row; the first token of a row is not predicted.

    Raises: EvaluationOutOfMemory.
    """
    losses, solver = LossTally(), SolverTally()
    num_nonfinite = 0
    progress = Progress(job.where, job.num_samples)
    for start, batch, answer in answers(job, _read):
        batch_size, length = np.asarray(batch["input_ids"]).shape
        totals_B, stats = answer if answer is not None else (np.full(batch_size, math.nan), None)
        num_nonfinite += int((~np.isfinite(totals_B)).sum())
        losses.add(float(totals_B.sum()), batch_size * (length - 1))
        if answer is not None:
            solver.add(stats, (batch_size, length))
        progress.tell(start + batch_size, lambda: _words(losses, solver))
    if num_nonfinite:
        counts = (num_nonfinite, job.num_samples)
        log.warning("%s: %d of %d sequences have a non-finite loss: no perplexity is reported", job.where, *counts)
    values = {"loss": losses.loss, "perplexity": losses.perplexity, "num_tokens": losses.num_tokens}
    values["nonfinite_share"] = num_nonfinite / job.num_samples if job.num_samples else None
    return Evaluation(values | solver.values(job.is_implicit))


def no_perplexity() -> Evaluation:
    """What is recorded of a length that no row of the test set reaches."""
    values: dict[str, Any] = {"loss": None, "perplexity": None, "num_tokens": 0, "nonfinite_share": None}
    return Evaluation(values | {"f_evaluations_per_token": None, "residual": None, "unconverged_share": None})


def _read(out: Any, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, Any]:
    """Sum of the losses of each row in fp64, shape (B,), and the solver's statistics."""
    labels_BL = np.asarray(batch["input_ids"])[:, 1:]
    totals_B = token_losses(out.logits[:, :-1], labels_BL).double().sum(dim=1)
    return totals_B.cpu().numpy(), getattr(out, "solver_stats", None)


def _words(losses: LossTally, solver: SolverTally) -> str:
    loss = losses.loss
    shown = "loss not finite" if loss is None else f"loss {loss:.4f}"
    return f"{shown}, {solver.iterations / max(1, solver.num_sequences):.1f} f-evaluations per token"
