"""Define the style of all figures for paper and page, readable in colour, to colour-blind readers and in grey.

Each series differs from its neighbours in colour, marker and dashes at once. The colours are those of the light page;
on the page each becomes a CSS variable, so that figures follow the reader's light or dark setting.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

INK, MUTED, GRID, PAPER, BAND = "#1b1f24", "#68717b", "#e2e6ea", "#ffffff", "#eff2f5"
BLUE, VERMILION, GREEN, PURPLE, AMBER = "#0b62a8", "#c9510c", "#0a7f67", "#94479a", "#a87400"
ROSE, OLIVE, CYAN, BROWN = "#c2255c", "#667a00", "#0f8aa6", "#7b4a35"

# Name of the CSS variable, colour on the light page, colour on the dark page.
THEME = (
    ("ink", INK, "#e4e7ea"),
    ("muted", MUTED, "#9aa4ae"),
    ("grid", GRID, "#2e343b"),
    ("paper", PAPER, "#14171b"),
    ("band", BAND, "#1e2329"),
    ("blue", BLUE, "#66b3ff"),
    ("vermilion", VERMILION, "#ff9a57"),
    ("green", GREEN, "#3fcfa6"),
    ("purple", PURPLE, "#dc9fe0"),
    ("amber", AMBER, "#e6bf52"),
    ("rose", ROSE, "#ff85ab"),
    ("olive", OLIVE, "#bdd048"),
    ("cyan", CYAN, "#5fd3ea"),
    ("brown", BROWN, "#cf9f86"),
)

RC: dict[Any, Any] = {  # Any: matplotlib types its keys as literals
    "font.family": ["DejaVu Sans"],  # part of matplotlib, so outlines are the same on every machine
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 15,
    "axes.titley": 1.0,  # otherwise matplotlib measures all tick labels to place it
    "axes.labelsize": 8.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "lines.linewidth": 1.7,
    "lines.markersize": 5,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "figure.facecolor": "none",
}


@dataclass(frozen=True)
class Series:
    """The name of a line and its style; `dashes` are lengths in units of the line width, empty for a solid line."""

    label: str
    color: str
    marker: str
    dashes: tuple[float, ...] = ()

    def line(self) -> dict[str, Any]:
        """Return the keyword arguments of Axes.plot."""
        style: dict[str, Any] = {"color": self.color, "linestyle": (0, self.dashes) if self.dashes else "-"}
        return style | {"marker": self.marker, "markeredgecolor": PAPER, "markeredgewidth": 0.7}


# Colours of implicit and explicit lines; the numbers of colours and looks differ, so that few lines are alike.
_COLORS = {True: (BLUE, GREEN, PURPLE, INK, ROSE, OLIVE, CYAN), False: (VERMILION, AMBER, MUTED, BROWN)}
_LOOKS = {
    True: (("o", ()), ("D", (4, 1.4)), ("^", (5, 1.4, 1, 1.4)), ("v", (1.2, 1.2)), ("P", (3, 1.6))),
    False: (("s", (3, 1.6)), ("X", (1.2, 1.2)), ("p", (5, 1.4, 1, 1.4))),
}

# Figures that distinguish modes start with these, so that each mode has the same style in all figures.
_MODES = {
    f"implicit, {mode}": True
    for mode in ("blockwise-8-token", "sequential", "simultaneous", "released-criterion", "blockwise")
}


def series_of_names(names: Iterable[tuple[str, bool]]) -> dict[str, Series]:
    """Return a series for each (name, is implicit), implicit ones first; equal names in several panels share one."""
    wanted = dict(names)
    known = wanted if wanted.keys().isdisjoint(_MODES) else _MODES | wanted
    return {
        name: Series(name, _COLORS[kind][index % len(_COLORS[kind])], *_LOOKS[kind][index % len(_LOOKS[kind])])
        for kind in (True, False)
        for index, name in enumerate(name for name, is_implicit in known.items() if is_implicit == kind)
        if name in wanted
    }
