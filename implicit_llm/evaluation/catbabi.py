"""Answers to the questions of CatbAbI, and its next words, in one mode.

Windowed protocol: each row of the data set is read from an empty state. A row is a window of the concatenated stories,
so that a question near its start may lack the facts before it; all models read the same windows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from implicit_llm.evaluation.answers import IGNORED_LABEL, Evaluation, EvaluationJob, answers, token_losses
from implicit_llm.evaluation.loss_tally import LossTally
from implicit_llm.evaluation.progress import Progress
from implicit_llm.evaluation.solver_tally import SolverTally

log = logging.getLogger(__name__)

PROTOCOL = "windowed"
QUESTION_MARK = "?"


class AnswerTally:
    """Right answers among the questions, by task, and right words among all."""

    def __init__(self, question_id: int) -> None:
        self._question_id = question_id
        self.questions: Counter[int] = Counter()
        self.right: Counter[int] = Counter()
        self.num_words = self.right_words = 0

    def add(self, predictions_BL: np.ndarray, batch: Mapping[str, np.ndarray]) -> None:
        """Count a batch; the label at a "?" is its answer. Raises: KeyError for a batch without the column `task`."""
        inputs_BL, labels_BL, task_BL = (np.asarray(batch[column]) for column in ("input_ids", "labels", "task"))
        is_word_BL = labels_BL != IGNORED_LABEL
        is_right_BL = (predictions_BL == labels_BL) & is_word_BL
        is_question_BL = (inputs_BL == self._question_id) & is_word_BL
        self.num_words += int(is_word_BL.sum())
        self.right_words += int(is_right_BL.sum())
        self.questions.update(task_BL[is_question_BL].tolist())
        self.right.update(task_BL[is_question_BL & is_right_BL].tolist())

    @property
    def accuracy(self) -> float | None:
        """Over all questions alike, the headline of the benchmark."""
        return self.right.total() / self.questions.total() if self.questions else None

    def values(self) -> dict[str, Any]:
        tasks = sorted(self.questions)
        return {
            "accuracy": self.accuracy,
            "accuracy_by_task": {str(task): self.right[task] / self.questions[task] for task in tasks},
            "num_questions": self.questions.total(),
            "num_questions_by_task": {str(task): self.questions[task] for task in tasks},
            "lm_accuracy": self.right_words / self.num_words if self.num_words else None,
        }


def evaluate_catbabi(job: EvaluationJob, question_id: int) -> Evaluation:
    """Accuracy at every "?" and over all words, by argmax over the whole vocabulary. Raises: EvaluationOutOfMemory."""
    tally, losses, solver = AnswerTally(question_id), LossTally(), SolverTally()
    num_nonfinite = 0
    progress = Progress(job.where, job.num_samples)
    for start, batch, answer in answers(job, _read):
        batch_size, length = np.asarray(batch["labels"]).shape
        if answer is None:
            num_nonfinite += batch_size
            continue
        predictions_BL, totals_B, stats = answer
        num_nonfinite += int((~np.isfinite(totals_B)).sum())
        tally.add(predictions_BL, batch)
        losses.add(float(totals_B.sum()), int((np.asarray(batch["labels"]) != IGNORED_LABEL).sum()))
        solver.add(stats, (batch_size, length))
        progress.tell(start + batch_size, lambda: _words(tally, solver))
    values = tally.values() | {"lm_perplexity": losses.perplexity, "num_samples": job.num_samples}
    values["nonfinite_share"] = num_nonfinite / job.num_samples
    if num_nonfinite:
        counts = (num_nonfinite, job.num_samples)
        log.warning("%s: %d of %d sequences have a non-finite loss: no accuracy is reported", job.where, *counts)
        values |= dict.fromkeys(("accuracy", "accuracy_by_task", "lm_accuracy", "lm_perplexity"))
    return Evaluation(values | solver.values(job.is_implicit))


def _read(out: Any, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, Any]:
    """Predictions (B, L), sum of the losses of each row (B,), the solver's statistics."""
    totals_B = token_losses(out.logits, np.asarray(batch["labels"])).double().sum(dim=1)
    return out.logits.argmax(dim=-1).cpu().numpy(), totals_B.cpu().numpy(), getattr(out, "solver_stats", None)


def _words(tally: AnswerTally, solver: SolverTally) -> str:
    accuracy = tally.accuracy
    shown = "no question yet" if accuracy is None else f"accuracy at questions {accuracy:.3f}"
    return f"{shown}, {solver.f_evaluations_per_token or 0:.1f} f-evaluations per token"
