"""Measured perplexities: per run, phase, test set, length and mode, over seeds; and at equal training FLOPs.

Where there is an explicit run whose training took as many FLOPs within 10 % (one trained for longer), the held-out
perplexities at the training length are compared. Elsewhere it is the smoothed training loss of both at the largest
number of FLOPs that both have reached. That favours the cheaper run: its learning rate has decayed there, the other's
has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from implicit_llm_report.loss import AMOUNT, loss_at, path_curve
from implicit_llm_report.model_groups import Model, ModelGroup, ModelPoint, Variant, group_models
from implicit_llm_report.results import Cell, Spread, headline_mode, mode_rank
from implicit_llm_report.training_runs import FLOPS, LANGUAGE_MODEL, TrainingRun


@dataclass(frozen=True)
class PerplexityPoint(ModelPoint):
    """One record of a perplexity evaluation; None is a missing number."""

    data: str
    length: int
    mode: str
    loss: float | None
    perplexity: float | None
    num_tokens: int | None
    residual: float | None
    train_length: int | None
    train_tokens: float | None
    train_flops: float | None
    perplexity_within_documents: float | None = None
    loss_by_position: Mapping[str, Any] | None = None


PerplexityCell = Cell[PerplexityPoint]


@dataclass(frozen=True)
class Line:
    """A variant on one test set in one mode: a cell for each length at which it was evaluated."""

    variant: Variant
    mode: str
    cells: tuple[PerplexityCell, ...]

    @property
    def first(self) -> PerplexityPoint:
        return self.cells[0].first

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for cell in self.cells for role in cell.roles))

    def at(self, length: float | None) -> PerplexityCell | None:
        return next((cell for cell in self.cells if cell.first.length == length), None)

    def train_spread(self, field: str) -> Spread:
        """Training tokens or FLOPs over the seeds."""
        return self.cells[0].spread(field)


@dataclass(frozen=True)
class Comparison:
    """The lines of one group of models on one test set; a run's lines stand together, its headline mode first."""

    group: ModelGroup
    data: str
    lines: tuple[Line, ...]
    headline_modes: dict[str, str | None]

    @property
    def title(self) -> str:
        return f"{self.group.title}, {self.data}"

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({cell.first.length for line in self.lines for cell in line.cells}))

    @property
    def train_lengths(self) -> tuple[int, ...]:
        return tuple(sorted({line.first.train_length for line in self.lines if line.first.train_length}))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for line in self.lines for role in line.roles))

    @property
    def headlines(self) -> tuple[Line, ...]:
        """One line a variant, in the mode that speaks for its run."""
        return tuple(line for line in self.lines if self.is_headline(line))

    def is_headline(self, line: Line) -> bool:
        return self.headline_modes[line.variant.run] == line.mode

    def name(self, line: Line) -> str:
        return self.group.name(line.variant, [other.variant for other in self.lines])


@dataclass(frozen=True)
class PerplexityResults:
    """All perplexities; groups are made with the training runs, so that both kinds of figures have the same."""

    points: tuple[PerplexityPoint, ...]
    training: tuple[TrainingRun, ...] = ()
    headline_mode: str | None = None

    @cached_property
    def groups(self) -> tuple[ModelGroup, ...]:
        """Of the runs evaluated here and of all language models trained."""
        measured = [Model(p.run, p.is_implicit, p.model_type, p.num_parameters) for p in self.points]
        trained = [
            Model(run.run, run.is_implicit, run.model_type, run.num_parameters, run.data)
            for run in self.training
            if run.task == LANGUAGE_MODEL
        ]
        return group_models([*measured, *trained])  # the later one of a run counts: training knows the data

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        found = []
        for group in self.groups:
            mine = [point for point in self.points if point.run in group.runs]
            for data in sorted({point.data for point in mine}):
                found.append(self._comparison(group, data, [point for point in mine if point.data == data]))
        return tuple(found)

    def _comparison(self, group: ModelGroup, data: str, points: list[PerplexityPoint]) -> Comparison:
        modes = {
            run: headline_mode({point.mode for point in points if point.run == run}, self.headline_mode)
            for run in group.runs
        }
        by_line: dict[tuple[Variant, str], list[PerplexityPoint]] = {}
        for point in points:
            by_line.setdefault((point.variant, point.mode), []).append(point)
        lines = [Line(variant, mode, _cells(mine)) for (variant, mode), mine in by_line.items()]
        lines.sort(key=lambda line: _line_order(line, modes[line.variant.run]))
        return Comparison(group, data, tuple(lines), modes)


def _cells(points: Iterable[PerplexityPoint]) -> tuple[PerplexityCell, ...]:
    by_length: dict[int, list[PerplexityPoint]] = {}
    for point in points:
        by_length.setdefault(point.length, []).append(point)
    return tuple(
        Cell(tuple(sorted(by_length[length], key=lambda point: point.seed or 0))) for length in sorted(by_length)
    )


def _line_order(line: Line, headline: str | None) -> tuple:
    """Implicit runs first, a run's phases by the training they cost, its modes with the headline first."""
    point = line.first
    cost = (point.train_flops or 0.0, point.phase or "")
    return (not point.is_implicit, point.run, cost, line.mode != headline, mode_rank(line.mode))


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


def share_bounded(line: Line, training: Sequence[TrainingRun]) -> float | None:
    """The share of a branch's steps before its last phase began; None where the phase starts from none."""
    for run in training:
        for phase in run.phases:
            is_its = (run.run, phase.name) == (line.variant.run, line.variant.phase)
            if is_its and run.before(phase) is not None and phase.end_step:
                return phase.start_step / phase.end_step
    return None


def branches_of(comparison: Comparison, run: str, training: Sequence[TrainingRun]) -> dict[float, Line]:
    """The lines of a run's free phases by their share, the smallest first."""
    mine = [line for line in comparison.headlines if line.variant.run == run and line.variant.is_implicit]
    shares = {share: line for line in mine if (share := share_bounded(line, training)) is not None}
    return {share: shares[share] for share in sorted(shares)}
