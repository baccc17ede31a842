"""Draw panels of lines, with their axes, from rows of the frame (inputs/frame.py).

A line is the median of the seeds, because their mean can be far from every seed: it is 66 % for seeds at 99, 1 and
99 %. Thin lines show the single seeds if all points have equally many. Marks are means, and so are the levels of models
without a place on the axis.
"""

import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import AutoLocator, LogLocator

from implicit_llm_report.figures.svg import BAND, GRID, MUTED, Figure, Panel, Series, series_of_names
from implicit_llm_report.inputs.frame import Group, Spread, groups, headlines, roles_of
from implicit_llm_report.tables import title_of

NOTE: dict[str, Any] = {"xycoords": "axes fraction", "fontsize": 7, "color": MUTED}
MISSING_CHARACTERS = 52  # in a line of a note that fits into the width of a panel


@dataclass(frozen=True)
class Line:
    """A line through `points`, each a place on the horizontal axis and the spread over seeds there.

    `level` replaces the points of a model that has no place on this axis, and is drawn across the whole panel. `short`
    replaces `label` in the legend if all lines of the panel have different short names.
    """

    label: str
    is_implicit: bool
    points: Sequence[tuple[float, Spread]] = ()
    level: Spread | None = None
    groups: Sequence[Group] = ()
    width: float | None = None  # the width of a curve, which is drawn without markers; None for a line with markers
    short: str | None = None

    @property
    def spreads(self) -> list[Spread]:
        return [self.level] if self.level is not None else [spread for _, spread in self.points]

    @property
    def missing(self) -> list[str]:
        lost = [f"{x:g}" for x, spread in self.points if not spread.values]
        if self.level is None and len(lost) == len(self.points):
            return [self.label]
        return [f"{self.label} at {', '.join(lost)}"] if lost else []


@dataclass(frozen=True)
class Chart:
    """A panel of lines; `decorate` sets up its horizontal axis and draws everything except the lines."""

    title: str
    lines: Sequence[Line]
    decorate: Callable[[Axes], None] = field(compare=False)
    y_label: str = "accuracy, last 10 tokens"
    is_accuracy: bool = False  # whether the vertical axis is from 0 to 1; otherwise it is logarithmic
    roles: tuple[str, ...] = ()  # inputs whose numbers the chart shows, besides those of its lines
    level: tuple[str, float] | None = None  # name and value of a dotted horizontal line
    has_lines: bool = True  # otherwise there are only marks, because the values of the horizontal axis have no order


def charts_of(
    rows: pd.DataFrame, by: Sequence[str], x: str, metric: str, decorate: Callable[..., None], **look: Any
) -> list[Chart]:
    """Return a chart for each combination of values in `by`, with a line for each model over the column `x`.

    `look`: further fields of the charts.
    """
    return [
        Chart(
            title_of(test, by),
            [
                Line(
                    model.name,
                    bool(model.is_implicit),
                    [(at, cell.spread(metric)) for at, cell in model.cells(x).items()],
                    groups=[model],
                    short=model.label,
                )
                for model in groups(test.rows, ("name",))
            ],
            partial(decorate, test=test),
            **look,
        )
        for test in groups(rows, by)
    ]


def longest_charts(
    rows: pd.DataFrame,
    by: Sequence[str],
    points_of: Callable[[Group], list[tuple[float, Spread]]],
    decorate: Callable[..., None],
    **look: Any,
) -> list[Chart]:
    """Return a chart of each test's longest sequences in headline modes. `by`: the columns of a test, then "length".

    `points_of`: returns the points of a line. `look`: further fields of the charts.
    """
    charts = []
    for all_lengths in groups(headlines(rows), by[:-1]):
        longest = Group(all_lengths.rows[all_lengths.rows["length"] == max(all_lengths.rows["length"])])
        lines = [
            Line(cell.name, bool(cell.is_implicit), points_of(cell), groups=[cell], width=2.6, short=cell.label)
            for cell in groups(longest.rows, ("name", "data", "mode"))
        ]
        charts.append(Chart(title_of(longest, by), lines, partial(decorate, test=longest), **look))
    return charts


def chart_figure(
    name: str, title: str, charts: Sequence[Chart], marks: Iterable[Series] = (), **look: Any
) -> Figure | None:
    """Return a figure whose legend has a series for each name of a line, then `marks`; return None without charts."""
    if not charts:
        return None
    charts = list(map(_shortly_named, charts))
    lines = [line for chart in charts for line in chart.lines]
    series = series_of_names((line.label, line.is_implicit) for line in lines)
    panels = tuple(Panel(one.title, partial(draw_chart, chart=one, series=series), one.y_label) for one in charts)
    roles = [*roles_of(group for line in lines for group in line.groups), *(r for one in charts for r in one.roles)]
    return Figure(name, title, panels, (*series.values(), *marks), tuple(dict.fromkeys(roles)), **look)


def _shortly_named(chart: Chart) -> Chart:
    """Return the chart with the short names of its lines if these differ, else without the common start of labels."""
    labels, shorts = {line.label for line in chart.lines}, {line.short for line in chart.lines}
    shared = os.path.commonprefix(list(labels)) if len(labels) > 1 else ""  # noqa: RUF071  (letters, no path)
    start = max(shared.rfind(end) for end in "- ") + 1
    is_short = None not in shorts and len(shorts) == len(labels)
    return replace(
        chart,
        lines=[replace(line, label=str(line.short) if is_short else line.label[start:]) for line in chart.lines],
    )


