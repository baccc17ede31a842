"""Draw panels as SVG, with equal bytes for equal numbers.

The file is for papers and other pages: all panels, letters as outlines and a white background, the same everywhere. On
the page each panel is a separate SVG, so that panels wrap on a narrow screen. Its letters are text in the page's font,
which can be searched and read aloud, and its colours are the page's variables (light or dark).
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D

from implicit_llm_report.figures import style
from implicit_llm_report.figures.style import Series

PANEL_INCHES = (3.45, 2.5)
WIDE_PANEL_INCHES = (7.4, 2.6)
MAX_COLUMNS = 3
LEGEND_PT, HANDLE_EMS, LETTER_EMS = 8, 2.6, 0.62
TITLE_LETTERS = 32  # the number that fits above a panel
LEFT_PT, BOTTOM_PT, RIGHT_PT, TOP_PT = 46, 34, 12, 18  # around the axes
TITLE_PT = 12  # height of a line of a title
LINE_PT = 17  # height of a line of the legend
XLINK = "http://www.w3.org/1999/xlink"


@dataclass(frozen=True)
class Panel:
    """One pair of axes, on which `draw` is called; `description` is the text for screen readers."""

    title: str
    draw: Callable[[Axes], None] = field(compare=False)
    description: str = ""


@dataclass(frozen=True)
class Figure:
    """Panels with one legend; `roles` are the runs whose numbers it shows. Panels of a wide figure fill the page."""

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
    with matplotlib.rc_context(style.RC):
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
    """Return the whole figure as a file, with the panels side by side and the legend below them."""
    count, (width, height) = len(figure.panels), figure.panel_inches
    columns = 1 if figure.is_wide else min(count, 2 if count == 4 else MAX_COLUMNS)
    widest = (
        max((len(series.label) for series in figure.legend), default=0) * LETTER_EMS + HANDLE_EMS + 3
    )  # 3 for the spaces around an entry
    per_row = max(1, min(len(figure.legend), int(72 * columns * width / (widest * LEGEND_PT))))
    heights = [height] * math.ceil(count / columns)
    if figure.legend:
        heights.append((LINE_PT * math.ceil(len(figure.legend) / per_row) + 10) / 72)
    with matplotlib.rc_context(style.RC):
        canvas = Canvas(figsize=(columns * width, sum(heights)), facecolor=style.PAPER)
        grid = canvas.add_gridspec(len(heights), columns, height_ratios=heights)
        for index, panel in enumerate(figure.panels):
            _draw(canvas.add_subfigure(grid[divmod(index, columns)]), panel, figure)
        handles = [Line2D([], [], label=series.label, **series.line()) for series in figure.legend]
        if handles:
            look: dict[str, Any] = {"handlelength": HANDLE_EMS, "fontsize": LEGEND_PT, "ncols": per_row}
            canvas.add_subfigure(grid[-1, :]).legend(handles=handles, loc="center", **look)
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
    """Return the declarations of the colour variables; column 1 is for the light page, 2 for the dark one."""
    return " ".join(f"--{row[0]}: {row[column]};" for row in style.THEME)


def _svg(canvas: Canvas, name: str, letters: Literal["none", "path"] = "none") -> str:
    """Return the SVG with letters as text or as outlines; its ids depend only on their content and on `name`."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": letters, "svg.hashsalt": name}):
        canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _element(svg: str, prefix: str) -> str:
    """Make an SVG file a part of a page, with ids that are unique there and without a fixed size."""
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
    """Return an element in the page's font and colours, with a description."""
    svg = _element(svg, prefix).replace("<svg", '<svg role="img"', 1)
    svg = svg.replace(">", f"><title>{escape(description)}</title>", 1)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # the page's style sheet has the same rules
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", re.sub(r"font-family: [^;\"]*(; )?", "", svg))
    return Markup(with_variables(svg))


def with_variables(svg: str) -> str:
    """Replace the fixed colours that matplotlib writes by variables, which `theme_css` sets."""
    for name, light, _ in style.THEME:
        svg = svg.replace(light, f"var(--{name})")
    return svg
