"""Word problems and models made up for tests of the evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicit_llm.solver.stats import SolverStats
from implicit_llm_contracts.config.solver import SolverConfig

VOCAB = 6


class Problems:
    """Sequences whose label at each position is the input plus one."""

    vocab_size = VOCAB

    def __init__(self, num_samples: int = 10, length: int = 12) -> None:
        self.length = length
        self.inputs = np.random.default_rng(0).integers(0, VOCAB, (num_samples, length))
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.fetched.append(len(indices))
        inputs, none = self.inputs[indices], np.zeros((len(indices), self.length), dtype=np.int64)
        return {"input_ids": inputs, "labels": (inputs + 1) % VOCAB, "task": none, "is_document_start": none == 1}


@dataclass
class Behaviour:
    """How a stand-in answers: right up to `right_until`; `fits` is the largest batch that its memory takes."""

    right_until: int = 10**6
    fits: int = 10**6
    is_implicit: bool = True
    nan_at: int | None = None
    raises_non_finite: bool = False
    out_of_memory: type[RuntimeError] = torch.OutOfMemoryError


class StandIn(torch.nn.Module):
    """Answers as told, and reports iterations that depend on its mode."""

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__()
        self.behaviour = behaviour
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.solver = SolverConfig() if behaviour.is_implicit else None

    def forward(self, input_ids: Tensor) -> Any:
        batch, length = input_ids.shape
        if batch > self.behaviour.fits:
            raise self.behaviour.out_of_memory("DefaultCPUAllocator: can't allocate memory: you tried to allocate much")
        if self.behaviour.raises_non_finite:
            raise FloatingPointError("the fixed-point iteration became NaN")
        answers = torch.where(torch.arange(length) < self.behaviour.right_until, input_ids + 1, input_ids) % VOCAB
        logits = torch.nn.functional.one_hot(answers, VOCAB).float()
        if self.behaviour.nan_at is not None:
            logits[0, self.behaviour.nan_at, 0] = float("nan")
        return SimpleNamespace(logits=logits, solver_stats=self._stats(batch) if self.solver else None)

    def _stats(self, batch: int) -> SolverStats:
        first = torch.arange(batch) == 0
        return SolverStats(
            num_iter=torch.full((batch,), 7.0),
            residual=torch.where(first, 0.2, 0.01),
            is_converged=~first,
            unconverged_tokens=torch.where(first, 3, 0),
            num_closing=1,
        )


def stand_in(**changes: Any) -> StandIn:
    return StandIn(replace(Behaviour(), **changes))
