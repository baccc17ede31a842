"""Panels of lines over the frame: means over seeds as lines, every seed as a dot, their range as a band."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from matplotlib.axes import Axes

from implicit_llm_report.axes import accuracy_axis, nice_log_ticks, tell_if_empty, tell_missing
from implicit_llm_report.frame import Group, Spread, roles_of
from implicit_llm_report.style import PAPER, Series, series_of_names
from implicit_llm_report.svg import Figure, Panel


@dataclass(frozen=True)
class Line:
    """A labelled line of spreads over seeds; `level` is one that has no place on the axis: drawn from side to side."""

    label: str
    is_implicit: bool
    points: Sequence[tuple[float, Spread]] = ()
    level: Spread | None = None
    groups: Sequence[Group] = ()
    mark: tuple[float, Spread] | None = None  # a point beside the line, in its colour
    width: float | None = None  # of a curve without markers and dots, which may be missing as a whole

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
    description: str = ""
    y_label: str = "accuracy, last 10 tokens"
    is_accuracy: bool = True


def chart_figure(
    name: str,
    title: str,
    charts: Sequence[Chart],
    marks: Iterable[Series] = (),
    known: Mapping[str, Series] | None = None,
) -> Figure | None:
    """One series for each label of all panels, unless `known` has them; `marks` follow. None without panels."""
    if not charts:
        return None
    lines = [line for chart in charts for line in chart.lines]
    series = known or series_of_names((line.label, line.is_implicit) for line in lines)
    panels = tuple(
        Panel(chart.title, partial(draw_chart, chart=chart, series=series), chart.description) for chart in charts
    )
    roles = roles_of(group for line in lines for group in line.groups)
    return Figure(name, title, panels, (*series.values(), *marks), roles)


def draw_chart(axis: Axes, chart: Chart, series: Mapping[str, Series]) -> None:
    for line in reversed(chart.lines):  # implicit ones come first and are drawn on top
        draw_line(axis, line, series[line.label])
    chart.decorate(axis)
    values = [value for line in chart.lines for spread in line.spreads for value in spread.values]
    if chart.is_accuracy:
        accuracy_axis(axis, chart.y_label)
    else:
        nice_log_ticks(axis, values)
        axis.set_ylabel(chart.y_label)
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
