"""Draw panels as SVG, with equal bytes for equal numbers.

The file of a figure is for papers and other pages. It has all panels, letters as outlines and a white background, and
looks the same everywhere. On the page each panel is an SVG of its own, so that panels wrap on a narrow screen. There,
letters are text in the page's font, so that searches and screen readers find them. The colours are the page's CSS
variables, which differ between light and dark mode.

The figures are readable in colour, to colour-blind readers and in grey: every series differs from its neighbours in
colour, marker and dashes at once. The constants have the light page's colours; on the page, each is a CSS variable.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D

PANEL_INCHES = (3.45, 2.5)
WIDE_PANEL_INCHES = (7.4, 2.6)
MAX_COLUMNS = 3
LEGEND_PT, HANDLE_EMS, LETTER_EMS = 8, 2.6, 0.62
TITLE_LETTERS = 32  # in a line of a title that fits above a panel
LEFT_PT, BOTTOM_PT, RIGHT_PT, TOP_PT = 46, 34, 12, 18  # margins around the axes
TITLE_PT = 12  # height of a line of a title
LINE_PT = 17  # height of a line of the legend
XLINK = "http://www.w3.org/1999/xlink"

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
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same outlines on every machine
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 15,
    "axes.titley": 1.0,  # otherwise matplotlib measures all tick labels to place the title
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


# The colours, and the looks (marker and dashes), of implicit (True) and explicit (False) lines. There are fewer looks
# than colours, so few lines agree in both.
_COLORS = {True: (BLUE, GREEN, PURPLE, INK, ROSE, OLIVE, CYAN), False: (VERMILION, AMBER, MUTED, BROWN)}
_LOOKS = {
    True: (("o", ()), ("D", (4, 1.4)), ("^", (5, 1.4, 1, 1.4)), ("v", (1.2, 1.2)), ("P", (3, 1.6))),
    False: (("s", (3, 1.6)), ("X", (1.2, 1.2)), ("p", (5, 1.4, 1, 1.4))),
}

# If a figure has any of these names, they all get the first styles in this order, so a mode looks the same everywhere.
_MODES = {
    f"implicit, {mode}": True
    for mode in ("blockwise-8-token", "sequential", "simultaneous", "released-criterion", "blockwise")
}


def series_of_names(names: Iterable[tuple[str, bool]]) -> dict[str, Series]:
    """Return the series of each (name, is implicit) by name, implicit ones first; equal names get one series."""
    wanted = dict(names)
    known = wanted if wanted.keys().isdisjoint(_MODES) else _MODES | wanted
    return {
        name: Series(name, _COLORS[kind][index % len(_COLORS[kind])], *_LOOKS[kind][index % len(_LOOKS[kind])])
        for kind in (True, False)
        for index, name in enumerate(name for name, is_implicit in known.items() if is_implicit == kind)
        if name in wanted
    }


@dataclass(frozen=True)
class Panel:
    """One pair of axes, which `draw` fills; `description` is the text for screen readers, by default the title."""

    title: str
    draw: Callable[[Axes], None] = field(compare=False)
    description: str = ""


@dataclass(frozen=True)
class Figure:
    """Panels with one legend. `roles`: the roles of the runs whose numbers the panels show.

    `is_wide`: whether each panel is as wide as the page.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    legend: tuple[Series, ...]
    roles: tuple[str, ...]
    is_wide: bool = False

    @property
    def panel_inches(self) -> tuple[float, float]:
        return WIDE_PANEL_INCHES if self.is_wide else PANEL_INCHES


@dataclass(frozen=True)
class Drawn:
    """A figure for the page: its panels, and a piece of line for each entry of the legend."""

    figure: Figure
    panels: Sequence[Markup]
    swatches: Sequence[tuple[str, Markup]]


def drawn(figure: Figure) -> Drawn:
    panels = []
    with matplotlib.rc_context(RC):
        for index, panel in enumerate(figure.panels):
            canvas, name = Canvas(figsize=figure.panel_inches), f"{figure.name}-{index}"
            _draw(canvas, panel, figure)
            panels.append(_for_page(_svg(canvas, name), name, panel.description or panel.title))
        swatches = [
            (series.label, _for_page(_swatch(series), f"{figure.name}-swatch-{index}", series.label))
            for index, series in enumerate(figure.legend)
        ]
    return Drawn(figure, panels, swatches)


