"""Evaluate a model on CatbAbI in every mode, with the protocol "windowed", "carried" or both.

The results are the accuracy at questions, and accuracy and perplexity over all words.

windowed: the model evaluates each sequence of the data set from an empty state. A sequence is a window of the
concatenated stories, so a question near its start may lack the facts before it. All models evaluate the same windows.

carried: the published protocol, with batch size 1. The stories form one long sequence in the order of the data set. The
state is carried across the ends of windows and stories and never reset. The model still evaluates one window at a time;
an implicit model solves each window from the converged state after all earlier windows. Only a Mamba2 model of this
package has a result: the cache of a model with attention would contain the whole test set. The protocol is slow, and no
choice depends on its results. Therefore it evaluates only the test set, or all given sets if there is no test set.
"""

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from implicit_llm.evaluation.answers import (
    Batch,
    EvaluationBatchSize,
    EvaluationJob,
    EvaluationResult,
    LossTally,
    Tally,
    tallied,
    token_losses,
)
from implicit_llm.evaluation.frame import (
    ModelEvaluation,
    Record,
    data_inputs,
    rows_of,
)
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.mamba2.model import ImplicitMamba2ForCausalLM
from implicit_llm_contracts.config.evaluation import COSTS, CatbabiEvaluation
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.babi.stories import PAD_ID, VOCABULARY_NAME
from implicit_llm_data.shards import IGNORED_LABEL, Sequences, TokenDataset, open_dataset

log = logging.getLogger(__name__)

BATCH_TOKENS = 16384
QUESTION_MARK = "?"
CARRIED, TEST = "carried", "test"


def run(context: StageContext) -> StageResult:
    """Run an evaluation job: write metrics.json. Raises: UserError."""
    config = context.settings(CatbabiEvaluation)
    datasets = {role: open_dataset(source.work) for role, source in data_inputs(context).items()}
    questions = {role: question_id(dataset) for role, dataset in datasets.items()}
    splits = {role: source.manifest.config.get("split") for role, source in data_inputs(context).items()}
    evaluation = ModelEvaluation(context, config, ("accuracy", "lm_accuracy", "lm_perplexity", *COSTS), _place)
    for role, protocol in itertools.product(datasets, config.protocols):
        if protocol == CARRIED and splits[role] != TEST and TEST in splits.values():
            continue
        length = datasets[role].length
        rows: Any = datasets[role]
        evaluate: Any = evaluate_catbabi
        size, limit = rows_of(BATCH_TOKENS, length), None
        if protocol == CARRIED:
            rows, evaluate, size = StoriesInOrder(rows), evaluate_carried, 1
            limit = rows_of(config.carried_max_tokens, length) if carries_state(evaluation.model) else 0
        if limit == 0:
            log.warning(
                "%s: %s has no state of fixed size that could be carried from window to window; the protocol carried "
                "is missing: use a Mamba2 model, or take carried out of `protocols`",
                role,
                evaluation.about["model_type"],
            )
        described = {"protocol": protocol, "data": role, "length": length}
        ask = partial(evaluate, question_id=questions[role])
        results = evaluation.in_each_mode(_place(described)[0], rows, ask, batch_size=size, max_samples=limit)
        evaluation.add(described, results)
    return evaluation.finish(evaluation.headline("accuracy", max))


def question_id(dataset: TokenDataset) -> int:
    """Return the token id of "?", which is its position in the data set's vocabulary file."""
    words: list[str] = json.loads((dataset.directory / VOCABULARY_NAME).read_text(encoding="utf-8"))
    return words.index(QUESTION_MARK)


def _place(record: Record) -> tuple[str, str]:
    data = record["data"]
    return f"{data}.{CARRIED}" if record["protocol"] == CARRIED else data, record.get("mode", "")


def evaluate_catbabi(job: EvaluationJob, question_id: int, ask: Callable[..., Any] | None = None) -> EvaluationResult:
    """Compute the accuracy at every "?", and accuracy and perplexity over all words.

    A prediction may be any word of the vocabulary. Raises: EvaluationOutOfMemory, UnknownToken.
    """
    return EvaluationResult(tallied(job, AnswerTally(question_id), _read, ask) | {"num_samples": job.num_samples})


