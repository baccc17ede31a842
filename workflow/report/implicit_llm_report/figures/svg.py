"""From panels to SVG, with equal bytes for equal numbers.

Each panel is drawn once, with every text in both forms. The file is for papers and other pages: all panels, letters as
outlines, a white background, the same everywhere. On the page each panel is an SVG of its own, so that panels wrap on a
narrow screen; its letters are text in the page's font (found by searching, read aloud), its colours the page's
variables (light or dark).
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_mixed import MixedModeRenderer
from matplotlib.backends.backend_svg import RendererSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from implicit_llm_report.figures import style
from implicit_llm_report.figures.style import Series

PANEL_INCHES = (3.45, 2.5)
WIDE_PANEL_INCHES = (7.4, 2.6)
MAX_COLUMNS = 3
LEGEND_PT, HANDLE_EMS, LETTER_EMS = 8, 2.6, 0.62
TITLE_LETTERS = 32  # as many as fit above a panel
LEFT_PT, BOTTOM_PT, RIGHT_PT, TOP_PT = 46, 34, 12, 18  # around the axes
TITLE_PT = 12  # height of a line of a title
LINE_PT = 17  # of the legend
XLINK = "http://www.w3.org/1999/xlink"
_MARKS = ("outlines", "letters", "end of text")
_TEXT = re.compile("(.*?)".join(rf"<!-- {mark} -->\n" for mark in _MARKS), re.DOTALL)


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


@dataclass(frozen=True)
class Drawn:
    """A figure as SVG: panels for the page and for the file, and a piece of line for each entry of the legend."""

    figure: Figure
    panels: Sequence[Markup]
    outlines: Sequence[str]
    swatches: Sequence[tuple[str, Markup]]


def drawn(figure: Figure) -> Drawn:
    page, outlines = [], []
    with matplotlib.rc_context(style.RC):
        for index, panel in enumerate(figure.panels):
            name = f"{figure.name}-{index}"
            canvas, title = Canvas(figsize=figure.panel_inches), textwrap.wrap(panel.title, TITLE_LETTERS)
            (width, height), top = canvas.get_size_inches() * 72, TOP_PT + TITLE_PT * len(title)
            canvas.subplots_adjust(LEFT_PT / width, BOTTOM_PT / height, 1 - RIGHT_PT / width, 1 - top / height)
            axis = canvas.subplots()
            panel.draw(axis)
            axis.set_title("\n".join(title))
            outlined, lettered = _svg(canvas, name)
            page.append(_for_page(lettered, name, panel.description or panel.title))
            outlines.append(_element(outlined, name))
        swatches = [
            (series.label, _for_page(_swatch(series), f"{figure.name}-swatch-{index}", series.label))
            for index, series in enumerate(figure.legend)
        ]
    return Drawn(figure, page, outlines, swatches)


def file_svg(drawing: Drawn) -> bytes:
    """The whole figure as a file: the panels side by side, the legend below them."""
    figure, panels = drawing.figure, drawing.outlines
    columns = 1 if figure.is_wide else min(len(panels), 2 if len(panels) == 4 else MAX_COLUMNS)
    width, height = (72 * inches for inches in figure.panel_inches)
    pieces = [
        panel.replace("<svg", f'<svg x="{index % columns * width:g}" y="{index // columns * height:g}"'
                              f' width="{width:g}" height="{height:g}"', 1)
        for index, panel in enumerate(panels)
    ]  # fmt: skip
    whole, bottom = columns * width, math.ceil(len(panels) / columns) * height
    if figure.legend:
        legend, legend_height = _legend(figure, whole)
        pieces.append(legend.replace("<svg", f'<svg y="{bottom:g}" width="{whole:g}" height="{legend_height:g}"', 1))
        bottom += legend_height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="{XLINK}" width="{whole:g}pt" height="{bottom:g}pt"'
    paper = f'<rect width="100%" height="100%" fill="{style.PAPER}"/>'
    return "\n".join([f'{head} viewBox="0 0 {whole:g} {bottom:g}">', paper, *pieces, "</svg>\n"]).encode()


def _legend(figure: Figure, width: float) -> tuple[str, float]:
    """The legend with letters as outlines, and its height in points."""
    widest = max(len(series.label) for series in figure.legend) * LETTER_EMS + HANDLE_EMS + 3  # and the spaces around
    per_row = max(1, min(len(figure.legend), int(width / (widest * LEGEND_PT))))
    height = LINE_PT * math.ceil(len(figure.legend) / per_row) + 10
    with matplotlib.rc_context(style.RC):
        canvas = Canvas(figsize=(width / 72, height / 72))
        handles = [Line2D([], [], label=series.label, **series.line()) for series in figure.legend]
        canvas.legend(handles=handles, loc="center", ncols=per_row, handlelength=HANDLE_EMS, fontsize=LEGEND_PT)
        return _element(_svg(canvas, figure.name)[0], f"{figure.name}-legend"), height


@cache
def _swatch(series: Series) -> str:
    """A short piece of the series' line with its marker."""
    canvas = Canvas(figsize=(0.42, 0.16))
    canvas.add_artist(Line2D((0, 0.5, 1), (0.5,) * 3, markevery=[1], **series.line()))
    return _svg(canvas, "swatch")[1]


def theme_css(column: int) -> str:
    """The declarations of the colour variables; column 1 is the light page, 2 the dark one."""
    return " ".join(f"--{row[0]}: {row[column]};" for row in style.THEME)


class _Renderer(RendererSVG):
    """Writes each text as outlines and as letters, in comments that say which is which."""

    def draw_text(self, *args: Any, **options: Any) -> None:
        for form, mark in zip(("path", "none"), _MARKS, strict=False):
            self.writer.comment(mark)
            matplotlib.rcParams["svg.fonttype"] = form
            super().draw_text(*args, **options)
        self.writer.comment(_MARKS[-1])


def _svg(canvas: Canvas, name: str) -> list[str]:
    """With outlines and with letters; without `savefig`, which lays out and draws a figure twice.

    Ids are made of what they name and of `name`.
    """
    matplotlib.rcParams["svg.hashsalt"] = name
    buffer, dpi, canvas.dpi = io.StringIO(), canvas.dpi, 72
    letters: Any = _Renderer(*canvas.bbox.size, buffer, image_dpi=dpi)
    renderer: Any = MixedModeRenderer(canvas, *canvas.get_size_inches(), dpi, letters)  # type: ignore[call-arg]
    canvas.draw(renderer)
    renderer.finalize()
    return [_TEXT.sub(form, buffer.getvalue()) for form in (r"\1", r"\2")]


def _element(svg: str, prefix: str) -> str:
    """Make an SVG file a part of another: ids that are unique there, no fixed size."""
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
    """An element in the page's font and colours, with a description."""
    svg = _element(svg, prefix).replace("<svg", '<svg role="img"', 1)
    svg = svg.replace(">", f"><title>{escape(description)}</title>", 1)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # the page's style sheet says the same once
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", re.sub(r"font-family: [^;\"]*(; )?", "", svg))
    return Markup(with_variables(svg))


def with_variables(svg: str) -> str:
    """Its colours as variables, which `theme_css` sets: matplotlib writes fixed ones."""
    for name, light, _ in style.THEME:
        svg = svg.replace(light, f"var(--{name})")
    return svg
