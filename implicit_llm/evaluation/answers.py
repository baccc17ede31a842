"""Run a model over the sequences of a data set in batches that fit into memory, and count the results.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_llm_contracts.errors import UserError, is_out_of_memory
from implicit_llm_data.shards import IGNORED_LABEL, Sequences
from implicit_llm_jobs.progress import ProgressLog

log = logging.getLogger(__name__)

LOSS_TOKENS = 4096  # the tokens whose logits are converted to fp32 at once: 0.8 GB at a vocabulary of 50,000
T = TypeVar("T")
Batch = dict[str, np.ndarray]  # the columns of some sequences, by name


class UnknownToken(UserError):
    """The data has a token that the model does not have."""


@dataclass
class EvaluationJob:
    """A job that evaluates one model on the first `num_samples` sequences of a data set.

    where: data set and mode, for the log. precision: bf16 runs the model under autocast; losses are always fp32. kept:
    a folder for the finished pieces of a long batch, deleted when the result is stored; None stores no pieces.
    """

    model: torch.nn.Module
    dataset: Sequences
    num_samples: int
    batch_size: EvaluationBatchSize
    where: str
    precision: Literal["fp32", "bf16"] = "fp32"
    kept: Path | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass
class EvaluationResult:
    """The result of one model on one data set in one mode: its values and any stored predictions (samples, L)."""

    values: dict[str, Any]
    predictions_NL: np.ndarray | None = None


class Tally(Protocol):
    """A tally of results; `measures`: the values that become None if the result of any sequence is NaN or infinite."""

    measures: tuple[str, ...]

    def add(self, answer: Any, batch: Batch) -> int:
        """Count a batch with its result `answer`, which is None if the evaluation became NaN or infinite.

        Return how many sequences of the batch have no finite result.
        """

    def values(self) -> dict[str, Any]:
        """Return the fields of a record that the tally determines."""

    def shown(self) -> str:
        """Return the text for a line of progress."""


def tallied(
    job: EvaluationJob,
    tally: Tally,
    read: Callable[[Any, Batch], Any],
    ask: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Evaluate all sequences; return the values of `tally`, the solver's cost, and `nonfinite_share` for a record.

    If the result of any sequence is NaN or infinite, all `tally.measures` are None. read: maps the model's output and
    the batch to the result that `tally` counts. ask: see `answers`.
    Raises: EvaluationOutOfMemory, UnknownToken.
    """
    solver, progress, num_nonfinite = SolverTally(), ProgressLog(job.where, "sample", job.num_samples), 0

    def shown() -> str:
        so_far = "not finite" if num_nonfinite else tally.shown()
        return f"{so_far}, {solver.f_evaluations_per_token or 0:.1f} f-evaluations per token"

    both = answers(job, lambda out, batch: (read(out, batch), getattr(out, "solver_stats", None)), ask)
    for num_read, batch, answer in both:
        found, stats = answer or (None, None)
        num_nonfinite += tally.add(found, batch)
        if answer is not None:
            solver.add(stats, np.shape(batch["labels"]))
        progress.tell(num_read, shown)
    values = tally.values() | solver.values()
    values["nonfinite_share"] = num_nonfinite / job.num_samples if job.num_samples else None
    if num_nonfinite:
        counts = (num_nonfinite, job.num_samples)
        log.warning("%s: %d of %d sequences are not finite: no result is reported", job.where, *counts)
        values |= dict.fromkeys(tally.measures)
    return values


def answers(
    job: EvaluationJob,
    read: Callable[[Any, Batch], T],
    ask: Callable[..., Any] | None = None,
    start: int = 0,
) -> Iterator[tuple[int, Batch, T | None]]:
    """Evaluate from sequence `start` on; yield (the next sequence's number, batch, result of `read`).

    ask: replaces the model, for example to run several modes; its argument is `input_ids`. The result is None for a
    batch whose iteration became NaN or infinite. If a batch exceeds the memory, its and later sequences are evaluated
    in batches of half the size, until a larger size is tried again. Raises: EvaluationOutOfMemory, UnknownToken.
    """
    job.model.eval()
    while start < job.num_samples:
        batch = job.dataset.fetch(np.arange(start, min(start + job.batch_size.size, job.num_samples)))
        columns = [column for column in ("input_ids", "labels") if column in batch]
        check_tokens(job.model, max(int(np.max(batch[column], initial=-1)) for column in columns), job.where)
        answer: T | None
        try:
            is_cast = job.precision == "bf16"
            with torch.inference_mode(), torch.autocast(job.device.type, torch.bfloat16, enabled=is_cast):
                input_ids = torch.as_tensor(batch["input_ids"], dtype=torch.long, device=job.device)
                answer = read((ask or job.model)(input_ids=input_ids), batch)
        except FloatingPointError as error:
            log.warning("%s: %s", job.where, error)
            answer = None
        except RuntimeError as error:
            job.batch_size.halve(error, job.where)
            continue
        job.batch_size.grow(job.where)
        start += len(batch["input_ids"])
        yield start, batch, answer


