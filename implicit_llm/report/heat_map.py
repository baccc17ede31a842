"""A matrix as a heat map in few colours: one path for each, so that the drawing stays small and sharp in SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from implicit_llm.report.style import Series

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
