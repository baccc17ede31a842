"""Measured agreement of modes, and convergence by iteration, over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from implicit_llm.report.model_point import ModelPoint, name_among
from implicit_llm.report.published import Published, PublishedDuality
from implicit_llm.report.results import Cell, Spread, mode_rank

PAIR, CONVERGENCE = "pair", "convergence"


@dataclass(frozen=True)
class DualityPoint(ModelPoint):
    """One record of a duality evaluation: a pair of modes, or (against None) a convergence; None is a missing number.

    token_agreement: share of tokens with the same prediction; distances are of logits, kl in nats a token.
    """

    data: str
    length: int
    mode: str
    against: str | None
    eval_mode: str | None
    eval_tol: float | None
    num_tokens: int | None
    token_agreement: float | None
    logit_distance_mean: float | None
    logit_distance_max: float | None
    logit_std: float | None
    kl: float | None
    against_f_evaluations_per_token: float | None
    convergence: Mapping[str, Sequence[float]] | None


DualityCell = Cell[DualityPoint]


@dataclass(frozen=True)
class DualityRow:
    """A model's pair of modes on a data set, and the published number of the same thing."""

    name: str
    cell: DualityCell
    published: PublishedDuality | None

    @property
    def first(self) -> DualityPoint:
        return self.cell.first

    @property
    def agreement(self) -> Spread:
        return self.cell.spread("token_agreement")

    @property
    def largest_distance(self) -> float | None:
        """Over seeds."""
        return self.cell.spread("logit_distance_max").high


@dataclass(frozen=True)
class DualityTable:
    """All pairs on one data set at one length."""

    data: str
    length: int
    rows: tuple[DualityRow, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for row in self.rows for role in row.cell.roles))


@dataclass(frozen=True)
class ConvergenceLine:
    """The convergence of one model on one data set over seeds."""

    name: str
    cell: DualityCell


def duality_tables(records: Iterable[Mapping[str, Any]], published: Published) -> list[DualityTable]:
    """One a data set and length: explicit models last, of each model the pairs with the nearest to generation first."""
    points = _points(records, PAIR)
    tables = []
    for data, length in sorted({(point.data, point.length) for point in points}):
        mine = [point for point in points if (point.data, point.length) == (data, length)]
        cells = _cells(mine, lambda point: (point.variant, point.mode, point.against))
        cells.sort(key=_order)
        rows = [
            DualityRow(name_among(cell.first, points), cell, published.duality_beside(cell.first)) for cell in cells
        ]
        tables.append(DualityTable(data, length, tuple(rows)))
    return tables


def convergence_lines(records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], list[ConvergenceLine]]:
    """The lines of each data set and length, of models that have one."""
    points = _points(records, CONVERGENCE)
    found: dict[tuple[str, int], list[ConvergenceLine]] = {}
    for cell in _cells(points, lambda point: (point.data, point.length, point.variant)):
        line = ConvergenceLine(name_among(cell.first, points), cell)
        found.setdefault((cell.first.data, cell.first.length), []).append(line)
    return {place: sorted(lines, key=lambda line: line.name) for place, lines in sorted(found.items())}


def _points(records: Iterable[Mapping[str, Any]], measure: str) -> list[DualityPoint]:
    """Those of one measure, without sweeps."""
    chosen = [dict(record) for record in records if record.get("measure") == measure and not record.get("sweep")]
    return [DualityPoint.from_record(record, record["role"]) for record in chosen]


def _cells(points: Iterable[DualityPoint], key: Any) -> list[DualityCell]:
    groups: dict[Any, list[DualityPoint]] = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    return [Cell(tuple(sorted(group, key=lambda point: point.seed or 0))) for group in groups.values()]


def _order(cell: DualityCell) -> tuple:
    point = cell.first
    return (not point.is_implicit, point.run, point.phase or "", point.against != "sequential", mode_rank(point.mode))
