"""Running a model over the sequences of a data set, in batches that fit.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_llm.evaluation.tallies import SolverTally
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_data.shards import IGNORED_LABEL, Sequences
from implicit_llm_jobs.progress import Progress

log = logging.getLogger(__name__)

LOSS_TOKENS = 4096  # logits of so many tokens at a time are widened to fp32: 0.8 GB for 50,000 tokens of vocabulary
T = TypeVar("T")
Batch = dict[str, np.ndarray]  # the columns of some rows, by name


class UnknownToken(UserError):
    """The data has a token that the model does not know."""


@dataclass
class EvaluationJob:
    """One model on the first `num_samples` rows of one data set, in the model's present mode.

    `where` names data set and mode in the log. `precision` bf16 runs the model under autocast; losses are fp32 always.
    """

    model: torch.nn.Module
    dataset: Sequences
    num_samples: int
    batch_size: BatchSize
    where: str
    precision: Literal["fp32", "bf16"] = "fp32"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass
class Evaluation:
    """One model on one data set in one mode: the record's values, and the predictions (samples, L) where kept."""

    values: dict[str, Any]
    predictions_NL: np.ndarray | None = None


class Tally(Protocol):
    """Counts the answers of a model. `measures`: values that are None once an answer was not finite."""

    @property
    def measures(self) -> tuple[str, ...]: ...

    def add(self, answer: Any, batch: Batch) -> int:
        """Count a batch, None where the model gave no answer; return how many of its rows are not finite."""
        ...

    def values(self) -> dict[str, Any]: ...

    def shown(self) -> str: ...


def tallied(
    job: EvaluationJob,
    tally: Tally,
    read: Callable[[Any, Batch], Any],
    ask: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """The record's values: what `tally` counts of the answers that `read` finds, and the solver's cost.

    `ask` as for `answers`. Raises: EvaluationOutOfMemory, UnknownToken.
    """
    solver, progress, num_nonfinite = SolverTally(), Progress(job.where, job.num_samples), 0

    def shown() -> str:
        so_far = "not finite" if num_nonfinite else tally.shown()
        return f"{so_far}, {solver.f_evaluations_per_token or 0:.1f} f-evaluations per token"

    def read_with_stats(out: Any, batch: Batch) -> tuple[Any, Any]:
        return read(out, batch), getattr(out, "solver_stats", None)

    for num_read, batch, answer in answers(job, read_with_stats, ask):
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
    """Read from sequence `start` on; yield (sequences read so far, batch, what `read` made of the model's output).

    `ask` is called with the tokens in place of the model, such as to run it in several modes. None stands for a batch
    on which the iteration became NaN or infinite. A batch that does not fit is tried again in halves.
    Raises: EvaluationOutOfMemory, UnknownToken.
    """
    job.model.eval()
    while start < job.num_samples:
        batch = job.dataset.fetch(np.arange(start, min(start + job.batch_size.size, job.num_samples)))
        columns = [column for column in ("input_ids", "labels") if column in batch]
        check_tokens(job.model, max(int(np.max(batch[column], initial=-1)) for column in columns), job.where)
        answer: T | None
        try:
            with torch.inference_mode(), _autocast(job):
                input_ids = torch.as_tensor(np.asarray(batch["input_ids"]), dtype=torch.long, device=job.device)
                answer = read((ask or job.model)(input_ids=input_ids), batch)
        except FloatingPointError as error:
            log.warning("%s: %s", job.where, error)
            answer = None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            job.batch_size.halve(job.where, error)
            release_memory(job.device)
            continue
        start += len(batch["input_ids"])
        yield start, batch, answer


def check_tokens(model: Any, highest: int, where: str) -> None:
    """Raises: UnknownToken, where the model would fail at an address or read another word's embedding."""
    num_known = getattr(getattr(model, "config", None), "vocab_size", None)
    if num_known is not None and highest >= num_known:
        raise UnknownToken(
            f"{where}: the data has token {highest} and the model knows {num_known}; evaluate it on data that was "
            "encoded as its training data were"
        )


def token_losses(logits_BLV: Tensor, labels_BL: np.ndarray) -> Tensor:
    """Cross entropy in nats of aligned labels, computed in fp32, shape (B, L); 0 where a label is IGNORED_LABEL."""
    batch, length = labels_BL.shape
    labels = torch.as_tensor(labels_BL, dtype=torch.long, device=logits_BLV.device)
    losses_BL = torch.empty(batch, length, dtype=torch.float32, device=logits_BLV.device)
    step = max(1, LOSS_TOKENS // batch)
    for start in range(0, length, step):
        part = slice(start, start + step)
        logits = logits_BLV[:, part].flatten(0, 1).float()
        losses = F.cross_entropy(logits, labels[:, part].flatten(), reduction="none", ignore_index=IGNORED_LABEL)
        losses_BL[:, part] = losses.view(batch, -1)
    return losses_BL


def _autocast(job: EvaluationJob) -> AbstractContextManager[Any]:
    if job.precision == "fp32":
        return nullcontext()
    return torch.autocast(job.device.type, dtype=torch.bfloat16)


class EvaluationOutOfMemory(UserError):
    """Not even the smallest allowed batch fits."""


@dataclass
class BatchSize:
    """Sequences per batch: halved and remembered when memory runs out, unless the number belongs to the result."""

    size: int
    is_fixed: bool = False

    def halve(self, where: str, cause: BaseException) -> None:
        """Raises: EvaluationOutOfMemory when there is nothing left to halve."""
        if self.is_fixed:
            raise EvaluationOutOfMemory(
                f"{where}: out of memory at batch size {self.size}, which belongs to this mode's stopping rule; "
                "set a smaller batch_size for the mode in the evaluation config, or use a device with more memory"
            ) from cause
        if self.size == 1:
            raise EvaluationOutOfMemory(
                f"{where}: out of memory with a single sequence; use a device with more memory"
            ) from cause
        self.size //= 2
        log.warning("%s: out of memory, going on with batches of %d sequences", where, self.size)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether this is an accelerator's or the CPU allocator's refusal (the latter is a plain RuntimeError)."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def release_memory(device: torch.device) -> None:
    """Give back what the failed attempt left in the allocator's cache."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