def draw_chart(axis: Axes, chart: Chart, series: Mapping[str, Series]) -> None:
    for line in reversed(chart.lines):  # implicit lines are first and are drawn on top
        draw_line(axis, line, series[line.label], has_line=chart.has_lines)
    measured = [spread for line in chart.lines for spread in line.spreads if spread.values]
    if chart.level is not None:
        words, value = chart.level
        axis.axhline(value, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0.5)
        note(
            axis, f"{words} {value:g}", (0, value), xycoords=("axes fraction", "data"),
            xytext=(3, 2), textcoords="offset points", va="bottom",
        )  # fmt: skip
    if chart.is_accuracy:
        accuracy_axis(axis, chart.y_label)
    else:
        axis.set_ylabel(chart.y_label)
        axis.set_yscale("log")
        log_ticks(axis.yaxis)
    chart.decorate(axis)
    tell_if_empty(axis, measured)
    missing = [words for line in chart.lines for words in line.missing]
    if measured and missing:
        text = textwrap.fill("missing: " + ", ".join(missing), MISSING_CHARACTERS)
        note(axis, text, (0.98, 0.5), ha="right", va="center")  # mostly free: accuracies are near 1 or near chance


def draw_line(axis: Axes, line: Line, series: Series, *, has_line: bool) -> None:
    known = [(x, spread) for x, spread in line.points if spread.values]
    if line.level is not None and line.level.values:
        axis.axhline(line.level.mean, color=series.color, linestyle=(0, series.dashes or (3, 1.6)), linewidth=1.3)  # type: ignore[arg-type]
    elif not has_line:
        for x, spread in known:
            draw_mark(axis, x, spread, series)
    elif known:  # matplotlib would treat an empty line as a point at the origin
        at, seeds = [x for x, _ in known], [spread.values for _, spread in known]
        if max(map(len, seeds)) > 1:
            if len(set(map(len, seeds))) == 1:
                axis.plot(at, seeds, color=series.color, linewidth=0.7, alpha=0.6)
            points = [(x, value) for x, values in zip(at, seeds, strict=True) for value in values]
            if line.width is None:
                axis.plot(*zip(*points, strict=True), ".", color=series.color, markersize=3, alpha=0.8)
        look = series.line() | ({"clip_on": False} if line.width is None else {"marker": "", "linewidth": line.width})
        axis.plot(at, list(map(median, seeds)), **look, zorder=4)


def draw_mark(axis: Axes, x: float, spread: Spread, series: Series) -> None:
    """Draw the mean over seeds as a mark, and their range as a line."""
    axis.plot([x, x], [spread.low, spread.high], color=series.color, linewidth=1)  # type: ignore[arg-type]
    axis.plot(x, spread.mean, **series.line() | {"linestyle": "none"}, zorder=4, clip_on=False)  # type: ignore[arg-type]


def mark_training(axis: Axes, rows: pd.DataFrame, first: int, last: int) -> None:
    """Shade the axis up to each training length between `first` and `last`, the ends of the axis, and label it."""
    for length in sorted(length for length in rows["train_length"].dropna().unique() if first <= length <= last):
        axis.axvspan(1e-3, length, color=BAND, linewidth=0, zorder=0)
        axis.axvline(length, color=GRID, linewidth=1.2, zorder=0.5)
        note(axis, f"trained to {length}", (length, 1.015), xycoords=("data", "axes fraction"), ha="right", va="bottom")


def length_axis(axis: Axes, test: Group, *, is_beyond: bool = True) -> None:
    """Set a logarithmic axis with a tick at each test length; mark the training lengths if `is_beyond`."""
    lengths = list(test.cells("length"))
    if is_beyond:
        mark_training(axis, test.rows, lengths[0], lengths[-1])
    log_axis(axis, lengths, (lengths[0] / 1.25, lengths[-1] * 1.25), "test length (tokens)")


def log_axis(axis: Axes, ticks: Sequence[float], limits: tuple[float, float], label: str, base: int = 2) -> None:
    """Set a logarithmic horizontal axis with only these ticks."""
    axis.set_xscale("log", base=base)
    ticks_at(axis, ticks)
    axis.set(xlim=limits, xlabel=label)


def ticks_at(axis: Axes, values: Sequence[float], words: Callable[[float], str] = "{:g}".format) -> None:
    """Set a tick at each of the values and nowhere else."""
    axis.set_xticks(list(values), list(map(words, values)))
    axis.minorticks_off()


def accuracy_axis(axis: Axes, label: str) -> None:
    """Set a vertical axis for shares, with ticks from 0 to 100 %."""
    axis.set(ylim=(-0.03, 1.05), ylabel=label)
    axis.set_yticks((0, 0.25, 0.5, 0.75, 1), ("0 %", "25 %", "50 %", "75 %", "100 %"))


def log_ticks(axis: Axis, words: Callable[[float], str] = "{:.4g}".format) -> None:
    """Set round ticks on a logarithmic axis, with equal steps if the axis covers less than a factor of 3."""
    low, high = axis.get_view_interval()
    subs = (1,) if high > 300 * low else (1, 3) if high > 30 * low else (1, 2, 5)
    locator = AutoLocator() if high < 3 * low else LogLocator(subs=subs, numticks=12)
    axis.set(major_locator=locator, major_formatter=lambda value, _: words(value))
    axis.minorticks_off()


def tell_if_empty(axis: Axes, shown: Sequence[Any]) -> None:
    """Write "missing" in the middle of the axes if `shown` is empty."""
    if not shown:
        note(axis, "missing", (0.5, 0.5), ha="center", fontsize=9)


def note(axis: Axes, words: str, place: tuple[float, float], **look: Any) -> None:
    """Write small text at `place`, which is in shares of the axes' width and height unless `xycoords` is given."""
    axis.annotate(words, place, **NOTE | look)