def _read(out: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return predictions and losses, both (B, L)."""
    losses_BL = token_losses(out.logits, batch["labels"]).double()
    return out.logits.argmax(dim=-1).cpu().numpy(), losses_BL.cpu().numpy()


def carries_state(model: nn.Module) -> bool:
    """Return whether the carried protocol supports the model; it supports only a Mamba2 of this package."""
    return isinstance(model, ImplicitMamba2ForCausalLM)


class StoriesInOrder:
    """The sequences of a data set, which `fetch` returns one at a time; each continues the previous one."""

    def __init__(self, dataset: Sequences) -> None:
        self.length = dataset.length
        self.vocab_size = dataset.vocab_size
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, indices: np.ndarray) -> Batch:
        """Return the sequence at the first of `indices`, (1, length); the last sequence is shorter by its padding."""
        batch = self._dataset.fetch(indices[:1])
        end = np.count_nonzero(batch["input_ids"] != PAD_ID)
        return {name: values_BL[:, :end] for name, values_BL in batch.items()}


def evaluate_carried(job: EvaluationJob, question_id: int) -> EvaluationResult:
    """Evaluate the windows in their order, with a carried state. Raises: EvaluationOutOfMemory, UnknownToken."""
    one_by_one = replace(job, batch_size=EvaluationBatchSize(1, is_fixed=True))
    return evaluate_catbabi(one_by_one, question_id, partial(job.model, past_key_values=ConvergedStateCache()))


class AnswerTally(Tally):
    """A tally, for each task, of questions, correct answers, words, correct words, and the losses of the words."""

    measures = (
        "accuracy", "accuracy_by_task", "lm_accuracy", "lm_accuracy_by_task", "lm_perplexity", "lm_perplexity_by_task",
    )  # fmt: skip

    def __init__(self, question_id: int) -> None:
        self._question_id = question_id
        self._sums: dict[int, np.ndarray] = {}

    def add(self, answer: tuple[np.ndarray, np.ndarray] | None, batch: Batch) -> int:
        """Count a batch; the label at a "?" is the answer, and a label counts for the task of its input token.

        Raises: KeyError for a batch without the column `task`.
        """
        inputs_BL, labels_BL, task_BL = (batch[column] for column in ("input_ids", "labels", "task"))
        if answer is None:
            return len(labels_BL)
        predictions_BL, losses_BL = answer
        is_word_BL = labels_BL != IGNORED_LABEL
        is_right_BL = predictions_BL == labels_BL
        is_question_BL = inputs_BL == self._question_id
        columns = (is_question_BL, is_question_BL & is_right_BL, is_word_BL, is_right_BL, losses_BL)
        for task in np.unique(task_BL[is_word_BL]).tolist():
            mine_BL = is_word_BL & (task_BL == task)
            sums = self._sums.setdefault(task, np.zeros(len(columns)))
            sums += [column_BL[mine_BL].sum() for column_BL in columns]
        return int((~np.isfinite(losses_BL).all(axis=1)).sum())

    def values(self) -> dict[str, Any]:
        questions, right, words, right_words, loss = sum(self._sums.values(), np.zeros(5)).tolist()
        by_task = {str(task): self._sums[task].tolist() for task in sorted(self._sums)}
        asked = {task: sums for task, sums in by_task.items() if sums[0]}
        return {
            "accuracy": right / questions if questions else None,
            "accuracy_by_task": {task: sums[1] / sums[0] for task, sums in asked.items()},
            "num_questions": int(questions) or None,
            "num_questions_by_task": {task: int(sums[0]) for task, sums in asked.items()},
            "lm_accuracy": right_words / words if words else None,
            "lm_accuracy_by_task": {task: sums[3] / sums[2] for task, sums in by_task.items()},
            "lm_perplexity": LossTally(loss, int(words)).perplexity,
            "lm_perplexity_by_task": {task: LossTally(s[4], int(s[2])).perplexity for task, s in by_task.items()},
            "num_words": int(words) or None,
            "num_words_by_task": {task: int(sums[2]) for task, sums in by_task.items()},
        }

    def shown(self) -> str:
        accuracy = self.values()["accuracy"]
        return "no question yet" if accuracy is None else f"accuracy at questions {accuracy:.3f}"
