"""Accuracy on word problems: one trained model on every test set it is given, in every mode.

A model that tracks no state scores the share of the most frequent answer at each position, its chance level. A token's
group part is uniform over the whole group with probability h (`hard_fraction`) and the identity otherwise, so after t
tokens the product is the identity with probability (1 - h)^t + (1 - (1 - h)^t) / |G|: above 1 / |G| when the sequence
is short or h small.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from implicit_llm.evaluation.answers import Evaluation, EvaluationJob, answers
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
from implicit_llm.evaluation.tallies import SolverTally
from implicit_llm_contracts.config.evaluation import PARALLEL, SEQUENTIAL, EvaluateConfig, ModeConfig, modes_of
from implicit_llm_contracts.config.tasks import LAST_TOKENS
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.stage_context import Input, StageContext, StageResult
from implicit_llm_data.groups import load_group, load_monoid
from implicit_llm_data.shards import open_dataset
from implicit_llm_jobs.progress import Progress

__all__ = ["reads_of_inputs", "run"]

TRACKED = ("accuracy_last10", "f_evaluations_per_token", "unconverged_share")


@dataclass(frozen=True)
class TestSet:
    """A role of the command line with what lies behind it."""

    role: str
    task: Task
    source: Input


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm evaluate`: writes metrics.json. Raises: UserError."""
    config = fill(EvaluateConfig, context.config, f"evaluate/{context.name}")
    modes = modes_of(config.modes, config.sweep, f"evaluate/{context.name}")
    trained = model_input(context)
    test_sets = list(_test_sets(context, config.lengths))
    model = load_model(trained, context.runtime)
    runner = ModeRunner(model, modes, PartialResults(context.work / "partial"), context.runtime, {})
    about = {"kind": config.kind, **about_model(model, trained), **_trained_on(trained)}
    records: list[Record] = []
    for test_set in test_sets:
        records += _evaluate_data(runner, test_set, about)
        context.journal.metrics(len(records), tracked(records, TRACKED, _label))
    metrics = write_metrics(context.work, records)
    runner.partial.discard()
    accuracy = by_data_and_mode(records, "accuracy_last10", _label)
    summary = {"accuracy_last10": accuracy, "best_accuracy_last10": best_of(accuracy, max)}
    return StageResult(files=[metrics], summary=summary)


def _evaluate_data(runner: ModeRunner, test_set: TestSet, about: Mapping[str, Any]) -> list[Record]:
    """The records of one data set, in the order of the modes."""
    dataset = open_dataset(test_set.source.work)
    batch_size = default_batch_size(dataset.length, next(runner.model.parameters()).device.type)
    results = runner.results(test_set.role, dataset, evaluate_word_problem, default_batch_size=batch_size)
    sequential = _sequential(runner.modes, results)
    described = {"data": test_set.role, **test_set.task.record(), **about}
    return [
        described
        | {"mode": mode.name}
        | results[mode.name].values
        | {"token_match_sequential": match(results[mode.name], sequential)}
        for mode in runner.modes
    ]


def _sequential(modes: tuple[ModeConfig, ...], results: Mapping[str, Evaluation]) -> Evaluation | None:
    """The result in sequential mode, against which the others are compared token by token."""
    return next((results[mode.name] for mode in modes if mode.eval_mode == SEQUENTIAL and mode.name != PARALLEL), None)


def _trained_on(trained: Input) -> dict[str, Any]:
    return {"train_hard_fraction": (trained.manifest.summary.get("data") or {}).get("hard_fraction")}


def _test_sets(context: StageContext, lengths: tuple[int, ...] | None) -> Iterator[TestSet]:
    """The test sets of these lengths, shortest sequences first. Raises: EvaluateInputError for a length none has."""
    sets = [TestSet(role, task_of(source.manifest), source) for role, source in data_inputs(context).items()]
    present = sorted({item.task.length for item in sets})
    missing = [length for length in lengths or () if length not in present]
    if missing:
        raise EvaluateInputError(
            f"evaluate/{context.name}.lengths: no test set has sequences of {missing[0]} tokens; there are "
            f"{', '.join(map(str, present))}: add the length to the data's test lengths, or take it out"
        )
    chosen = [item for item in sets if lengths is None or item.task.length in lengths]
    yield from sorted(chosen, key=lambda item: (item.task.length, item.role))


def _label(record: Record) -> str:
    return record["data"]


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


class TaskError(UserError):
    """A manifest does not describe a word problem."""


