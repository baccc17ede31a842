"""Numbers that add up over all phases of a curriculum, and what a step adds to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from implicit_llm_contracts.config.flops import training_flops
from implicit_llm_contracts.config.solver import solver_of


@dataclass
class Totals:
    """Up to a step; part of every checkpoint. skipped_*: updates left out because fp16 gradients overflowed."""

    tokens: int = 0
    flops: float = 0.0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0

    def count_skipped(self, is_skipped: bool) -> None:
        """Count one more step, the update of which was skipped or not."""
        self.skipped_updates += is_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Totals:
        return cls(**state)


class StepCost:
    """Tokens and FLOPs of the steps of a phase, counted from the model's configuration (analysis.flops)."""

    def __init__(self, model: PreTrainedModel, batch_size: int, length: int) -> None:
        self.tokens = batch_size * length
        self._model = {**model.config.to_dict(), "num_parameters": model.num_parameters()}
        self._length = length
        self._solver = solver_of(model)

    def flops(self, f_evaluations: float) -> float:
        """FLOPs of a step; f_evaluations is NaN where none were counted."""
        counted = f_evaluations if math.isfinite(f_evaluations) else None
        return self.tokens * training_flops(self._model, self._length, self._solver, counted)
