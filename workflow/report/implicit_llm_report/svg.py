"""From panels to SVG, with equal bytes for equal numbers.

A figure is written twice. The file is for papers and other pages: all panels, letters as outlines, a white background,
the same everywhere. On the page each panel is an SVG of its own, so that panels wrap on a narrow screen; its letters
are text in the page's font (found by searching, read aloud), its colours the page's variables (light or dark).
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from implicit_llm_report import style
from implicit_llm_report.style import Series

PANEL_INCHES = (3.45, 2.5)
WIDE_PANEL_INCHES = (7.4, 2.6)
MAX_COLUMNS = 3
LEGEND_PT, HANDLE_EMS = 8, 2.6
TITLE_LETTERS = 36  # as many as fit above a panel
_PAD_INCHES = 0.09
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@dataclass(frozen=True)
class Panel:
    """One pair of axes: `draw` is called with it; `description` is what a screen reader says."""

    title: str
    draw: Callable[[Axes], None] = field(compare=False)
    description: str = ""


@dataclass(frozen=True)
class Figure:
    """Panels with one legend; `roles` are the runs whose numbers it shows. The panels of a wide one fill the page."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    legend: tuple[Series, ...]
    roles: tuple[str, ...]
    is_wide: bool = False

    @property
    def panel_inches(self) -> tuple[float, float]:
        return WIDE_PANEL_INCHES if self.is_wide else PANEL_INCHES


def file_svg(figure: Figure) -> bytes:
    """The whole figure as a file."""
    columns = 1 if figure.is_wide else min(len(figure.panels), 2 if len(figure.panels) in (2, 4) else MAX_COLUMNS)
    rows = math.ceil(len(figure.panels) / columns)
    width, height = figure.panel_inches
    per_row = _entries_per_row(figure.legend, columns * width)
    legend_inches = 0.24 * math.ceil(len(figure.legend) / per_row) + 0.1
    with _style(figure.name, "path"):
        canvas = Canvas(
            figsize=(columns * width, rows * height + legend_inches),
            facecolor=style.PAPER,
            layout=ConstrainedLayoutEngine(w_pad=_PAD_INCHES, h_pad=_PAD_INCHES),
        )
        axes = list(canvas.subplots(rows, columns, squeeze=False).flat)
        for axis, panel in zip(axes, figure.panels, strict=False):
            _draw(axis, panel)
        for axis in axes[len(figure.panels) :]:
            axis.set_visible(False)
        handles = [_handle(series) for series in figure.legend]
        look = {"handlelength": HANDLE_EMS, "fontsize": LEGEND_PT}
        if handles:
            canvas.legend(handles=handles, loc="outside lower center", ncols=per_row, **look)
        return _svg(canvas).encode()


def _entries_per_row(legend: Sequence[Series], inches: float) -> int:
    """As many as fit beside each other, all as wide as the widest."""
    labels = [TextPath((0, 0), series.label, size=LEGEND_PT).get_extents().width for series in legend]
    entry_pt = max(labels, default=0.0) + (HANDLE_EMS + 3) * LEGEND_PT  # the handle, and the spaces around it
    return max(1, min(len(legend), int(72 * inches // entry_pt)))


def panel_svg(figure: Figure, index: int) -> str:
    """One panel as an element of the page."""
    panel = figure.panels[index]
    with _style(f"{figure.name}-{index}", "none"):
        canvas = Canvas(figsize=figure.panel_inches)
        axis = canvas.subplots()
        _draw(axis, panel)
        _fit(axis, canvas)
        return _for_page(_svg(canvas), f"{figure.name}-{index}", panel.description or panel.title)


def _fit(axis: Axes, canvas: Canvas) -> None:
    """Give the axes all that their labels leave of the panel: of one panel in a third of a layout engine's time."""
    outer, inner, page = axis.get_tightbbox(), axis.get_window_extent(), canvas.bbox
    pad = 0.04 * canvas.dpi
    assert outer is not None
    left, bottom = inner.x0 - outer.x0 + pad, inner.y0 - outer.y0 + pad
    right, top = outer.x1 - inner.x1 + pad, outer.y1 - inner.y1 + pad
    width, height = page.width - left - right, page.height - bottom - top
    axis.set_position((left / page.width, bottom / page.height, width / page.width, height / page.height))


def swatch_svg(figure: Figure, series: Series) -> str:
    """A short piece of the series' line with its marker, for the figure's legend on the page."""
    with _style(f"swatch-{series.label}", "none"):
        canvas = Canvas(figsize=(0.42, 0.16))
        axis = canvas.add_axes((0, 0, 1, 1))
        axis.set_axis_off()
        axis.plot([0, 1, 2], [0, 0, 0], markevery=[1], **series.line(has_markers=bool(series.marker)))
        axis.set(xlim=(0, 2), ylim=(-1, 1))
        return _for_page(_svg(canvas), f"{figure.name}-swatch-{series.label}", series.label)


def theme_css(column: int) -> str:
    """The declarations of the colour variables; column 1 is the light page, 2 the dark one."""
    return " ".join(f"--{row[0]}: {row[column]};" for row in style.THEME)


def _style(salt: str, fonttype: str) -> AbstractContextManager[None]:
    return matplotlib.rc_context({**style.RC, "svg.fonttype": fonttype, "svg.hashsalt": salt})


def _draw(axis: Axes, panel: Panel) -> None:
    panel.draw(axis)
    axis.set_title(textwrap.fill(panel.title, TITLE_LETTERS))


def _handle(series: Series) -> Line2D:
    return Line2D([], [], label=series.label, **series.line(has_markers=bool(series.marker)))


def _svg(canvas: Canvas) -> str:
    """Printed without `savefig`, which lays out and draws a figure twice."""
    buffer = io.StringIO()
    FigureCanvasSVG(canvas).print_svg(buffer, metadata=_NO_METADATA)
    return re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)


def _for_page(svg: str, prefix: str, description: str) -> str:
    """Make an SVG file an element: unique ids, the page's font and colours, a description, no fixed size."""
    prefix = re.sub(r"[^a-z0-9-]+", "-", prefix.lower())
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    head = r'<svg viewBox="0 0 \1 \2" role="img" xmlns:xlink="http://www.w3.org/1999/xlink">'
    svg = re.sub(r'<svg [^>]*?width="([\d.]+)pt" height="([\d.]+)pt"[^>]*>', head, svg, count=1)
    svg = svg.replace(">", f"><title>{_escape(description)}</title>", 1)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: f' id="{prefix}-{match[1]}"' if match[1] in used else "", svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # the page's style sheet says the same once
    svg = re.sub(r"font-family: [^;\"]*(; )?|font: ([\d.]+px) [^;\"]*", _page_font, svg)
    for name, light, _ in style.THEME:
        svg = svg.replace(light, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", svg).strip()


def _page_font(match: re.Match[str]) -> str:
    return f"font-size: {match[2]}" if match[2] else ""


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
