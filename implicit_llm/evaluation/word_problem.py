"""Accuracy and cost of one model on one word-problem data set, in one mode."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from implicit_llm.evaluation.accuracy import AccuracyTally
from implicit_llm.runs.errors import UserError

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0
DEFAULT_BATCH_SIZE = 256


class EvaluationOutOfMemory(UserError):
    """Not even the smallest allowed batch fits."""


class WordProblems(Protocol):
    """What is needed of a data set of word problems."""

    vocab_size: int
    length: int

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]: ...


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


@dataclass
class SolverTally:
    """Cost and convergence over the batches; an explicit model has no statistics and costs one evaluation a token."""

    iterations: float = 0.0
    num_sequences: int = 0
    residual_max: float | None = None
    unconverged_tokens: int = 0
    num_tokens: int = 0

    def add(self, stats: Any, shape: tuple[int, int]) -> None:
        """Count a batch of `shape` (B, L)."""
        self.num_sequences += shape[0]
        self.num_tokens += shape[0] * shape[1]
        if stats is None:
            self.iterations += shape[0]
            return
        self.iterations += float(stats.f_evaluations.double().sum())
        self.unconverged_tokens += int(stats.unconverged_tokens.sum())
        residual = float(stats.residual.max())  # max() passes a NaN on
        self.residual_max = (
            residual if self.residual_max is None or math.isnan(residual) else max(self.residual_max, residual)
        )

    def values(self, is_implicit: bool) -> dict[str, float | None]:
        """The solver's part of a record of metrics.json; None where there is no number."""
        residual = self.residual_max
        return {
            "f_evaluations_per_token": _finite(self.iterations / self.num_sequences) if self.num_sequences else None,
            "residual_max": None if residual is None else _finite(residual),
            "unconverged_share": self.unconverged_tokens / self.num_tokens if is_implicit and self.num_tokens else None,
        }


@dataclass
class Evaluation:
    """One model on one data set in one mode: the record's values and the predictions, of shape (samples, length)."""

    values: dict[str, Any]
    predictions_NL: np.ndarray = field(repr=False)

    def match(self, other: Evaluation | None) -> float | None:
        """Share of tokens with the same prediction, over the samples both have; None where that says nothing."""
        if other is None or other is self or not self._is_finite or not other._is_finite:
            return None
        count = min(len(self.predictions_NL), len(other.predictions_NL))
        return float((self.predictions_NL[:count] == other.predictions_NL[:count]).mean()) if count else None

    @property
    def _is_finite(self) -> bool:
        return self.values["nonfinite_share"] == 0


def evaluate_word_problem(
    model: torch.nn.Module, dataset: WordProblems, *, num_samples: int, batch_size: BatchSize, where: str
) -> Evaluation:
    """Answer the first `num_samples` problems with the model's present evaluation mode.

    `where` names data set and mode in the log. Raises: EvaluationOutOfMemory.
    """
    accuracy, solver = AccuracyTally(dataset.length), SolverTally()
    predictions = np.zeros((num_samples, dataset.length), dtype=np.min_scalar_type(dataset.vocab_size - 1))
    progress = _Progress(where, num_samples)
    model.eval()
    for start, batch, out in _batches(model, dataset, num_samples, batch_size, where):
        labels_BL = np.asarray(batch["labels"])
        if out is None:
            accuracy.add_nonfinite(len(labels_BL))
            continue
        predictions_BL = out.logits.argmax(dim=-1).cpu().numpy()
        is_finite_B = torch.isfinite(out.logits).all(dim=-1).all(dim=-1).cpu().numpy()
        accuracy.add(predictions_BL, labels_BL, is_finite_B)
        solver.add(out.solver_stats, labels_BL.shape)
        predictions[start : start + len(labels_BL)] = predictions_BL
        progress.tell(accuracy, solver)
    is_implicit = getattr(model, "solver", None) is not None
    values = accuracy.values() | solver.values(is_implicit) | {"num_samples": num_samples}
    values["nonfinite_share"] = accuracy.num_nonfinite_samples / num_samples
    if accuracy.num_nonfinite_samples:
        log.warning(
            "%s: %d of %d sequences have non-finite logits: no accuracy is reported",
            where,
            accuracy.num_nonfinite_samples,
            num_samples,
        )
    return Evaluation(values, predictions)


def _batches(
    model: torch.nn.Module, dataset: WordProblems, num_samples: int, batch_size: BatchSize, where: str
) -> Iterator[tuple[int, dict[str, np.ndarray], Any]]:
    """Yield (index of the first sequence, batch, model output, None where the iteration became NaN or infinite).

    A batch that does not fit is tried again in halves.
    """
    device = next(model.parameters()).device
    start = 0
    while start < num_samples:
        batch = dataset.fetch(np.arange(start, min(start + batch_size.size, num_samples)))
        try:
            with torch.inference_mode():
                out = model(input_ids=torch.as_tensor(np.asarray(batch["input_ids"]), dtype=torch.long, device=device))
        except FloatingPointError as error:
            log.warning("%s: %s", where, error)
            out = None
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            batch_size.halve(where, error)
            _release_memory(device)
            continue
        yield start, batch, out
        start += len(batch["input_ids"])


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether this is an accelerator's or the CPU allocator's refusal (the latter is a plain RuntimeError)."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _release_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


class _Progress:
    """One log line every few seconds, and one at the end."""

    def __init__(self, where: str, num_samples: int) -> None:
        self._where, self._num_samples = where, num_samples
        self._next_s = time.monotonic() + PROGRESS_EVERY_S

    def tell(self, accuracy: AccuracyTally, solver: SolverTally) -> None:
        if accuracy.num_samples < self._num_samples and time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PROGRESS_EVERY_S
        last = accuracy.last()
        log.info(
            "%s: %d/%d samples, accuracy on the last ten tokens %s, %.1f f-evaluations per token",
            self._where,
            accuracy.num_samples,
            self._num_samples,
            "not finite" if last is None else f"{last:.3f}",
            solver.iterations / max(1, solver.num_sequences),
        )
