"""Training runs as the report sees them: phases that follow or branch from one another, with their journals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from implicit_llm_contracts.runs import journal

LOSS, TOKENS, FLOPS = "loss", "tokens", "flops"
LANGUAGE_MODEL = "language_model"


@dataclass(frozen=True)
class Solver:
    """What the report compares phases by: how a phase finds its fixed points."""

    mode: str | None = None
    max_iter: int | None = None
    phantom_steps: int | None = None
    num_unroll: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> Solver | None:
        """From the settings of a phase; None for an explicit model."""
        return None if settings is None else cls(*(settings.get(field.name) for field in fields(cls)))

    @property
    def iterations(self) -> int:
        """The most that a phase allows; an unrolled phase differentiates through all of them."""
        return (self.num_unroll if self.mode == "unrolled" else self.max_iter) or 0

    @property
    def label(self) -> str:
        """The paper's short form: "(24+4)"; "(unrolled 4)" for an unrolled phase. For the reader only."""
        return f"(unrolled {self.num_unroll})" if self.mode == "unrolled" else f"({self.max_iter}+{self.phantom_steps})"


@dataclass(frozen=True)
class Phase:
    """One phase of a training run: steps start_step + 1 .. end_step and the points of its journal.

    `start` is the fingerprint of the phase it starts from, `step_tokens` the tokens of one step.
    """

    role: str
    name: str
    start_step: int
    end_step: int
    solver: Mapping[str, Any] | None
    points: tuple[journal.Point, ...]
    fingerprint: str = ""
    start: str | None = None
    step_tokens: int | None = None

    @property
    def label(self) -> str:
        """In words: "unrolled 4", "free 16+4"; a model without solver is "explicit"."""
        if self.solver is None:
            return "explicit"
        if self.solver.get("mode") == "unrolled":
            return f"unrolled {self.solver.get('num_unroll')}"
        return f"{self.name} {self.solver.get('max_iter')}+{self.solver.get('phantom_steps')}"

    def series(self, key: str) -> list[tuple[int, float]]:
        """Global steps and finite values of a journal key; tokens are counted from steps where the key is absent."""
        if key == TOKENS and self.step_tokens is not None:
            return [(p.step, p.values.get(TOKENS, float(p.step * self.step_tokens))) for p in self.points]
        return [(p.step, p.values[key]) for p in self.points if math.isfinite(p.values.get(key, math.nan))]


@dataclass(frozen=True)
class TrainingRun:
    """The phases of one run and seed, by their start; `data` is the fingerprint of the training set."""

    run: str
    seed: int | None
    phases: tuple[Phase, ...]
    task: str | None = None
    model_type: str | None = None
    num_parameters: int | None = None
    data: str | None = None

    @property
    def is_implicit(self) -> bool:
        return any(phase.solver is not None for phase in self.phases)

    @property
    def end_step(self) -> int:
        return max(phase.end_step for phase in self.phases)

    def before(self, phase: Phase) -> Phase | None:
        """The phase that `phase` starts from."""
        return next((other for other in self.phases if other.fingerprint and other.fingerprint == phase.start), None)

    def path(self, phase: Phase) -> tuple[Phase, ...]:
        """The phases up to and with `phase`."""
        before = self.before(phase)
        return (*(self.path(before) if before is not None else ()), phase)

    @cached_property
    def chains(self) -> tuple[tuple[Phase, ...], ...]:
        """The phases as unbroken curves: each goes on where the one before it ended; a branch begins a new one."""
        chains: list[list[Phase]] = []
        for phase in self.phases:
            before = self.before(phase)
            going_on = next(
                (chain for chain in chains if chain[-1] is before and before.end_step == phase.start_step), None
            )
            if going_on is None:
                chains.append([phase])
            else:
                going_on.append(phase)
        return tuple(tuple(chain) for chain in chains)
