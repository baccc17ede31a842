"""Theorem 1: heat maps of the state's Jacobian, explicit beside implicit, and its measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from implicit_llm_report.axes import power_of_ten, tell_if_empty
from implicit_llm_report.frame import Group, Spread, groups, roles_of
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import fields, files_of, spread_fields

NAME = "jacobian"
MAX_TRAINED = 4  # heat maps of trained models
SHARES = {"off_diagonal_share_hard": True, "off_diagonal_share_identity": False}
MEASURES = ("off_diagonal_share", "transition_radius", "f_radius", "relative_difference")
RANDOM = "random layer"


@dataclass(frozen=True)
class JacobianRow:
    """A trained model, or the random layers of one kind; its records are single tokens."""

    name: str
    group: Group

    @property
    def is_random(self) -> bool:
        return self.group.setting == RANDOM

    def spread(self, metric: str) -> Spread:
        """Over tokens and seeds."""
        return self.group.spread(metric, over="record")

    def share_of(self, *, is_hard: bool) -> Spread:
        """The share off the diagonal at hard tokens, or at identity tokens, of a word problem."""
        rows = self.group.rows
        return JacobianRow(self.name, Group(rows[rows["is_hard"] == is_hard])).spread("off_diagonal_share")

    @property
    def num_reached(self) -> int:
        """Tokens at which there is a Jacobian: at the others the fixed point was not reached."""
        return len(self.spread("off_diagonal_share").values)


def jacobian_rows(frame: pd.DataFrame) -> list[JacobianRow]:
    """Random layers first, each kind once; then trained models. Explicit stands before implicit."""
    rows = frame[frame["kind"] == NAME]
    is_random = rows["setting"] == RANDOM
    kinds = groups(rows[is_random], ("is_implicit",), order=lambda kind: kind.is_implicit)
    # The same in every evaluation of a kind.
    random = [Group(kind.rows[kind.rows["role"] == min(kind.roles)]) for kind in kinds]
    trained = groups(rows[~is_random], ("run", "phase"), order=_order)
    named = [(f"random layer, {'implicit' if kind.is_implicit else 'explicit'}", kind) for kind in random]
    named += [(model.name, model) for model in trained]
    return [JacobianRow(name, group) for name, group in named]


def _order(model: Group) -> tuple:
    """By the run without its kind, so that explicit and implicit runs of one experiment stand together."""
    stem = model.run.replace("-explicit", "").replace("-implicit", "")
    return stem, model.is_implicit, model.run, model.phase or ""


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


def draw_color_bar(axis: Axes) -> None:
    """The colour scale beside the heat map."""
    bar = axis.inset_axes((1.04, 0, 0.06, 1))
    for index, color in enumerate(COLORS):
        bar.axhspan(index, index + 1, color=color, linewidth=0)
    bar.set(xticks=[], xlim=(0, 1), ylim=(0, len(COLORS)))
    bar.set_yticks(range(1, len(CLASSES)), [power_of_ten(bound) for bound in CLASSES[1:]])
    bar.yaxis.tick_right()
    bar.grid(visible=False)


def _runs(is_in: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Row, first column and width of each stretch of true entries."""
    for row, line in enumerate(is_in):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], line.astype(np.int8), [0]))))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield row, int(start), int(end - start)


def jacobian_section(given: SectionInputs) -> Section | None:
    """How the state before a token moves the state after it."""
    rows = jacobian_rows(given.inputs.frame)
    if not rows and not any(item.config.get("kind") == "jacobian" for item in given.config.missing):
        return None
    heads = ("off diagonal", "radius of the transition", "radius of df/dz", "formula against autograd")
    values = dict(zip(MEASURES, heads, strict=True))
    files = {NAME: files_of([("Jacobian", list(map(_csv_row, rows)))], {"model": "Model"}, values, form=".3g")}
    return Section(NAME, "sections/jacobian.html.j2", rows, [_figure(rows)], files)


def _figure(rows: Sequence[JacobianRow]) -> Figure:
    shown = [row for row in rows if row.is_random] + [row for row in rows if not row.is_random][:MAX_TRAINED]
    panels = tuple(
        Panel(_title(row), partial(_draw, row=row), f"{row.name}: absolute values of the Jacobian") for row in shown
    )
    panels = panels or (Panel("Jacobian", _draw_nothing),)
    roles = roles_of(row.group for row in shown)
    return Figure(NAME, "Jacobian of the state transition", panels, (), roles)


def _title(row: JacobianRow) -> str:
    kind = "implicit" if row.group.is_implicit else "explicit"
    return row.name if kind in row.name else f"{row.name}, {kind}"


def _draw(axis: Axes, row: JacobianRow) -> None:
    """One token that has entries to draw."""
    pictures = row.group.curves("entries")
    if not pictures:
        _draw_nothing(axis)
        return
    draw_heat_map(axis, pictures[0])
    draw_color_bar(axis)
    axis.set(xlabel="entry of the state before the token", ylabel="after the token")


def _draw_nothing(axis: Axes) -> None:
    axis.set(xticks=[], yticks=[])
    tell_if_empty(axis, ())


def _csv_row(row: JacobianRow) -> dict[str, object]:
    """One line a model; empty where there is no number."""
    shares = {name: row.share_of(is_hard=is_hard) for name, is_hard in SHARES.items()}
    about = fields(row.group, "model")
    return {
        **{"model": row.name, "run": row.group.run, "phase": row.group.phase, "kind": about["model"]},
        **fields(row.group, "setting", "data", "layer", "state_size"),
        **{"num_tokens": row.group.num_records, "num_reached": row.num_reached},
        **spread_fields(MEASURES, row.spread),
        **spread_fields(SHARES, shares.__getitem__),
    }
