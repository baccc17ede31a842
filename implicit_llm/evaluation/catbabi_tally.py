"""Counting right answers and next words of CatbAbI, in all and by task; no model and no solver here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from implicit_llm.evaluation.loss_tally import LossTally
from implicit_llm_data.shard_format import IGNORED_LABEL

MEASURES = (
    "accuracy", "accuracy_by_task", "lm_accuracy", "lm_accuracy_by_task", "lm_perplexity", "lm_perplexity_by_task",
)  # fmt: skip
COUNTS = ("num_questions", "num_questions_by_task", "num_words", "num_words_by_task")


class AnswerTally:
    """Right answers among the questions, right words among all, and the losses of the words."""

    def __init__(self, question_id: int) -> None:
        self._question_id = question_id
        self.questions: Counter[int] = Counter()
        self.right: Counter[int] = Counter()
        self.words: Counter[int] = Counter()
        self.right_words: Counter[int] = Counter()
        self._losses: dict[int, LossTally] = {}

    def add(self, predictions_BL: np.ndarray, losses_BL: np.ndarray, batch: Mapping[str, np.ndarray]) -> None:
        """Count a batch; the label at a "?" is its answer. Raises: KeyError for a batch without the column `task`."""
        inputs_BL, labels_BL, task_BL = (np.asarray(batch[column]) for column in ("input_ids", "labels", "task"))
        is_word_BL = labels_BL != IGNORED_LABEL
        is_right_BL = (predictions_BL == labels_BL) & is_word_BL
        is_question_BL = (inputs_BL == self._question_id) & is_word_BL
        self.questions.update(task_BL[is_question_BL].tolist())
        self.right.update(task_BL[is_question_BL & is_right_BL].tolist())
        self.words.update(task_BL[is_word_BL].tolist())
        self.right_words.update(task_BL[is_right_BL].tolist())
        for task in np.unique(task_BL[is_word_BL]).tolist():
            mine_BL = is_word_BL & (task_BL == task)
            self._losses.setdefault(task, LossTally()).add(float(losses_BL[mine_BL].sum()), int(mine_BL.sum()))

    @property
    def accuracy(self) -> float | None:
        """Over all questions alike, the headline of the benchmark."""
        return self.right.total() / self.questions.total() if self.questions else None

    def values(self) -> dict[str, Any]:
        """The measures and counts of a record; the label of a word counts to the task of the story it is read in."""
        losses = LossTally()
        for mine in self._losses.values():
            losses.add(mine.total, mine.num_tokens)
        return {
            "accuracy": self.accuracy,
            "accuracy_by_task": _shares(self.right, self.questions),
            "num_questions": self.questions.total(),
            "num_questions_by_task": _by_task(self.questions),
            "lm_accuracy": self.right_words.total() / self.words.total() if self.words else None,
            "lm_accuracy_by_task": _shares(self.right_words, self.words),
            "lm_perplexity": losses.perplexity,
            "lm_perplexity_by_task": {str(task): self._losses[task].perplexity for task in sorted(self._losses)},
            "num_words": self.words.total(),
            "num_words_by_task": _by_task(self.words),
        }


def _shares(right: Counter[int], asked: Counter[int]) -> dict[str, float]:
    return {str(task): right[task] / asked[task] for task in sorted(asked)}


def _by_task(counts: Counter[int]) -> dict[str, int]:
    return {str(task): counts[task] for task in sorted(counts)}
