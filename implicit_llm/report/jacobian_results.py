"""Measured Jacobians of the state transition as the report uses them: by model, over its tokens and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from implicit_llm.report.results import Cell, Spread, from_record

RANDOM = "random layer"
Entries = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class JacobianPoint:
    """One record of an evaluation of kind `jacobian`, of one token; None is a missing number."""

    role: str
    run: str
    phase: str | None
    seed: int | None
    is_implicit: bool
    setting: str
    data: str | None
    layer: int
    position: int
    state_size: int | None
    is_hard: bool | None
    off_diagonal_share: float | None
    transition_radius: float | None
    f_radius: float | None
    relative_difference: float | None
    entries: Entries | None


@dataclass(frozen=True)
class JacobianRow:
    """A trained model, or the random layers of one kind."""

    name: str
    cell: Cell[JacobianPoint]

    @property
    def first(self) -> JacobianPoint:
        return self.cell.first

    @property
    def is_random(self) -> bool:
        return self.first.setting == RANDOM

    def spread(self, field: str) -> Spread:
        return self.cell.spread(field)

    def share_of(self, *, is_hard: bool) -> Spread:
        """The share off the diagonal at hard tokens, or at identity tokens, of a word problem."""
        return Spread.of(point.off_diagonal_share for point in self.cell.points if point.is_hard is is_hard)

    @property
    def worst_difference(self) -> float | None:
        """The largest relative difference of formula and autograd."""
        return self.spread("relative_difference").high

    @property
    def num_reached(self) -> int:
        """Tokens at which there is a Jacobian: at the others the fixed point was not reached."""
        return len(self.spread("off_diagonal_share").values)

    @property
    def picture(self) -> JacobianPoint | None:
        """A token with entries to draw."""
        return next((point for point in self.cell.points if point.entries), None)


def jacobian_rows(records: Iterable[Mapping[str, Any]]) -> tuple[JacobianRow, ...]:
    """Random layers first, each kind once; then trained models. Explicit stands before implicit."""
    points = [_point(record) for record in records]
    by_key: dict[tuple, list[JacobianPoint]] = {}
    for point in points:
        is_random = point.setting == RANDOM
        run, phase = ("", "") if is_random else (point.run, point.phase or "")
        by_key.setdefault((not is_random, _stem(run), point.is_implicit, run, phase), []).append(point)
    several = {(run, phase) for _, _, _, run, phase in by_key}
    return tuple(_row(by_key[key], several) for key in sorted(by_key))


def _row(points: Sequence[JacobianPoint], several: set[tuple[str, str]]) -> JacobianRow:
    first = points[0]
    if first.setting == RANDOM:  # the same in every evaluation of its kind
        points = [point for point in points if point.role == min(other.role for other in points)]
        name = f"random layer, {'implicit' if first.is_implicit else 'explicit'}"
    else:
        is_alone = len([run for run, _ in several if run == first.run]) == 1
        name = first.run if is_alone else f"{first.run} {first.phase}"
    return JacobianRow(name, Cell(tuple(sorted(points, key=lambda p: (p.seed or 0, p.position)))))


def _stem(run: str) -> str:
    """The run without its kind, so that explicit and implicit runs of one experiment stand together."""
    return run.replace("-explicit", "").replace("-implicit", "")


def _point(record: Mapping[str, Any]) -> JacobianPoint:
    point: JacobianPoint = from_record(JacobianPoint, dict(record), record["role"])
    return point
