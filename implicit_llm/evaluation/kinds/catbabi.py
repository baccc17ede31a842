"""CatbAbI: one model answers questions and predicts words, in every mode, by one or both of two protocols.

windowed: each row of the data set is read from an empty state. A row is a window of the concatenated stories, so that a
question near its start may lack the facts before it; all models read the same windows.

carried: the published protocol, batch 1. The stories are read in the order of the file as one long row, and the state
goes on over the ends of windows and stories, never reset. What is read at a time is still a window, in which an
implicit model is solved in its mode, after the converged state of all that went before. A model with attention has no
state of fixed size, its cache would hold the whole test set: it has no number here.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial as bind
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from implicit_llm.evaluation.answers import BatchSize, Evaluation, EvaluationJob, answers, token_losses
from implicit_llm.evaluation.inputs import (
    EvaluateInputError,
    about_model,
    data_inputs,
    load_model,
    model_input,
    reads_of_inputs,
)
from implicit_llm.evaluation.metrics_file import Record, best_of, by_data_and_mode, tracked, write_metrics
from implicit_llm.evaluation.modes import ModeRunner, PartialResults
from implicit_llm.evaluation.tallies import LossTally, SolverTally
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.causal_lm import ImplicitMamba2ForCausalLM
from implicit_llm_contracts.config.evaluation import CatbabiConfig, modes_of
from implicit_llm_contracts.config.solver import solver_of
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.babi.story_batches import StoryBatcher, StoryStream
from implicit_llm_data.shard_format import IGNORED_LABEL
from implicit_llm_data.shards import open_dataset
from implicit_llm_jobs.progress import Progress

__all__ = ["reads_of_inputs", "run"]

log = logging.getLogger(__name__)

BATCH_TOKENS = 16384
TRACKED = ("accuracy", "lm_accuracy", "lm_perplexity", "f_evaluations_per_token", "unconverged_share")
VOCABULARY_FILE = "vocabulary.json"  # beside the rows


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm evaluate`: writes metrics.json. Raises: UserError."""
    config = fill(CatbabiConfig, context.config, f"evaluate/{context.name}")
    modes = modes_of(config.modes, config.sweep, f"evaluate/{context.name}")
    trained = model_input(context)
    datasets = {role: open_dataset(source.work) for role, source in data_inputs(context).items()}
    questions = {role: question_id(dataset) for role, dataset in datasets.items()}
    model = load_model(trained, context.runtime)
    partial = PartialResults(context.work / "partial")
    runner = ModeRunner(model, modes, partial, context.runtime, {})
    about = about_model(model, trained)
    records: list[Record] = []
    for role, dataset in datasets.items():
        for protocol in config.protocols:
            results = _results(runner, role, dataset, questions[role], (protocol, config.carried_max_tokens))
            described = {"kind": config.kind, "protocol": protocol, "data": role, "length": dataset.length, **about}
            records += [described | {"mode": name} | result.values for name, result in results.items()]
            context.journal.metrics(len(records), tracked(records, TRACKED, _label))
    metrics = write_metrics(context.work, records)
    partial.discard()
    accuracy = by_data_and_mode(records, "accuracy", _label)
    return StageResult([metrics], {"accuracy": accuracy, "best_accuracy": best_of(accuracy, max)})


def _results(
    runner: ModeRunner, role: str, dataset: Any, question: int, how: tuple[str, int | None]
) -> Mapping[str, Evaluation]:
    """The result of a protocol in each mode, `how` being its name and carried_max_tokens.

    Without numbers where the protocol is "carried" and the model has no state to carry.
    """
    protocol, max_tokens = how
    if protocol == WINDOWED:
        evaluate, size = bind(evaluate_catbabi, question_id=question), max(1, BATCH_TOKENS // dataset.length)
        return runner.results(role, dataset, evaluate, default_batch_size=size)
    if not carries_state(runner.model):
        log.warning(
            "%s: %s has no state of fixed size that could be carried from window to window; the protocol carried is "
            "missing: use a Mamba2 model, or take carried out of `protocols`",
            role,
            getattr(runner.model.config, "model_type", "the model"),
        )
        solver = solver_of(runner.model)
        return {mode.name: Evaluation(mode.record(solver) | no_answers().values) for mode in runner.modes}
    stories = StoriesInOrder(dataset.directory, dataset.length, dataset.vocab_size)
    max_windows = None if max_tokens is None else max(1, max_tokens // dataset.length)
    evaluate = bind(evaluate_carried, question_id=question)
    return runner.results(f"{role}.{protocol}", stories, evaluate, default_batch_size=1, max_samples=max_windows)


def question_id(dataset: Any) -> int:
    """The token of "?" by the vocabulary beside the rows. Raises: EvaluateInputError when there is none."""
    path = dataset.directory / VOCABULARY_FILE
    words = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    if QUESTION_MARK not in words:
        raise EvaluateInputError(
            f"{path}: is missing or has no {QUESTION_MARK!r}, so there are no questions; "
            "give the run directory of a catbabi data set"
        )
    return words.index(QUESTION_MARK)


def _label(record: Record) -> str:
    return record["data"] if record["protocol"] == WINDOWED else f"{record['data']}.{record['protocol']}"


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


def carries_state(model: nn.Module) -> bool:
    """Whether the model has a state of fixed size, however much it has read."""
    return isinstance(model, ImplicitMamba2ForCausalLM)


class StoriesInOrder:
    """The stories of the data set in `directory`, in the order of the file, `length` words at a time."""

    def __init__(self, directory: Path, length: int, vocab_size: int) -> None:
        self.length = length
        self.vocab_size = vocab_size
        self._batcher = StoryBatcher(StoryStream.open(directory), batch_size=1, length=length, order="file")

    def __len__(self) -> int:
        return self._batcher.num_batches(0)

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The first window that is asked for, (1, length); the last one is as short as it comes out."""
        batch = self._batcher.batch(0, int(indices[0]))
        end = int(batch.num_tokens_B[0])
        return {name: getattr(batch, name)[:, :end] for name in ("input_ids", "labels", "task")}


class StateCarrier(nn.Module):
    """A model whose every pass goes on where the one before it ended."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.solver = model.solver
        self._cache = ConvergedStateCache()

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids=input_ids, past_key_values=self._cache)


def evaluate_carried(job: EvaluationJob, question_id: int) -> Evaluation:
    """As `evaluate_catbabi`, over windows in their order, one at a time. Raises: EvaluationOutOfMemory."""
    carried = replace(job, model=StateCarrier(job.model), batch_size=BatchSize(1, is_fixed=True))
    return evaluate_catbabi(carried, question_id)


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
