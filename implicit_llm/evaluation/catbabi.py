"""Answers to the questions of CatbAbI, and its next words, in one mode, by one of two protocols.

windowed: each row of the data set is read from an empty state. A row is a window of the concatenated stories, so that a
question near its start may lack the facts before it; all models read the same windows.

carried: the published protocol, batch 1. The stories are read in the order of the file as one long row, and the state
goes on over the ends of windows and stories, never reset. What is read at a time is still a window, in which an
implicit model is solved in its mode, after the converged state of all that went before. A model with attention has no
state of fixed size, its cache would hold the whole test set: it has no number here.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np

from implicit_llm.evaluation.answers import Evaluation, EvaluationJob, answers, token_losses
from implicit_llm.evaluation.catbabi_tally import COUNTS, MEASURES, AnswerTally
from implicit_llm.evaluation.solver_tally import SolverTally
from implicit_llm_jobs.progress import Progress

log = logging.getLogger(__name__)

WINDOWED: Literal["windowed"] = "windowed"
QUESTION_MARK = "?"


def evaluate_catbabi(job: EvaluationJob, question_id: int) -> Evaluation:
    """Accuracy at every "?" and over all words, by argmax over the whole vocabulary. Raises: EvaluationOutOfMemory."""
    tally, solver = AnswerTally(question_id), SolverTally()
    num_nonfinite = 0
    progress = Progress(job.where, job.num_samples)
    for start, batch, answer in answers(job, _read):
        batch_size, length = np.asarray(batch["labels"]).shape
        if answer is None:
            num_nonfinite += batch_size
        else:
            predictions_BL, losses_BL, stats = answer
            num_nonfinite += int((~np.isfinite(losses_BL).all(axis=1)).sum())
            tally.add(predictions_BL, losses_BL, batch)
            solver.add(stats, (batch_size, length))
        progress.tell(start + batch_size, lambda: _words(tally, solver))
    values = tally.values() | {"num_samples": job.num_samples}
    values["nonfinite_share"] = num_nonfinite / job.num_samples
    if num_nonfinite:
        counts = (num_nonfinite, job.num_samples)
        log.warning("%s: %d of %d sequences have a non-finite loss: no accuracy is reported", job.where, *counts)
        values |= dict.fromkeys(MEASURES)
    return Evaluation(values | solver.values(job.is_implicit))


def no_answers() -> Evaluation:
    """What is recorded of a protocol that a model cannot follow."""
    values: dict[str, Any] = dict.fromkeys((*MEASURES, *COUNTS)) | {"num_samples": 0}
    return Evaluation(values | {"nonfinite_share": None} | SolverTally().values(is_implicit=False))


def _read(out: Any, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, Any]:
    """Predictions and losses (B, L), the solver's statistics."""
    losses_BL = token_losses(out.logits, np.asarray(batch["labels"])).double()
    return out.logits.argmax(dim=-1).cpu().numpy(), losses_BL.cpu().numpy(), getattr(out, "solver_stats", None)


def _words(tally: AnswerTally, solver: SolverTally) -> str:
    accuracy = tally.accuracy
    shown = "no question yet" if accuracy is None else f"accuracy at questions {accuracy:.3f}"
    return f"{shown}, {solver.f_evaluations_per_token or 0:.1f} f-evaluations per token"
