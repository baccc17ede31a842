"""The measured numbers as the report uses them: per run, data set and mode, over seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# In this order a mode speaks for its model when the config names none.
HEADLINE_MODES = ("blockwise", "sequential", "simultaneous", "published")
# Order of modes in tables and legends, by falling work per answer.
MODE_ORDER = ("parallel", "blockwise", "sequential", "simultaneous", "published")
LAST_TEN, COST = "accuracy_last10", "f_evaluations_per_token"


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


def headline_mode(modes: set[str], wanted: str | None) -> str | None:
    """The one of `modes` that speaks for a model: the wanted one if it is there, else the first of HEADLINE_MODES."""
    for mode in (wanted, *HEADLINE_MODES, "parallel"):
        if mode in modes:
            return mode
    return next(iter(sorted(modes)), None)


def mode_rank(mode: str) -> tuple[int, str]:
    """Sorting key: the known modes in MODE_ORDER, others after them by name."""
    return (MODE_ORDER.index(mode) if mode in MODE_ORDER else len(MODE_ORDER), mode)