def file_svg(figure: Figure) -> str:
    """Return the text of an SVG file with all panels, in at most MAX_COLUMNS columns, and the legend below them."""
    count, (width, height) = len(figure.panels), figure.panel_inches
    columns = 1 if figure.is_wide else min(count, 2 if count == 4 else MAX_COLUMNS)
    widest = (
        max((len(series.label) for series in figure.legend), default=0) * LETTER_EMS + HANDLE_EMS + 3
    )  # 3 for the spaces around an entry
    per_row = max(1, min(len(figure.legend), int(72 * columns * width / (widest * LEGEND_PT))))
    heights = [height] * math.ceil(count / columns)
    if figure.legend:
        heights.append((LINE_PT * math.ceil(len(figure.legend) / per_row) + 10) / 72)
    with matplotlib.rc_context(RC):
        canvas = Canvas(figsize=(columns * width, sum(heights)), facecolor=PAPER)
        grid = canvas.add_gridspec(len(heights), columns, height_ratios=heights)
        for index, panel in enumerate(figure.panels):
            _draw(canvas.add_subfigure(grid[divmod(index, columns)]), panel, figure)
        handles = [Line2D([], [], label=series.label, **series.line()) for series in figure.legend]
        if handles:
            place = canvas.add_subfigure(grid[-1, :])
            place.legend(handles=handles, loc="center", handlelength=HANDLE_EMS, fontsize=LEGEND_PT, ncols=per_row)
        return _svg(canvas, figure.name, "path")


def _draw(place: FigureBase, panel: Panel, figure: Figure) -> None:
    (width, height), title = (72 * inches for inches in figure.panel_inches), textwrap.wrap(panel.title, TITLE_LETTERS)
    top = TOP_PT + TITLE_PT * len(title)
    place.subplots_adjust(LEFT_PT / width, BOTTOM_PT / height, 1 - RIGHT_PT / width, 1 - top / height)
    axis = place.subplots()
    panel.draw(axis)
    axis.set_title("\n".join(title))


@cache
def _swatch(series: Series) -> str:
    """Draw a short piece of the series' line with its marker."""
    canvas = Canvas(figsize=(0.42, 0.16))
    canvas.add_artist(Line2D((0, 0.5, 1), (0.5,) * 3, markevery=[1], **series.line()))
    return _svg(canvas, "swatch")


def theme_css(column: int) -> str:
    """Return the declarations of the colour variables; `column` of THEME: 1 for the light page, 2 for the dark."""
    return " ".join(f"--{row[0]}: {row[column]};" for row in THEME)


def _svg(canvas: Canvas, name: str, letters: Literal["none", "path"] = "none") -> str:
    """Return the SVG with letters as text or as outlines; its ids depend only on their content and on `name`."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": letters, "svg.hashsalt": name}):
        canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _element(svg: str, prefix: str) -> str:
    """Return an SVG file as an element of a page, without a fixed size.

    The ids to which the file refers get `prefix`, and other ids are dropped.
    """
    prefix = re.sub(r"[^a-z0-9-]+", "-", prefix.lower())
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    head = rf'<svg viewBox="0 0 \1 \2" xmlns:xlink="{XLINK}">'
    svg = re.sub(r'<svg [^>]*?width="([\d.]+)pt" height="([\d.]+)pt"[^>]*>', head, svg, count=1)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: f' id="{prefix}-{match[1]}"' if match[1] in used else "", svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def _for_page(svg: str, prefix: str, description: str) -> Markup:
    """Return an SVG file as an element in the page's font and colours, with a description for screen readers."""
    svg = _element(svg, prefix).replace("<svg", '<svg role="img"', 1)
    svg = svg.replace(">", f"><title>{escape(description)}</title>", 1)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # the page's style sheet has the same rules
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", re.sub(r"font-family: [^;\"]*(; )?", "", svg))
    for name, light, _ in THEME:  # variables, which `theme_css` sets; matplotlib writes fixed colours
        svg = svg.replace(light, f"var(--{name})")
    return Markup(svg)