@dataclass(frozen=True)
class Task:
    """One word problem: products in `group`, times the aperiodic monoid or not, over `length` tokens."""

    group: str
    monoid: str
    length: int
    hard_fraction: float | tuple[float, ...]

    def record(self) -> dict[str, Any]:
        """The task's part of a record of metrics.json, with what a model without state would score."""
        chance = chance_per_position(self.group, self.monoid, self.hard_fraction, self.length)
        return {
            "group": self.group,
            "monoid": self.monoid,
            "length": self.length,
            "hard_fraction": self.hard_fraction,
            "chance_last10": round(float(chance[-LAST_TOKENS:].mean()), 6),
            "chance_per_position": [round(float(share), 6) for share in chance],
        }


def task_of(manifest: Manifest) -> Task:
    """The task of the data run behind `manifest`. Raises: TaskError when it is not a word problem."""
    config = manifest.identity.get("config", {})
    missing = [key for key in ("group", "monoid", "length", "hard_fraction") if key not in config]
    if missing:
        raise TaskError(
            f"data/{manifest.name}: its manifest names no {', '.join(missing)}; "
            "give the run directory of a word-problem data set"
        )
    hard_fraction = config["hard_fraction"]
    if isinstance(hard_fraction, list):
        hard_fraction = tuple(hard_fraction)
    return Task(config["group"], config["monoid"], config["length"], hard_fraction)


def chance_per_position(group: str, monoid: str, hard_fraction: float | Sequence[float], length: int) -> np.ndarray:
    """Share of the most frequent target at each position, shape (length,).

    Several hard fractions mean samples mixed from them in equal shares. The monoid part of a token is uniform.
    Raises: UnknownGroup.
    """
    fractions = np.atleast_1d(np.asarray(hard_fraction, dtype=np.float64))
    untouched = (1.0 - fractions[:, None]) ** np.arange(1, length + 1)
    identity = (untouched + (1.0 - untouched) / load_group(group).order).mean(axis=0)
    return identity * _most_frequent_product(load_monoid(monoid).table, length)


def _most_frequent_product(table: np.ndarray, length: int) -> np.ndarray:
    """Share of the most frequent product of t uniform elements, for t = 1 .. length."""
    order = len(table)
    share = np.full(order, 1.0 / order)
    largest = np.empty(length)
    for position in range(length):
        largest[position] = share.max()
        following = np.zeros(order)
        np.add.at(following, table, share[:, None] / order)
        share = following
    return largest


@dataclass
class AccuracyTally:
    """Right answers over the batches of one data set of sequences of `length` tokens."""

    length: int
    num_samples: int = 0
    num_nonfinite_samples: int = 0
    right_sequences: int = 0
    right_per_position: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.right_per_position = np.zeros(self.length, dtype=np.int64)

    def add(self, predictions_BL: np.ndarray, labels_BL: np.ndarray, is_finite_B: np.ndarray) -> None:
        """Count a batch; a sequence with a NaN or infinite logit has no prediction that could be counted."""
        is_right_BL = predictions_BL == labels_BL
        self.num_samples += len(labels_BL)
        self.num_nonfinite_samples += int((~is_finite_B).sum())
        self.right_per_position += is_right_BL.sum(axis=0)
        self.right_sequences += int(is_right_BL.all(axis=1).sum())

    def add_nonfinite(self, num_samples: int) -> None:
        """Count sequences for which the model gave no logits at all."""
        self.num_samples += num_samples
        self.num_nonfinite_samples += num_samples

    @property
    def has_result(self) -> bool:
        """Whether there is an accuracy to speak of: at least one sample, and no sample with non-finite logits."""
        return self.num_samples > 0 and self.num_nonfinite_samples == 0

    def last(self, count: int = LAST_TOKENS) -> float | None:
        """Share of right answers on the last `count` tokens (on all of them when the sequence is shorter)."""
        return float(self._shares()[-count:].mean()) if self.has_result else None

    def values(self) -> dict[str, object]:
        """The accuracies of a record of metrics.json; None where there is no number (never 0)."""
        if not self.has_result:
            keys = ("accuracy_last10", "accuracy_sequence", "accuracy_token", "accuracy_per_position")
            return dict.fromkeys(keys)
        shares = self._shares()
        return {
            "accuracy_last10": self.last(),
            "accuracy_sequence": self.right_sequences / self.num_samples,
            "accuracy_token": float(shares.mean()),
            "accuracy_per_position": [round(float(share), 6) for share in shares],
        }

    def _shares(self) -> np.ndarray:
        return self.right_per_position / self.num_samples
