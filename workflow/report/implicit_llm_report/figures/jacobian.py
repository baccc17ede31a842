"""Theorem 1: heat maps of the state's Jacobian, explicit beside implicit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from implicit_llm_report.figures.axes import power_of_ten, tell_if_empty
from implicit_llm_report.figures.svg import Figure, Panel
from implicit_llm_report.inputs.frame import Group, groups, roles_of
from implicit_llm_report.inputs.given import Given

NAME = "jacobian"
MAX_TRAINED = 4  # heat maps of trained models
RANDOM = "random layer"


def jacobian_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Random layers, each kind once, which are the same in every evaluation of a kind; then trained models."""
    rows = frame[frame["kind"] == NAME]
    is_random = rows["setting"] == RANDOM
    random = [kind.rows[kind.rows["role"] == min(kind.roles)] for kind in groups(rows[is_random], ("is_implicit",))]
    names = [f"{RANDOM}, {'implicit' if one['is_implicit'].iloc[0] else 'explicit'}" for one in random]
    named = [one.assign(name=name) for one, name in zip(random, names, strict=True)]
    return pd.concat([rows[:0], *named, rows[~is_random]])


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


def jacobian(given: Given) -> Figure | None:
    """Heat maps, of one token each that has entries to draw."""
    models = groups(jacobian_rows(given.inputs.frame), ("name", "setting"))
    if not models and not any(item.config.get("kind") == NAME for item in given.config.missing):
        return None
    random = [model for model in models if model.setting == RANDOM]
    shown = random + [model for model in models if model.setting != RANDOM][:MAX_TRAINED]
    panels = tuple(
        Panel(model.name, partial(_draw, model=model), f"{model.name}: absolute values of the Jacobian")
        for model in shown
    )
    return Figure(
        NAME, "Jacobian of the state transition", panels or (Panel("Jacobian", _draw_nothing),), (), roles_of(shown)
    )


def _draw(axis: Axes, model: Group) -> None:
    pictures = model.curves("entries")
    if not pictures:
        _draw_nothing(axis)
        return
    draw_heat_map(axis, pictures[0])
    draw_color_bar(axis)
    axis.set(xlabel="entry of the state before the token", ylabel="after the token")


def _draw_nothing(axis: Axes) -> None:
    axis.set(xticks=[], yticks=[])
    tell_if_empty(axis, ())
