"""Theorem 1: heat maps of the state's Jacobian, explicit beside implicit, and its measures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from implicit_llm_report.axes import tell_if_empty
from implicit_llm_report.results import Cell, Spread, from_record
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.style import Series
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import csv_text, escape, rounded, spread_columns, spread_values

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


# Lower ends of the classes of absolute values. Cividis goes from dark to light for every kind of colour vision.
CLASSES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
COLORS = tuple(to_hex(matplotlib.colormaps["cividis"](share)) for share in np.linspace(0, 1, len(CLASSES)))
_CORNERS = ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))
_CODES = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)


def draw_heat_map(axis: Axes, entries: Sequence[Sequence[float]]) -> None:
    """Draw absolute values, the first row on top."""
    classes = np.searchsorted(CLASSES, np.asarray(entries), side="right") - 1
    for index, color in enumerate(COLORS):
        runs = list(_runs(classes == index))
        if runs:
            points = [(column + x * width, row + y) for row, column, width in runs for x, y in _CORNERS]
            path = Path(points, list(_CODES) * len(runs))
            axis.add_patch(PathPatch(path, facecolor=color, linewidth=0, antialiased=False))  # no seams
    rows, columns = classes.shape
    axis.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[])
    axis.grid(visible=False)


def class_legend() -> tuple[Series, ...]:
    """What the colours stand for."""
    labels = [f"below {CLASSES[1]:.0e}"]
    labels += [f"{low:.0e} to {high:.0e}" for low, high in pairwise(CLASSES[1:])]
    labels.append(f"{CLASSES[-1]:.0e} or more")
    return tuple(Series(_short(label), color, "s", has_line=False) for label, color in zip(labels, COLORS, strict=True))


def _short(label: str) -> str:
    return label.replace("e-0", "e−")


def _runs(is_in: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Row, first column and width of each stretch of true entries."""
    for row, line in enumerate(is_in):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], line.astype(np.int8), [0]))))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield row, int(start), int(end - start)


NAME = "jacobian"
MAX_TRAINED = 4  # heat maps of trained models
SHARES = {"off_diagonal_share_hard": True, "off_diagonal_share_identity": False}
MEASURES = ("off_diagonal_share", "transition_radius", "f_radius", "relative_difference")


def jacobian_section(given: SectionInputs) -> Section | None:
    """How the state before a token moves the state after it."""
    rows = jacobian_rows(given.inputs.records.get("jacobian", ()))
    if not rows and not any(hole.config.get("kind") == "jacobian" for hole in given.config.holes):
        return None
    files = {NAME: {"csv": _csv(rows), "tex": _latex(rows)}}
    return Section(NAME, "sections/jacobian.html.j2", rows, [_figure(rows)], files)


def _figure(rows: Sequence[JacobianRow]) -> Figure:
    shown = [row for row in rows if row.is_random] + [row for row in rows if not row.is_random][:MAX_TRAINED]
    panels = tuple(
        Panel(_title(row), partial(_draw, row=row), f"{row.name}: absolute values of the Jacobian") for row in shown
    )
    panels = panels or (Panel("Jacobian", _draw_nothing),)
    roles = tuple(dict.fromkeys(role for row in shown for role in row.cell.roles))
    return Figure(NAME, "Jacobian of the state transition", panels, class_legend(), roles)


def _title(row: JacobianRow) -> str:
    kind = "implicit" if row.first.is_implicit else "explicit"
    return row.name if kind in row.name else f"{row.name}, {kind}"


def _draw(axis: Axes, row: JacobianRow) -> None:
    picture = row.picture
    if picture is None or picture.entries is None:
        _draw_nothing(axis)
        return
    draw_heat_map(axis, picture.entries)
    axis.set(xlabel="entry of the state before the token", ylabel="after the token")


def _draw_nothing(axis: Axes) -> None:
    axis.set(xticks=[], yticks=[])
    tell_if_empty(axis, ())


def _csv(rows: Sequence[JacobianRow]) -> str:
    """One line a model; empty where there is no number."""
    head = ["model", "run", "phase", "kind", "setting", "data", "layer", "state_size"]
    head += ["num_tokens", "num_reached", *spread_columns((*MEASURES, *SHARES))]
    return csv_text(head, (_csv_row(row) for row in rows))


def _csv_row(row: JacobianRow) -> Iterator[object]:
    point = row.first
    yield from (row.name, point.run, point.phase, "implicit" if point.is_implicit else "explicit", point.setting)
    yield from (point.data, point.layer, point.state_size, len(row.cell.points), row.num_reached)
    for measure in MEASURES:
        yield from spread_values(row.spread(measure))
    for is_hard in SHARES.values():
        yield from spread_values(row.share_of(is_hard=is_hard))


def _latex(rows: Sequence[JacobianRow]) -> str:
    """Means over tokens, and the largest difference; needs the package booktabs."""
    lines = [
        "% means over tokens: share of the Jacobian's norm off the diagonal, spectral radii of the transition and of",
        "% df/dz; largest relative difference between the paper's formula and autograd",
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r"Model & off diagonal & $\rho(\partial h_t/\partial h_{t-1})$ & $\rho(\partial f/\partial z)$ & formula \\",
        r"\midrule",
    ]
    for row in rows:
        means = [rounded(row.spread(measure).mean) for measure in MEASURES[:3]]
        shown = ["--" if value is None else f"{value:.3g}" for value in (*means, row.worst_difference)]
        lines.append(" & ".join([escape(row.name), *shown]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
