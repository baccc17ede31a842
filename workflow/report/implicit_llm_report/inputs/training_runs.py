"""Define training runs for the report: phases, which follow or branch from one another, with their journals.

A curve is a table with one row for each bin. The bins divide the steps of a phase equally, and all seeds share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from implicit_llm_contracts.runs import journal

T = TypeVar("T")
STEP, LOSS, TOKENS, FLOPS = "step", "loss", "tokens", "flops"
MAX_POINTS = 120  # bins of a whole run; with more, a line of 500 pixels shows only noise
MIN_POINTS = 20  # the fewest bins of a phase, even of a short branch
END_SHARE = 0.02  # the loss at the end is the mean over this last share of all steps since step 0


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Return lists of the items by key; keys and items are in the order of `items`."""
    found: dict[Any, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


@dataclass(frozen=True)
class Solver:
    """The settings of a phase's solver by which the report compares phases."""

    mode: str | None = None
    max_iter: int | None = None
    phantom_steps: int | None = None
    num_unroll: int | None = None
    tol: float | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> Solver | None:
        """Return the solver from its settings in a phase; None if there are none, as for an explicit model."""
        return None if settings is None else cls(*(settings.get(field.name) for field in fields(cls)))

    @property
    def iterations(self) -> int:
        """The maximum number of iterations, or the exact number for an unrolled phase; 0 if it is not set."""
        return (self.num_unroll if self.mode == "unrolled" else self.max_iter) or 0

    @property
    def label(self) -> str:
        """The paper's notation for the reader, such as "(24+4)"; "(unrolled 4)" for an unrolled phase."""
        return f"(unrolled {self.num_unroll})" if self.mode == "unrolled" else f"({self.max_iter}+{self.phantom_steps})"


@dataclass(frozen=True)
class Phase:
    """One phase of a training run: the steps start_step + 1 .. end_step and the points of its journal.

    `start`: the fingerprint of the phase from which it starts, if any. `step_tokens`: the tokens of one step, if known.
    """

    role: str
    name: str
    start_step: int
    end_step: int
    solver: Solver | None
    points: tuple[journal.Point, ...]
    fingerprint: str = ""
    start: str | None = None
    step_tokens: int | None = None

    @property
    def label(self) -> str:
        """The phase in words, such as "unrolled 4" or "free 16+4"; "explicit" for a model without solver."""
        if self.solver is None:
            return "explicit"
        words = self.solver.label.strip("()")
        return words if self.solver.mode == "unrolled" else f"{self.name} {words}"

    @cached_property
    def table(self) -> pd.DataFrame:
        """The journal by step, with NaN for infinite values; `step_tokens`, if known, supplies missing token counts."""
        steps = [point.step for point in self.points]
        table = pd.DataFrame([point.values for point in self.points], index=steps).replace([np.inf, -np.inf], np.nan)
        if self.step_tokens is not None:
            counted = pd.Series(steps, steps, float) * self.step_tokens
            table[TOKENS] = table[TOKENS].fillna(counted) if TOKENS in table else counted
        return table.assign(step=steps)

    def series(self, key: str) -> pd.Series:
        """Return the values of a journal key by global step, without NaN."""
        return self.table.get(key, pd.Series(dtype=float)).dropna()

    def curve(self, key: str, x: str = STEP, bins: int = MAX_POINTS) -> pd.DataFrame:
        """Return step, `x` and `key` as means over bins of steps, from the points that have all three values.

        Bins without such a point are left out.
        """
        rows = self.table.reindex(columns=list(dict.fromkeys((STEP, x, key)))).dropna()
        return rows.groupby((rows[STEP] - self.start_step - 1) * bins // (self.end_step - self.start_step or 1)).mean()

    @cached_property
    def end_loss(self) -> float | None:
        """The mean loss of the last steps (END_SHARE); None if the journal has no loss for them."""
        losses = self.series(LOSS)
        last = losses[losses.index > (1 - END_SHARE) * self.end_step]
        return None if last.empty else float(last.mean())


@dataclass(frozen=True)
class TrainingRun:
    """The phases of one run and seed, in the order of their start. `name`: the name of the run for the reader."""

    run: str
    seed: int | None
    phases: tuple[Phase, ...]
    task: str | None = None
    name: str = ""

    @property
    def is_implicit(self) -> bool:
        return any(phase.solver is not None for phase in self.phases)

    @property
    def end_step(self) -> int:
        return max(phase.end_step for phase in self.phases)

    def before(self, phase: Phase) -> Phase | None:
        """Return the phase from which `phase` starts; None if it starts from no phase, or from one of another run."""
        return next((other for other in self.phases if other.fingerprint and other.fingerprint == phase.start), None)

    def path(self, phase: Phase) -> tuple[Phase, ...]:
        """Return the phases that lead to `phase`, from the first one to `phase` itself, without other branches."""
        before = self.before(phase)
        return (*(self.path(before) if before is not None else ()), phase)

    @property
    def last_phases(self) -> list[Phase]:
        """The phases at whose end no other phase starts."""
        continued = {
            phase.start for phase in self.phases if (b := self.before(phase)) and b.end_step == phase.start_step
        }
        return [phase for phase in self.phases if phase.fingerprint not in continued]

    def along(self, phase: Phase, key: str, x: str) -> pd.DataFrame:
        """Return the smoothed curve from step 0 through the earlier phases to the end of `phase`, by phase and bin."""
        path = self.path(phase)
        ends = [following.start_step for following in path[1:]] + [phase.end_step]
        bins = [max(MIN_POINTS, round(MAX_POINTS * (p.end_step - p.start_step) / self.end_step)) for p in path]
        curves = {part.name: part.curve(key, x, count) for part, count in zip(path, bins, strict=True)}
        parts = zip(curves.items(), ends, strict=True)
        return pd.concat({name: curve[curve[STEP] <= end] for (name, curve), end in parts})


def end_loss_of(run: str, phase: str | None, training: Sequence[TrainingRun]) -> float | None:
    """Return the mean over seeds of the loss at the end of a phase; None if a seed has none or there are no seeds."""
    losses = [one.end_loss for trained in training if trained.run == run for one in trained.phases if one.name == phase]
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None


def share_bounded(run: str, phase: str | None, training: Sequence[TrainingRun]) -> float | None:
    """Return which share of the steps from 0 to the end of a phase precedes its start, rounded to two decimals.

    Return None if the phase does not start from another phase of the report.
    """
    shares = (
        round(one.start_step / one.end_step, 2)
        for trained in training
        for one in trained.phases
        if (trained.run, one.name) == (run, phase) and trained.before(one) is not None and one.end_step
    )
    return next(shares, None)
