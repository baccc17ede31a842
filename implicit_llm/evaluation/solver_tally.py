"""Cost and convergence of the solver over the batches of an evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


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

    def values(self, is_implicit: bool) -> dict[str, float | None]:
        """The solver's part of a record of metrics.json, `residual` the largest; None where there is no number."""
        iterations = self.iterations / self.num_tokens if is_implicit and self.num_tokens else None
        return {
            "f_evaluations_per_token": self.f_evaluations_per_token,
            "iterations_per_token": None if iterations is None else finite(iterations),
            "residual": None if self.residual_max is None else finite(self.residual_max),
            "unconverged_share": self.unconverged_tokens / self.num_tokens if is_implicit and self.num_tokens else None,
        }


def finite(value: float) -> float | None:
    """Six significant digits; None for what is no number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
