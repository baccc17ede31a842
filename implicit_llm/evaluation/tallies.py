"""What is counted over the batches of an evaluation: the solver's cost and convergence, and losses."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class SolverTally:
    """A mean over tokens; an explicit model has no statistics and costs one evaluation a token."""

    evaluations: float = 0.0  # of f, summed over the tokens
    iterations: float = 0.0  # of them, those of the solver
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
        residual = float(stats.residual.max())  # max() passes a NaN on
        self.residual_max = (
            residual if self.residual_max is None or math.isnan(residual) else max(self.residual_max, residual)
        )

    @property
    def f_evaluations_per_token(self) -> float | None:
        return finite(self.evaluations / self.num_tokens) if self.num_tokens else None

    def values(self) -> dict[str, float | None]:
        """The solver's part of a record of metrics.json, `residual` the largest; None where there is no number."""
        values: dict[str, float | None] = dict.fromkeys(("iterations_per_token", "residual", "unconverged_share"))
        if self.residual_max is not None:
            values = {
                "iterations_per_token": finite(self.iterations / self.num_tokens),
                "residual": finite(self.residual_max),
                "unconverged_share": None
                if math.isnan(self.residual_max)
                else self.unconverged_tokens / self.num_tokens,
            }
        return values | {"f_evaluations_per_token": self.f_evaluations_per_token}


def finite(value: float) -> float | None:
    """Six significant digits; None for what is no number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


BINS_PER_OCTAVE = 4  # of positions: 52 bins for rows of 16,384 tokens


@dataclass
class LossTally:
    """Sum of losses over tokens, in fp64: a mean over all tokens alike, however they were cut into batches."""

    total: float = 0.0
    num_tokens: int = 0

    def add(self, total: float, num_tokens: int) -> None:
        self.total += total
        self.num_tokens += num_tokens

    @property
    def loss(self) -> float | None:
        """Mean loss in nats a token; None without tokens, or when a token's loss was not finite."""
        return self.total / self.num_tokens if self.num_tokens and math.isfinite(self.total) else None

    @property
    def perplexity(self) -> float | None:
        loss = self.loss
        return None if loss is None or loss > math.log(1e300) else math.exp(loss)


class PositionTally:
    """Sum of losses and number of tokens at each position of rows of `length` tokens."""

    def __init__(self, length: int) -> None:
        self.total_L = np.zeros(length)
        self.num_tokens_L = np.zeros(length, dtype=np.int64)

    def add(self, losses_BL: np.ndarray, counted_BL: np.ndarray) -> None:
        """Count a batch of rows, which may be shorter than `length`; losses are 0 where not counted."""
        length = losses_BL.shape[1]
        self.total_L[:length] += losses_BL.sum(axis=0)
        self.num_tokens_L[:length] += counted_BL.sum(axis=0)

    def values(self) -> dict[str, list[Any]]:
        """The curve: for each bin its first and last position, from 1, its mean loss and its number of tokens.

        A token at position p has p tokens before it. The bins are the same for every length, but for where they end.
        """
        starts = position_bins(len(self.total_L))
        totals, counts = (np.add.reduceat(values_L, starts - 1) for values_L in (self.total_L, self.num_tokens_L))
        ends = [*(starts[1:] - 1).tolist(), len(self.total_L)]
        means = [float(f"{total / count:.6g}") if count else None for total, count in zip(totals, counts, strict=True)]
        return {"start": starts.tolist(), "end": ends, "loss": means, "num_tokens": counts.tolist()}


def position_bins(length: int) -> np.ndarray:
    """First positions of the bins: 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, ..., so many to each doubling."""
    octaves = math.log2(length)
    powers = 2.0 ** (np.arange(math.floor(octaves * BINS_PER_OCTAVE) + 1) / BINS_PER_OCTAVE)
    return np.unique(np.rint(powers).astype(np.int64))
