"""Measured perplexities as the report uses them: per run, phase, test set, length and mode, over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from implicit_llm.report.model_groups import Model, ModelGroup, Variant, group_models
from implicit_llm.report.model_point import ModelPoint
from implicit_llm.report.results import Cell, Spread, headline_mode, mode_rank
from implicit_llm.report.training_runs import LANGUAGE_MODEL, TrainingRun


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
