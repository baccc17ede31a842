"""The measured numbers as the report uses them: per run, data set and mode, over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# In this order a mode speaks for its model when the config names none.
HEADLINE_MODES = ("blockwise", "sequential", "simultaneous", "published")
# Order of modes in tables and legends, by falling work per answer.
MODE_ORDER = ("parallel", "blockwise", "sequential", "simultaneous", "published")
LAST_TEN, COST = "accuracy_last10", "f_evaluations_per_token"


@dataclass(frozen=True)
class Point:
    """One record of an evaluation's metrics.json, and the role of the run it came from; None is a missing number."""

    role: str
    run: str
    seed: int | None
    is_implicit: bool
    num_layers: int | None
    num_parameters: int | None
    group: str
    monoid: str
    length: int
    hard_fraction: float | tuple[float, ...]
    train_length: int | None
    train_hard_fraction: float | tuple[float, ...] | None
    data: str
    mode: str
    num_samples: int
    chance_last10: float | None
    accuracy_last10: float | None
    accuracy_sequence: float | None
    accuracy_token: float | None
    accuracy_per_position: tuple[float, ...] | None
    chance_per_position: tuple[float, ...] | None
    f_evaluations_per_token: float | None
    residual_max: float | None
    unconverged_share: float | None
    token_match_sequential: float | None

    @classmethod
    def from_record(cls, record: dict[str, Any], role: str) -> Point:
        """Take what a point has from a record; what the record lacks is missing, not zero."""
        values = {name: _frozen(record.get(name)) for name in cls.__dataclass_fields__}
        return cls(**values | {"role": role})

    @property
    def task(self) -> Task:
        return Task(self.group, self.monoid)

    @property
    def hard_fractions(self) -> tuple[float, ...]:
        return _as_tuple(self.hard_fraction)

    @property
    def is_trained_length(self) -> bool:
        return self.length == self.train_length

    @property
    def is_harder(self) -> bool | None:
        """Whether the test has a larger share of hard tokens than anything in training; None when that is unknown."""
        if self.train_hard_fraction is None:
            return None
        return max(self.hard_fractions) > max(_as_tuple(self.train_hard_fraction))


@dataclass(frozen=True, order=True)
class Task:
    """A group, alone or times the aperiodic monoid."""

    group: str
    monoid: str

    @property
    def label(self) -> str:
        return self.group if self.monoid == "none" else f"{self.group} × monoid"


@dataclass(frozen=True)
class Spread:
    """A number over seeds: all that were measured; `num_missing` runs gave none."""

    values: tuple[float, ...]
    num_missing: int = 0

    @property
    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None

    @property
    def low(self) -> float | None:
        return min(self.values, default=None)

    @property
    def high(self) -> float | None:
        return max(self.values, default=None)

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        present, missing = [], 0
        for value in values:
            if value is None:
                missing += 1
            else:
                present.append(value)
        return cls(tuple(present), missing)


@dataclass(frozen=True)
class Cell:
    """The points of one run, data set and mode: one a seed, at least one."""

    points: tuple[Point, ...]

    @property
    def first(self) -> Point:
        return self.points[0]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(point.role for point in self.points)

    def spread(self, value: Callable[[Point], float | None] | str) -> Spread:
        """`value` is a field of Point or a function of one."""
        read = value if callable(value) else lambda point: getattr(point, value)
        return Spread.of(read(point) for point in self.points)


@dataclass(frozen=True)
class Results:
    """All points, with the ways in which figures, tables and claims look at them."""

    points: tuple[Point, ...]
    headline_mode: str | None = None

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """One a (run, data set, mode): by task, implicit first, then by run, share of hard tokens, length and mode."""
        groups: dict[tuple, list[Point]] = {}
        for point in self.points:
            groups.setdefault((point.run, point.data, point.mode), []).append(point)
        cells = [Cell(tuple(sorted(points, key=lambda point: point.seed or 0))) for points in groups.values()]
        return tuple(sorted(cells, key=_cell_order))

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """Largest group first, as the paper's own task is the largest here."""
        sizes = {
            point.task: min(p.chance_last10 or 1.0 for p in self.points if p.task == point.task)
            for point in self.points
        }
        return tuple(sorted(sizes, key=lambda task: (sizes[task], task)))

    def headline_of(self, run: str) -> str | None:
        """The mode that speaks for a run: the config's, else the first of HEADLINE_MODES it was evaluated in."""
        modes = {point.mode for point in self.points if point.run == run}
        for mode in (self.headline_mode, *HEADLINE_MODES, "parallel"):
            if mode in modes:
                return mode
        return next(iter(sorted(modes)), None)

    def headline_cells(self) -> Iterator[Cell]:
        """The cells in the mode that speaks for their run."""
        yield from (cell for cell in self.cells if cell.first.mode == self.headline_of(cell.first.run))


def mode_rank(mode: str) -> tuple[int, str]:
    """Sorting key: the known modes in MODE_ORDER, others after them by name."""
    return (MODE_ORDER.index(mode) if mode in MODE_ORDER else len(MODE_ORDER), mode)


def _cell_order(cell: Cell) -> tuple:
    point = cell.first
    return (point.task, not point.is_implicit, point.run, point.hard_fractions, point.length, mode_rank(point.mode))


def _as_tuple(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
