"""The measured numbers as the report uses them: per run, data set and mode, over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from implicit_llm_contracts.runs.natural_order import natural
from implicit_llm_report.training_runs import Solver

# In this order a mode speaks for its model when the config names none.
HEADLINE_MODES = ("blockwise", "sequential", "simultaneous", "published")
# Order of modes in tables and legends, by falling work per answer.
MODE_ORDER = ("parallel", "blockwise", "sequential", "simultaneous", "published")
LAST_TEN, COST = "accuracy_last10", "f_evaluations_per_token"


class Measured(Protocol):
    """What every measured point has: the run of the workflow it came from, and its seed."""

    @property
    def role(self) -> str: ...

    @property
    def seed(self) -> int | None: ...


P = TypeVar("P", bound=Measured)


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
    iterations_per_token: float | None
    residual: float | None
    unconverged_share: float | None
    token_match_sequential: float | None
    phase: str | None = None
    solver: Solver | None = None
    trained_run: str | None = None  # `run` without what name_phases adds

    @classmethod
    def from_record(cls, record: dict[str, Any], role: str) -> Point:
        return from_record(cls, record, role)

    @property
    def phase_label(self) -> str | None:
        return None if self.solver is None else self.solver.label

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


def hard_label(fractions: Sequence[float]) -> str:
    """ "20 % hard"; several fractions are mixed in equal shares."""
    return " / ".join(f"{100 * fraction:g}" for fraction in fractions) + " % hard"


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


def seeds_words(spread: Spread) -> str:
    """ "3 seeds", and how many of them gave no number."""
    total = len(spread.values) + spread.num_missing
    words = f"{total} seed{'' if total == 1 else 's'}"
    return words + (f", {spread.num_missing} missing" if spread.num_missing else "")


@dataclass(frozen=True)
class BestSeed:
    """The best of several seeds."""

    value: float
    seed: int | None


@dataclass(frozen=True)
class Cell(Generic[P]):
    """The points of one run, data set and mode: one a seed, at least one."""

    points: tuple[P, ...]

    @property
    def first(self) -> P:
        return self.points[0]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(point.role for point in self.points)

    def spread(self, value: Callable[[P], float | None] | str) -> Spread:
        """`value` is a field of the points or a function of one."""
        read = value if callable(value) else lambda point: getattr(point, value)
        return Spread.of(read(point) for point in self.points)

    def best(self, field: str, *, is_low_better: bool = False) -> BestSeed | None:
        """The seed with the best number of `field`; None where there are not several to choose from."""
        known = [BestSeed(getattr(p, field), p.seed) for p in self.points if getattr(p, field) is not None]
        if len(known) < 2:
            return None
        return (min if is_low_better else max)(known, key=lambda best: best.value)


@dataclass(frozen=True)
class Results:
    """All points, with the ways in which figures, tables and claims look at them."""

    points: tuple[Point, ...]
    headline_mode: str | None = None

    @cached_property
    def cells(self) -> tuple[Cell[Point], ...]:
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

    @cached_property
    def of_lengths(self) -> Results:
        """Without the runs that were tested at their training length only, where others of the task go beyond theirs.

        Those tell how many layers a length takes, not how a model goes on.
        """
        beyond = {point.run for point in self.points if not point.is_trained_length}
        tasks = {point.task for point in self.points if point.run in beyond}
        kept = tuple(point for point in self.points if point.run in beyond or point.task not in tasks)
        return Results(kept, self.headline_mode)

    @property
    def run_names(self) -> set[str]:
        """The runs as they were trained, without what tells their phases apart."""
        return {point.trained_run or point.run for point in self.points}

    def headline_of(self, run: str) -> str | None:
        """The mode that speaks for a run: the config's, else the first of HEADLINE_MODES it was evaluated in."""
        return headline_mode({point.mode for point in self.points if point.run == run}, self.headline_mode)

    def headline_cells(self) -> Iterator[Cell[Point]]:
        """The cells in the mode that speaks for their run."""
        yield from (cell for cell in self.cells if cell.first.mode == self.headline_of(cell.first.run))


def name_phases(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points with a run name of its own for each phase, where a run was evaluated after several of its phases."""
    points = tuple(points)
    labels: dict[str, dict[str | None, str | None]] = {}
    for point in points:
        labels.setdefault(point.run, {})[point.phase] = point.phase_label
    return tuple(replace(point, run=_line_name(point, labels[point.run]), trained_run=point.run) for point in points)


def _line_name(point: Point, labels: dict[str | None, str | None]) -> str:
    if len(labels) == 1:
        return point.run
    is_unique = point.phase_label is not None and list(labels.values()).count(point.phase_label) == 1
    return f"{point.run} {point.phase_label if is_unique else point.phase}"


def from_record(kind: Any, record: dict[str, Any], role: str) -> Any:
    """A point of the dataclass `kind`: what the record lacks is missing (None), not zero."""
    values = {name: _frozen(record.get(name)) for name in kind.__dataclass_fields__}
    return kind(**values | {"role": role})


def headline_mode(modes: set[str], wanted: str | None) -> str | None:
    """The one of `modes` that speaks for a model: the wanted one if it is there, else the first of HEADLINE_MODES."""
    for mode in (wanted, *HEADLINE_MODES, "parallel"):
        if mode in modes:
            return mode
    return next(iter(sorted(modes)), None)


def mode_rank(mode: str) -> tuple[int, str]:
    """Sorting key: the known modes in MODE_ORDER, others after them by name."""
    return (MODE_ORDER.index(mode) if mode in MODE_ORDER else len(MODE_ORDER), mode)


def _cell_order(cell: Cell[Point]) -> tuple:
    point = cell.first
    return (
        point.task,
        not point.is_implicit,
        natural(point.run),
        point.hard_fractions,
        point.length,
        mode_rank(point.mode),
    )


def _as_tuple(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
