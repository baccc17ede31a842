"""Measured answers to CatbAbI's questions: per run, phase, test or validation set and mode, over seeds.

Figures, tables and claims show the test set of a data set; its validation set only chooses runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from implicit_llm.report.model_point import ModelPoint, name_among
from implicit_llm.report.results import Cell, Spread, headline_mode, mode_rank

TEST, VALIDATION = "test", "valid"  # splits of a data set
WINDOWED = "windowed"
# How a protocol is named on the page.
PROTOCOL_WORDS = {WINDOWED: "every row from an empty state", "carried": "state carried over all stories"}


@dataclass(frozen=True)
class BabiPoint(ModelPoint):
    """One record of a CatbAbI evaluation; None is a missing number."""

    num_layers: int | None
    data: str
    data_set: str
    split: str
    mode: str
    protocol: str | None
    accuracy: float | None
    accuracy_by_task: Mapping[str, float] | None
    num_questions: int | None
    num_questions_by_task: Mapping[str, int] | None
    lm_accuracy: float | None
    lm_perplexity: float | None
    lm_accuracy_by_task: Mapping[str, float] | None
    lm_perplexity_by_task: Mapping[str, float | None] | None
    num_words: int | None
    residual: float | None
    train_tokens: float | None
    train_flops: float | None

    def of_task(self, task: int) -> float | None:
        return (self.accuracy_by_task or {}).get(str(task))


BabiCell = Cell[BabiPoint]


@dataclass(frozen=True)
class BabiResults:
    """All points, with the ways in which figures, tables and claims look at them."""

    points: tuple[BabiPoint, ...]
    headline_mode: str | None = None

    @cached_property
    def cells(self) -> tuple[BabiCell, ...]:
        """One a (run, phase, data set, protocol, mode): by data set, implicit runs first, a run's headline first."""
        groups: dict[tuple, list[BabiPoint]] = {}
        for point in self.points:
            groups.setdefault((point.variant, point.data, point.protocol, point.mode), []).append(point)
        cells = [Cell(tuple(sorted(points, key=lambda point: point.seed or 0))) for points in groups.values()]
        return tuple(sorted(cells, key=self._order))

    @property
    def test_sets(self) -> tuple[str, ...]:
        """What is shown and judged; validation sets are left out."""
        return tuple(sorted({point.data for point in self.points if point.split == TEST}))

    def protocols(self, data: str) -> tuple[str | None, ...]:
        """In which the models were evaluated on a data set, the one that speaks first."""
        found = {point.protocol for point in self.points if point.data == data}
        return tuple(sorted(found, key=lambda protocol: (protocol != self.headline_protocol(data), protocol or "")))

    def headline_protocol(self, data: str) -> str | None:
        """The protocol of figures, choices and claims: windowed where it was run, as every model can follow it."""
        found = {point.protocol for point in self.points if point.data == data}
        return WINDOWED if WINDOWED in found else min(found, key=str, default=None)

    def of(self, data: str, protocol: str | None = None, *, headline_only: bool = False) -> list[BabiCell]:
        """The cells of a data set, in the protocol that speaks for it unless another is named."""
        wanted = protocol or self.headline_protocol(data)
        mine = [cell for cell in self.cells if (cell.first.data, cell.first.protocol) == (data, wanted)]
        return [cell for cell in mine if self.is_headline(cell)] if headline_only else mine

    def validation(self, cell: BabiCell) -> Spread:
        """Accuracy at all questions of the validation set, of the runs, protocol and mode of a cell of the test set."""
        return Spread.of(point.accuracy for point in self._validation_points(cell.first))

    def validation_set(self, cell: BabiCell) -> str | None:
        """The validation set that `validation` is of; None without one."""
        return next((point.data for point in self._validation_points(cell.first)), None)

    def _validation_points(self, tested: BabiPoint) -> list[BabiPoint]:
        mine = (tested.variant, tested.data_set, VALIDATION, tested.protocol, tested.mode)
        return [p for p in self.points if (p.variant, p.data_set, p.split, p.protocol, p.mode) == mine]

    def is_headline(self, cell: BabiCell) -> bool:
        mine = (cell.first.run, cell.first.data, cell.first.protocol)
        modes = {point.mode for point in self.points if (point.run, point.data, point.protocol) == mine}
        return cell.first.mode == headline_mode(modes, self.headline_mode)

    def name(self, cell: BabiCell) -> str:
        """The name of a cell's line."""
        return name_among(cell.first, self.points)

    def _order(self, cell: BabiCell) -> tuple:
        point = cell.first
        kind = (point.data, not point.is_implicit, point.run, point.phase or "")
        return (*kind, not self.is_headline(cell), *mode_rank(point.mode))


def task_spread(cell: BabiCell, task: int) -> Spread:
    """Accuracy on one task over seeds; without values for a task that was not asked."""
    return cell.spread(lambda point: point.of_task(task))


def word_spread(cell: BabiCell, task: int | None, *, is_perplexity: bool) -> Spread:
    """Accuracy or perplexity over all words of a task, None for all of them, over seeds."""
    if task is None:
        return cell.spread("lm_perplexity" if is_perplexity else "lm_accuracy")
    key = "lm_perplexity_by_task" if is_perplexity else "lm_accuracy_by_task"
    return cell.spread(lambda point: (getattr(point, key) or {}).get(str(task)))


def tasks_asked(cells: list[BabiCell]) -> list[int]:
    """The tasks with questions in any of the cells."""
    return sorted({int(task) for cell in cells for point in cell.points for task in point.num_questions_by_task or {}})