def check_tokens(model: Any, highest: int, where: str) -> None:
    """Raise UnknownToken if `highest` is outside the vocabulary; a model would crash or use a wrong embedding."""
    num_known = getattr(getattr(model, "config", None), "vocab_size", None)
    if num_known is not None and highest >= num_known:
        raise UnknownToken(
            f"{where}: the data has token {highest} and the model knows {num_known}; evaluate it on data that was "
            "encoded as its training data were"
        )


def token_losses(states_BLD: Tensor, labels_BL: np.ndarray, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the fp32 cross entropy (B, L), in nats, of the logits and label at each position; 0 for IGNORED_LABEL.

    head: the module that computes logits from `states_BLD`; None if `states_BLD` already are logits.
    """
    batch, length = labels_BL.shape
    labels = torch.as_tensor(labels_BL, dtype=torch.long, device=states_BLD.device)
    losses_BL = torch.empty(batch, length, dtype=torch.float32, device=states_BLD.device)
    for part in pieces(length, batch):
        logits_BLV = states_BLD[:, part] if head is None else head(states_BLD[:, part])
        logits = logits_BLV.flatten(0, 1).float()
        losses = F.cross_entropy(logits, labels[:, part].flatten(), reduction="none", ignore_index=IGNORED_LABEL)
        losses_BL[:, part] = losses.view(batch, -1)
    return losses_BL


def pieces(length: int, num_rows: int) -> list[slice]:
    """Cut `length` positions into slices, so that each has at most LOSS_TOKENS tokens of `num_rows` sequences together.

    If there are more sequences than LOSS_TOKENS, a slice has one position.
    """
    step = max(1, LOSS_TOKENS // num_rows)
    return [slice(start, start + step) for start in range(0, length, step)]


class EvaluationOutOfMemory(UserError):
    """The smallest allowed batch does not fit into memory."""


GOOD_BATCHES = 8  # in a row, before a halved size is doubled again


@dataclass
class EvaluationBatchSize:
    """The number of sequences per batch, which is halved when memory runs out unless results depend on it.

    The memory may be short only for a while, for example beside a training job. A halved size is therefore doubled
    again after GOOD_BATCHES batches, up to the first size. Each time that a doubled size fails, the next attempt waits
    for twice as many batches, so failures become rare where the memory stays short.
    """

    size: int
    is_fixed: bool = False

    def __post_init__(self) -> None:
        self._largest, self._wait = self.size, GOOD_BATCHES
        self._num_good, self._was_doubled = 0, False

    def grow(self, where: str) -> None:
        """Count a batch that fitted; double a halved size after enough of them."""
        self._num_good += 1
        if self.size < self._largest and self._num_good >= self._wait:
            self.size, self._num_good, self._was_doubled = min(2 * self.size, self._largest), 0, True
            log.info("%s: trying batches of %d sequences again", where, self.size)

    def halve(self, error: RuntimeError, where: str) -> None:
        """Halve the size after an out-of-memory error.

        Raises: EvaluationOutOfMemory if the size cannot be halved; `error` if it has another cause.
        """
        if not is_out_of_memory(error):
            raise error
        if self.is_fixed or self.size == 1:
            raise EvaluationOutOfMemory(
                f"{where}: out of memory at batch size {self.size}; use a device with more memory, or set a smaller "
                "batch_size where it belongs to the mode's stopping rule"
            ) from error
        self.size //= 2
        if self._was_doubled:
            self._wait *= 2
        self._num_good, self._was_doubled = 0, False
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the failed attempt
        torch.cuda.empty_cache()
        log.warning("%s: out of memory, going on with batches of %d sequences", where, self.size)


@dataclass
class SolverTally:
    """The sums of the solver's statistics over tokens; an explicit model has only one evaluation of f per token."""

    evaluations: float = 0.0  # evaluations of f, summed over the tokens
    iterations: float = 0.0  # the solver's iterations among these, without closing, phantom and unrolled steps
    residual_max: float | None = None
    unconverged_tokens: int = 0
    num_tokens: int = 0

    def add(self, stats: Any, shape: tuple[int, int]) -> None:
        """Count a batch of `shape` (B, L)."""
        self.num_tokens += shape[0] * shape[1]
        if stats is None:
            self.evaluations += shape[0] * shape[1]
            return
        self.evaluations += float(stats.f_evaluations.double().sum()) * shape[1]
        self.iterations += float(stats.num_iter.double().sum()) * shape[1]
        self.unconverged_tokens += int(stats.unconverged_tokens.sum())
        residual = float(stats.residual.max())
        self.residual_max = float(np.maximum(self.residual_max or 0.0, residual))  # propagates NaN

    @property
    def f_evaluations_per_token(self) -> float | None:
        return finite(self.evaluations / self.num_tokens) if self.num_tokens else None

    def values(self) -> dict[str, float | None]:
        """Return the solver's part of a record of metrics.json; `residual` is the largest; unknown values are None."""
        residual, num_tokens = self.residual_max, self.num_tokens
        is_unknown = residual is None or math.isnan(residual)
        return {
            "iterations_per_token": None if residual is None else finite(self.iterations / num_tokens),
            "residual": None if residual is None else finite(residual),
            "unconverged_share": None if is_unknown else self.unconverged_tokens / num_tokens,
            "f_evaluations_per_token": self.f_evaluations_per_token,
        }


def finite(value: float) -> float | None:
    """Return the value with six significant digits, or None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


BINS_PER_OCTAVE = 4  # position bins per doubling; 52 bins for sequences of 16,384 tokens


@dataclass
class LossTally:
    """The fp64 sum of losses over tokens; the mean over all tokens does not depend on the batches."""

    total: float = 0.0
    num_tokens: int = 0

    def add(self, total: float, num_tokens: int) -> None:
        self.total += total
        self.num_tokens += num_tokens

    @property
    def loss(self) -> float | None:
        """The mean loss in nats per token; None without tokens, or if a token's loss was not finite."""
        return self.total / self.num_tokens if self.num_tokens and math.isfinite(self.total) else None

    @property
    def perplexity(self) -> float | None:
        loss = self.loss
        return None if loss is None or loss > math.log(1e300) else math.exp(loss)


class PositionTally:
    """The sum of losses and the number of tokens at each position of sequences of `length` tokens."""

    def __init__(self, length: int) -> None:
        self.total_L = np.zeros(length)
        self.num_tokens_L = np.zeros(length, dtype=np.int64)

    def add(self, losses_BL: np.ndarray, counted_BL: np.ndarray) -> None:
        """Count a batch of sequences, which may be shorter than `length`; losses must be 0 where not counted."""
        length = losses_BL.shape[1]
        self.total_L[:length] += losses_BL.sum(axis=0)
        self.num_tokens_L[:length] += counted_BL.sum(axis=0)

    def values(self) -> dict[str, list[Any]]:
        """Return the curve: each bin's first and last position, counted from 1, its mean loss and its number of tokens.

        The target at position p has p tokens before it. Every `length` has the same bins up to its end, where the last
        bin ends.
        """
        starts = position_bins(len(self.total_L))
        totals, counts = (np.add.reduceat(values_L, starts - 1) for values_L in (self.total_L, self.num_tokens_L))
        ends = [*(starts[1:] - 1).tolist(), len(self.total_L)]
        means = [finite(total / count) if count else None for total, count in zip(totals, counts, strict=True)]
        return {"start": starts.tolist(), "end": ends, "loss": means, "num_tokens": counts.tolist()}


def position_bins(length: int) -> np.ndarray:
    """Return the first positions of the bins: 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, ..., up to four per doubling."""
    octaves = math.log2(length)
    powers = 2.0 ** (np.arange(math.floor(octaves * BINS_PER_OCTAVE) + 1) / BINS_PER_OCTAVE)
    return np.unique(np.rint(powers).astype(np.int64))
