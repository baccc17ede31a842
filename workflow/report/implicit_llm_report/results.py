"""The measured numbers as the report uses them: per run, data set and mode, over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

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


def shares_of(hard: float | tuple[float, ...]) -> tuple[float, ...]:
    """Shares of hard tokens; several are mixed in equal parts."""
    return hard if isinstance(hard, tuple) else (hard,)


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


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
