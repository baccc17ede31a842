"""The fewest layers that solve a group at the length they were trained on: Merrill's protocol.

For every kind of model and training length, models of several depths are tested at that very length; the smallest depth
whose accuracy reaches the threshold counts. It is judged on the mean over seeds, and beside it on the best seed.
Source: Schöne et al. 2025, Fig. 1 left; after Merrill, Petty and Sabharwal 2024.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from implicit_llm.report.config import MinimumLayersConfig
from implicit_llm.report.results import BestSeed, Cell, Point, Results, Spread, Task


@dataclass(frozen=True)
class Depth:
    """Models of one depth at one training length."""

    num_layers: int
    cell: Cell[Point]
    measure: str

    @property
    def spread(self) -> Spread:
        return self.cell.spread(self.measure)

    @property
    def best(self) -> BestSeed | None:
        return self.cell.best(self.measure)


@dataclass(frozen=True)
class Fewest:
    """The smallest depth that solves a length.

    num_layers: None where none of the tested ones does; `is_bound` where a smaller depth gave no number, or where
    nothing solves it and a depth gave none. deepest: the largest with a number, None where nothing has one.
    """

    num_layers: int | None
    is_bound: bool
    deepest: int | None

    @property
    def words(self) -> str:
        """ "4", "≤ 4" where a smaller depth is missing, "> 16" where none of the depths does it, "missing"."""
        if self.num_layers is not None:
            return f"≤ {self.num_layers}" if self.is_bound else str(self.num_layers)
        return "missing" if self.is_bound or self.deepest is None else f"> {self.deepest}"


@dataclass(frozen=True)
class AtLength:
    """All depths of one kind of model at one training length, the shallowest first."""

    length: int
    depths: tuple[Depth, ...]
    threshold: float

    @property
    def by_mean(self) -> Fewest:
        return self._fewest([depth.spread.mean for depth in self.depths])

    @property
    def by_best(self) -> Fewest:
        return self._fewest([depth.spread.high for depth in self.depths])

    def at(self, num_layers: int) -> Depth | None:
        return next((depth for depth in self.depths if depth.num_layers == num_layers), None)

    def _fewest(self, values: list[float | None]) -> Fewest:
        known = [depth.num_layers for depth, value in zip(self.depths, values, strict=True) if value is not None]
        deepest, is_missing = max(known, default=None), False
        for depth, value in zip(self.depths, values, strict=True):
            if value is not None and value >= self.threshold:
                return Fewest(depth.num_layers, is_missing, deepest)
            is_missing |= value is None
        return Fewest(None, is_missing, deepest)


@dataclass(frozen=True)
class LayersNeeded:
    """One kind of model, explicit or implicit, over the training lengths."""

    is_implicit: bool
    at_lengths: tuple[AtLength, ...]

    @property
    def label(self) -> str:
        counts = sorted({depth.num_layers for at in self.at_lengths for depth in at.depths})
        words = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{'implicit' if self.is_implicit else 'explicit'}, {words} layer{'' if counts == [1] else 's'}"

    @property
    def num_layers(self) -> tuple[int, ...]:
        return tuple(sorted({depth.num_layers for at in self.at_lengths for depth in at.depths}))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for at in self.at_lengths for depth in at.depths for role in depth.cell.roles))

    def at(self, length: int) -> AtLength | None:
        return next((at for at in self.at_lengths if at.length == length), None)


def layers_needed(results: Results, config: MinimumLayersConfig) -> tuple[LayersNeeded, ...]:
    """Both kinds of model, implicit first, as far as there are runs of the group; each in its headline mode."""
    task = Task(config.group, config.monoid)
    cells = [cell for cell in results.headline_cells() if _is_meant(cell.first, task, config.hard_fraction)]
    found = []
    for is_implicit in (True, False):
        mine = [cell for cell in cells if cell.first.is_implicit == is_implicit]
        lengths = sorted({cell.first.length for cell in mine})
        at_lengths = tuple(
            AtLength(length, _depths([c for c in mine if c.first.length == length], config.measure), config.threshold)
            for length in lengths
        )
        if at_lengths:
            found.append(LayersNeeded(is_implicit, at_lengths))
    return tuple(found)


def _is_meant(point: Point, task: Task, hard_fraction: float | None) -> bool:
    """Tested at the length it was trained on, with no more hard tokens than in training."""
    if point.task != task or not point.is_trained_length or point.num_layers is None:
        return False
    return not point.is_harder and hard_fraction in (None, point.hard_fraction)


def _depths(cells: Iterable[Cell[Point]], measure: str) -> tuple[Depth, ...]:
    """One a depth: on the hardest of the tests, and of several runs the one of the highest mean."""
    chosen: dict[int, Depth] = {}
    for cell in cells:
        depth = Depth(cell.first.num_layers or 0, cell, measure)
        other = chosen.get(depth.num_layers)
        if other is None or _rank(depth) > _rank(other):
            chosen[depth.num_layers] = depth
    return tuple(chosen[num_layers] for num_layers in sorted(chosen))


def _rank(depth: Depth) -> tuple[float, float]:
    mean = depth.spread.mean
    return (max(depth.cell.first.hard_fractions), float("-inf") if mean is None else mean)
