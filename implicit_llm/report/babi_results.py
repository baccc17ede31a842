"""Measured answers to CatbAbI's questions: per run, phase, test or validation set and mode, over seeds.

The set is told by the end of its name: figures, tables and claims show `<data>-test`; `<data>-valid` only chooses runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from implicit_llm.report.model_groups import FAMILIES, Variant
from implicit_llm.report.results import Cell, Spread, from_record, headline_mode, mode_rank

NUM_TASKS = 20
TEST, VALIDATION = "-test", "-valid"


@dataclass(frozen=True)
class BabiPoint:
    """One record of a CatbAbI evaluation; None is a missing number."""

    role: str
    run: str
    phase: str | None
    phase_label: str | None
    seed: int | None
    is_implicit: bool
    model_type: str | None
    num_layers: int | None
    num_parameters: int | None
    data: str
    mode: str
    protocol: str | None
    accuracy: float | None
    accuracy_by_task: Mapping[str, float] | None
    num_questions: int | None
    num_questions_by_task: Mapping[str, int] | None
    lm_accuracy: float | None
    lm_perplexity: float | None
    f_evaluations_per_token: float | None
    residual: float | None
    unconverged_share: float | None
    train_tokens: float | None
    train_flops: float | None

    @classmethod
    def from_record(cls, record: dict[str, Any], role: str) -> BabiPoint:
        return from_record(cls, record, role)

    @property
    def variant(self) -> Variant:
        return Variant(self.run, self.phase, self.phase_label, self.is_implicit)

    @property
    def family(self) -> str:
        return FAMILIES.get(self.model_type or "", self.model_type or "model")

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
        """One a (run, phase, data set, mode): by data set, implicit runs first, a run's headline mode first."""
        groups: dict[tuple, list[BabiPoint]] = {}
        for point in self.points:
            groups.setdefault((point.variant, point.data, point.mode), []).append(point)
        cells = [Cell(tuple(sorted(points, key=lambda point: point.seed or 0))) for points in groups.values()]
        return tuple(sorted(cells, key=self._order))

    @property
    def test_sets(self) -> tuple[str, ...]:
        """What is shown and judged; validation sets are left out."""
        return tuple(sorted({point.data for point in self.points if point.data.endswith(TEST)}))

    def of(self, data: str, *, headline_only: bool = False) -> list[BabiCell]:
        """The cells of a data set."""
        mine = [cell for cell in self.cells if cell.first.data == data]
        return [cell for cell in mine if self.is_headline(cell)] if headline_only else mine

    def validation(self, cell: BabiCell) -> Spread:
        """Accuracy at all questions of the validation set, of the runs and mode of a cell of the test set."""
        data = cell.first.data.removesuffix(TEST) + VALIDATION
        mine = (cell.first.variant, data, cell.first.mode)
        return Spread.of(p.accuracy for p in self.points if (p.variant, p.data, p.mode) == mine)

    def is_headline(self, cell: BabiCell) -> bool:
        mine = (cell.first.run, cell.first.data)
        modes = {point.mode for point in self.points if (point.run, point.data) == mine}
        return cell.first.mode == headline_mode(modes, self.headline_mode)

    def name(self, cell: BabiCell) -> str:
        """The name of a cell's line: its run, with the phase where several phases of the run were evaluated."""
        point = cell.first
        phases = {p.phase: p.phase_label for p in self.points if p.run == point.run}
        if len(phases) == 1:
            return point.run
        is_unique = list(phases.values()).count(point.phase_label) == 1
        return f"{point.run} {point.phase_label if is_unique else point.phase}"

    def _order(self, cell: BabiCell) -> tuple:
        point = cell.first
        kind = (point.data, not point.is_implicit, point.run, point.phase or "")
        return (*kind, not self.is_headline(cell), *mode_rank(point.mode))


def task_spread(cell: BabiCell, task: int) -> Spread:
    """Accuracy on one task over seeds; without values for a task that was not asked."""
    return cell.spread(lambda point: point.of_task(task))


def tasks_asked(cells: list[BabiCell]) -> list[int]:
    """The tasks with questions in any of the cells."""
    return sorted({int(task) for cell in cells for point in cell.points for task in point.num_questions_by_task or {}})
