"""Panels of lines over the frame: means over seeds as lines, every seed as a dot, their range as a band."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_report.figures.axes import accuracy_axis, nice_log_ticks, tell_if_empty, tell_missing
from implicit_llm_report.figures.style import MUTED, PAPER, Series, series_of_names
from implicit_llm_report.figures.svg import Figure, Panel
from implicit_llm_report.inputs.frame import Group, Spread, groups, roles_of
from implicit_llm_report.registry import Entry
from implicit_llm_report.tables import title_of


@dataclass(frozen=True)
class Line:
    """A line of spreads over seeds; `level` is one that has no place on the axis: drawn from side to side.

    `short` is its name in the legend where no other line of a panel has the same.
    """

    label: str
    is_implicit: bool
    points: Sequence[tuple[float, Spread]] = ()
    level: Spread | None = None
    groups: Sequence[Group] = ()
    mark: tuple[float, Spread] | None = None  # a point beside the line, in its colour
    width: float | None = None  # of a curve without markers and dots, which may be missing as a whole
    short: str | None = None

    @property
    def spreads(self) -> list[Spread]:
        return [self.level] if self.level is not None else [spread for _, spread in self.points]

    @property
    def missing(self) -> list[str]:
        if self.width is not None:
            return [] if self.points else [self.label]
        return [f"{self.label} at {x:g}" for x, spread in self.points if not spread.values]


@dataclass(frozen=True)
class Chart:
    """A panel of lines; `decorate` draws what is its own: the horizontal axis, and marks beside the lines."""

    title: str
    lines: Sequence[Line]
    decorate: Callable[[Axes], None] = field(compare=False)
    y_label: str = "accuracy, last 10 tokens"
    is_accuracy: bool = True
    roles: tuple[str, ...] = ()  # beside those of the lines
    level: tuple[str, float] | None = None  # a value with its name, as a dotted line


def line_of(model: Group, x: str, metric: str) -> Line:
    """A model by the values of a column."""
    points = [(at, cell.spread(metric)) for at, cell in model.cells(x).items()]
    return Line(model.name, bool(model.is_implicit), points, groups=[model], short=model.label)


def charts_of(
    rows: pd.DataFrame,
    by: Sequence[str],
    x: str,
    metric: str,
    decorate: Callable[..., None],
    **look: Any,
) -> list[Chart]:
    """A chart for each test, of all its models."""
    return [
        Chart(title_of(test, Entry(by=tuple(by))), [line_of(one, x, metric) for one in groups(test.rows, ("name",))],
              partial(decorate, test=test), **look)
        for test in groups(rows, by)
    ]  # fmt: skip


def chart_figure(name: str, title: str, charts: Sequence[Chart], marks: Iterable[Series] = ()) -> Figure | None:
    """One series for each name of a line in all panels; `marks` follow. None without panels."""
    if not charts:
        return None
    is_short = all(len({line.short for line in chart.lines}) == len(chart.lines) for chart in charts)
    if is_short and all(line.short for chart in charts for line in chart.lines):
        charts = [replace(c, lines=[replace(line, label=line.short) for line in c.lines]) for c in charts]  # type: ignore[arg-type]
    lines = [line for chart in charts for line in chart.lines]
    series = series_of_names((line.label, line.is_implicit) for line in lines)
    panels = tuple(
        Panel(chart.title, partial(draw_chart, chart=chart, series=series), chart.y_label) for chart in charts
    )
    roles = dict.fromkeys((*roles_of(g for line in lines for g in line.groups), *(r for c in charts for r in c.roles)))
    return Figure(name, title, panels, (*series.values(), *marks), tuple(roles))


def draw_chart(axis: Axes, chart: Chart, series: Mapping[str, Series]) -> None:
    for line in reversed(chart.lines):  # implicit ones come first and are drawn on top
        draw_line(axis, line, series[line.label])
    chart.decorate(axis)
    values = [value for line in chart.lines for spread in line.spreads for value in spread.values]
    if chart.is_accuracy:
        accuracy_axis(axis, chart.y_label)
    else:
        nice_log_ticks(axis, [*values, *([chart.level[1]] if chart.level else [])])
        axis.set_ylabel(chart.y_label)
    if chart.level is not None:
        words, value = chart.level
        axis.axhline(value, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0.5)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axis.annotate(f"{words} {value:g}", (1, value), **place, fontsize=7, color=MUTED)
    axis.grid(visible=False, axis="x")
    tell_if_empty(axis, values)
    tell_missing(axis, [words for line in chart.lines for words in line.missing] if values else [])


def draw_line(axis: Axes, line: Line, series: Series) -> None:
    if line.level is not None:
        if line.level.mean is not None:
            dashes = (0, series.dashes or (3, 1.6))
            axis.axhline(line.level.mean, color=series.color, linestyle=dashes, linewidth=1.3)
        return
    known = [(x, spread) for x, spread in line.points if spread.values]
    if not known:
        return  # an empty line would count as one at the origin
    at = [x for x, _ in known]
    if any(len(spread.values) > 1 for _, spread in known):
        lows, highs = [spread.low for _, spread in known], [spread.high for _, spread in known]
        axis.fill_between(at, lows, highs, color=series.color, alpha=0.16, linewidth=0)  # type: ignore[arg-type]
        if line.width is None:
            seeds = [(x, value) for x, spread in known for value in spread.values]
            axis.plot(*zip(*seeds, strict=True), ".", color=series.color, markersize=3, alpha=0.8)
    means, look = [spread.mean for _, spread in known], series.line(has_markers=line.width is None)
    look |= {"clip_on": False} if line.width is None else {"linewidth": line.width}
    axis.plot(at, means, **look, zorder=4)  # type: ignore[arg-type]
    if line.mark is not None and line.mark[1].mean is not None:
        (dot,) = axis.plot(line.mark[0], line.mark[1].mean, "o", color=series.color, markersize=8, zorder=6)
        dot.set(markeredgecolor=PAPER, clip_on=False)
