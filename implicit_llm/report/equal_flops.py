"""Implicit against explicit language models where both have cost the same number of floating-point operations.

Where there is an explicit run whose training took as many FLOPs within 10 % (one trained for longer), the held-out
perplexities at the training length are compared. Elsewhere it is the smoothed training loss of both at the largest
number of FLOPs that both have reached. That favours the cheaper run: its learning rate has decayed there, the other's
has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from implicit_llm.report.loss_curves import AMOUNT, loss_at, path_curve
from implicit_llm.report.perplexity_results import Comparison, Line
from implicit_llm.report.results import Spread
from implicit_llm.report.training_runs import FLOPS, TrainingRun

SAME_FLOPS = 0.10
PERPLEXITY: Final = "perplexity"
TRAINING_LOSS: Final = "training loss"


@dataclass(frozen=True)
class EqualFlops:
    """One implicit and one explicit line of a comparison; `flops` were spent on each, `length` for perplexity."""

    comparison: Comparison
    implicit: Line
    explicit: Line
    metric: Literal["perplexity", "training loss"]
    flops: float
    length: int | None
    of_implicit: Spread
    of_explicit: Spread

    @property
    def roles(self) -> tuple[str, ...]:
        return (*self.implicit.roles, *self.explicit.roles)


def at_equal_flops(comparison: Comparison, training: Sequence[TrainingRun]) -> list[EqualFlops]:
    """Each implicit line against the explicit lines of equal FLOPs, or else against the one that comes nearest."""
    explicit = [line for line in comparison.headlines if not line.variant.is_implicit and flops_of(line)]
    found = []
    for line in comparison.headlines:
        if not line.variant.is_implicit or not flops_of(line) or not explicit:
            continue
        equal = [other for other in explicit if is_close(flops_of(line), flops_of(other), SAME_FLOPS)]
        if equal:
            found += [_held_out(comparison, line, other) for other in equal]
        else:
            nearest = min(explicit, key=lambda other: abs((flops_of(other) or 0.0) - (flops_of(line) or 0.0)))
            loss = _interpolated(comparison, line, nearest, training)
            found += [] if loss is None else [loss]
    return found


def flops_of(line: Line) -> float | None:
    """Training FLOPs, mean over seeds."""
    return line.train_spread("train_flops").mean


def tokens_of(line: Line) -> float | None:
    """Training tokens, mean over seeds."""
    return line.train_spread("train_tokens").mean


def is_close(first: float | None, second: float | None, tolerance: float) -> bool:
    """Whether two positive numbers differ by at most the share `tolerance` of the larger one."""
    return bool(first and second and abs(first - second) <= tolerance * max(first, second))


def trained_length(line: Line) -> int | None:
    """The training length where it was evaluated, else the shortest length that was."""
    lengths = [cell.first.length for cell in line.cells]
    return line.first.train_length if line.first.train_length in lengths else min(lengths, default=None)


def _held_out(comparison: Comparison, implicit: Line, explicit: Line) -> EqualFlops:
    length = trained_length(implicit)
    spreads = [_perplexity(line, length) for line in (implicit, explicit)]
    flops = ((flops_of(implicit) or 0.0) + (flops_of(explicit) or 0.0)) / 2
    return EqualFlops(comparison, implicit, explicit, PERPLEXITY, flops, length, *spreads)


def _interpolated(
    comparison: Comparison, implicit: Line, explicit: Line, training: Sequence[TrainingRun]
) -> EqualFlops | None:
    """None when the journals carry no FLOPs."""
    curves = [list(_curves(line, training)) for line in (implicit, explicit)]
    ends = [curve[-1, AMOUNT] for of_line in curves for curve in of_line]
    if not all(curves) or not ends:
        return None
    flops = float(min(ends))
    spreads = [Spread.of(loss_at(curve, flops) for curve in of_line) for of_line in curves]
    return EqualFlops(comparison, implicit, explicit, TRAINING_LOSS, flops, None, *spreads)


def _curves(line: Line, training: Sequence[TrainingRun]) -> Iterable:
    for run in training:
        phase = next((phase for phase in run.phases if phase.name == line.variant.phase), None)
        if run.run == line.variant.run and phase is not None:
            curve = path_curve(run, phase, FLOPS)
            if len(curve):
                yield curve


def _perplexity(line: Line, length: int | None) -> Spread:
    cell = line.at(length)
    return Spread(()) if cell is None else cell.spread("perplexity")
