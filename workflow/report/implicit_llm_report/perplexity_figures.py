"""Figures of held-out perplexity: by length, by position, by size, and by the share of the bounded phase."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from implicit_llm_report.axes import (
    amount_axis,
    length_axis,
    mark_training,
    nice_log_ticks,
    tell_if_empty,
    tell_missing,
)
from implicit_llm_report.babi import SAME_TOKENS
from implicit_llm_report.pairs import choose_line, kinds_of
from implicit_llm_report.perplexity import (
    Comparison,
    Line,
    PerplexityCell,
    PerplexityResults,
    branches_of,
    is_close,
    tokens_of,
    trained_length,
)
from implicit_llm_report.results import Spread
from implicit_llm_report.style import Series, run_series, series_of_names
from implicit_llm_report.svg import Figure, Panel

PERPLEXITY = "perplexity"


def perplexity_by_length(results: PerplexityResults) -> Figure | None:
    """Held-out perplexity against the length of the test rows, one panel a family, size and test set."""
    if not results.comparisons:
        return None
    series = series_of_names(
        (comparison.name(line), line.variant.is_implicit)
        for comparison in results.comparisons
        for line in comparison.headlines
    )
    panels = tuple(
        Panel(
            comparison.title,
            partial(_draw_by_length, comparison=comparison, series=series),
            f"{comparison.title}: perplexity against test length",
        )
        for comparison in results.comparisons
    )
    lines = [line for comparison in results.comparisons for line in comparison.headlines]
    roles = tuple(dict.fromkeys(role for line in lines for role in line.roles))
    return Figure("perplexity-by-length", "Perplexity by test length", panels, tuple(series.values()), roles)


def _draw_by_length(axis: Axes, comparison: Comparison, series: Mapping[str, Series]) -> None:
    mark_training(axis, comparison.train_lengths, (comparison.lengths[0], comparison.lengths[-1]), is_log=True)
    drawn: list[float] = []
    for line in reversed(comparison.headlines):  # implicit ones on top
        drawn += _draw_line(axis, line, series[comparison.name(line)])
    length_axis(axis, comparison.lengths)
    nice_log_ticks(axis, drawn)
    axis.set_ylabel("perplexity")
    tell_if_empty(axis, drawn)
    if drawn:
        tell_missing(axis, _missing(comparison, comparison.headlines))


def _draw_line(axis: Axes, line: Line, series: Series) -> list[float]:
    """The mean over seeds as a line, every seed as a point, the range as a band; returns the values."""
    present = [(cell.first.length, cell.spread(PERPLEXITY)) for cell in line.cells if cell.spread(PERPLEXITY).values]
    lengths = [length for length, _ in present]
    if any(len(spread.values) > 1 for _, spread in present):
        lows, highs = [spread.low for _, spread in present], [spread.high for _, spread in present]
        axis.fill_between(lengths, lows, highs, color=series.color, alpha=0.16, linewidth=0)  # type: ignore[arg-type]
        for length, spread in present:
            axis.plot([length] * len(spread.values), spread.values, ".", color=series.color, markersize=3, alpha=0.8)
    axis.plot(lengths, [spread.mean for _, spread in present], **series.line(), zorder=4)  # type: ignore[arg-type]
    return [value for _, spread in present for value in spread.values]


def _missing(comparison: Comparison, lines: Sequence[Line]) -> list[str]:
    return [
        f"{comparison.name(line)} at {cell.first.length}"
        for line in lines
        for cell in line.cells
        if not cell.spread(PERPLEXITY).values
    ]


BY_POSITION = "perplexity-by-position"
MOST_PANELS = 9  # beyond, each comparison is shown at its longest length only, which has all positions of the others
MOST_TICKS = 8
LEAST_TOKENS = 256  # of a point; bins with fewer are drawn together with their neighbours


def perplexity_by_position(results: PerplexityResults) -> Figure | None:
    """Held-out perplexity against the position in the row, one panel a comparison and test length.

    Every model in the mode that speaks for it, and the implicit run that was trained longest in its other modes too.
    """
    shown = [(comparison, length) for comparison in results.comparisons for length in comparison.lengths]
    if not shown:
        return None
    if len(shown) > MOST_PANELS:
        shown = [(comparison, comparison.lengths[-1]) for comparison in results.comparisons]
    lines = [(comparison, line) for comparison in results.comparisons for line in _lines(comparison)]
    series = series_of_names((_name(comparison, line), line.variant.is_implicit) for comparison, line in lines)
    panels = tuple(
        Panel(
            f"{comparison.group.title}: {length} tokens",
            partial(_draw_by_position, comparison=comparison, length=length, series=series),
            f"{comparison.title}: perplexity at each position of rows of {length} tokens",
        )
        for comparison, length in shown
    )
    roles = tuple(dict.fromkeys(role for _, line in lines for role in line.roles))
    return Figure(BY_POSITION, "Perplexity by position", panels, tuple(series.values()), roles)


def _lines(comparison: Comparison) -> list[Line]:
    """The headline lines, then the other modes of the last implicit variant."""
    headlines = list(comparison.headlines)
    implicit = [line for line in headlines if line.variant.is_implicit]
    last = implicit[-1].variant if implicit else None
    others = [line for line in comparison.lines if line.variant == last and not comparison.is_headline(line)]
    return [*headlines, *others]


def _name(comparison: Comparison, line: Line) -> str:
    name = comparison.name(line)
    return f"{name}, {line.mode}" if line.variant.is_implicit else name


def _draw_by_position(axis: Axes, comparison: Comparison, length: int, series: Mapping[str, Series]) -> None:
    mark_training(axis, comparison.train_lengths, (1, length), is_log=True)
    drawn: list[float] = []
    missing = []
    for line in _lines(comparison):
        cell = line.at(length)
        curves = [] if cell is None else list(_curves(cell))
        if curves:
            # The headline lines come first and are wide, so that modes that agree with them show on top of them.
            width = 2.4 if comparison.is_headline(line) else 1.1
            drawn += _draw_curves(axis, curves, series[_name(comparison, line)], width)
        elif cell is not None:
            missing.append(_name(comparison, line))
    axis.set_xscale("log", base=2)
    ticks = _ticks(length)
    axis.xaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set(xlim=(0.9, length * 1.1), xlabel="tokens before the predicted one", ylabel="perplexity")
    axis.grid(visible=False, axis="x")
    nice_log_ticks(axis, drawn)
    tell_if_empty(axis, drawn)
    if drawn:
        tell_missing(axis, missing)


def _draw_curves(
    axis: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]], series: Series, width: float
) -> list[float]:
    """The mean over seeds as a line, their range as a band; returns the line's values. The seeds share their bins."""
    positions, losses = curves[0][0], np.array([loss for _, loss in curves])
    mean = np.exp(losses.mean(axis=0))
    if len(curves) > 1:
        low, high = np.exp(losses.min(axis=0)), np.exp(losses.max(axis=0))
        axis.fill_between(positions, low, high, color=series.color, alpha=0.14, linewidth=0)
    axis.plot(positions, mean, **series.line(has_markers=False) | {"linewidth": width}, zorder=4)
    return mean.tolist()


def _curves(cell: PerplexityCell) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of every seed that has one: the middles of the bins on a logarithmic axis, and the losses there."""
    shared: list[float] | None = None
    for point in cell.points:
        curve = point.loss_by_position
        if curve is None or None in curve["loss"]:
            continue
        positions, losses = _joined(curve)
        if shared in (None, positions.tolist()):
            shared = positions.tolist()
            yield positions, losses


def _joined(curve: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Middles and losses of neighbouring bins together, so many that each has LEAST_TOKENS, weighted by tokens."""
    counts = np.array(curve["num_tokens"])
    groups, first = [], 0
    for index in range(len(counts)):
        if counts[first : index + 1].sum() >= LEAST_TOKENS:
            groups.append(slice(first, index + 1))
            first = index + 1
    if first < len(counts):  # what is left at the end joins the last group
        groups.append(slice(groups.pop().start if groups else 0, len(counts)))
    middles = [math.sqrt(curve["start"][group][0] * curve["end"][group][-1]) for group in groups]
    losses = [np.average(curve["loss"][group], weights=counts[group]) for group in groups]
    return np.array(middles), np.array(losses)


def _ticks(length: int) -> list[int]:
    """Powers of two up to the length, at most so many."""
    powers = range(math.floor(math.log2(length)) + 1)
    step = math.ceil(len(powers) / MOST_TICKS)
    return [2**power for power in reversed(powers[::-1][::step])]


BY_SIZE = "perplexity-by-parameters"
KINDS = ("free", "bounded", "implicit", "explicit")
SizePoint = tuple[int, Line, Spread]


def perplexity_by_parameters(results: PerplexityResults) -> Figure | None:
    """A panel for each family and test set with models of several sizes; None without any."""
    found: dict[tuple[str, str], dict[str, list[SizePoint]]] = {}
    for comparison in results.comparisons:
        kinds = found.setdefault((comparison.group.family, comparison.data), {})
        for kind, point in _points(comparison, results):
            kinds.setdefault(kind, []).append(point)
    shown = {place: kinds for place, kinds in found.items() if any(_num_sizes(points) > 1 for points in kinds.values())}
    if not shown:
        return None
    labels = [kind for kind in KINDS if any(kind in kinds for kinds in shown.values())]
    series = {label: _series(label, index) for index, label in enumerate(labels)}
    panels = tuple(
        Panel(
            f"{family}, {data}",
            partial(_draw_by_size, kinds=kinds, series=series),
            f"{family}, {data}: perplexity by size",
        )
        for (family, data), kinds in shown.items()
    )
    lines = [line for kinds in shown.values() for points in kinds.values() for _, line, _ in points]
    roles = tuple(dict.fromkeys(role for line in lines for role in line.roles))
    return Figure(BY_SIZE, "Perplexity by parameters", panels, tuple(series.values()), roles)


def _series(kind: str, index: int) -> Series:
    label = {"free": "implicit, free phase", "bounded": "implicit, bounded phase alone"}.get(kind, kind)
    return run_series(label, 0 if kind == "explicit" else index, is_implicit=kind != "explicit")


def _points(comparison: Comparison, results: PerplexityResults) -> list[tuple[str, SizePoint]]:
    """Of each kind of model of one size the line that speaks, at the training length and equal tokens."""
    tokens = [tokens_of(line) for line in comparison.headlines if line.variant.is_implicit]
    by_kind: dict[str, list[Line]] = {}
    for line in comparison.headlines:
        of_line = kinds_of(line, comparison)
        by_kind.setdefault(next(kind for kind in KINDS if kind in of_line), []).append(line)
    points = []
    for kind, lines in by_kind.items():
        equal = [line for line in lines if any(is_close(tokens_of(line), other, SAME_TOKENS) for other in tokens)]
        rivals = equal or lines
        line = choose_line(rivals, trained_length(rivals[0]) or 0, results.training).line
        cell, size = line.at(trained_length(line)), line.first.num_parameters
        if cell is not None and size is not None:
            points.append((kind, (size, line, cell.spread("perplexity"))))
    return points


def _num_sizes(points: Sequence[SizePoint]) -> int:
    return len({size for size, _, _ in points})


def _draw_by_size(axis: Axes, kinds: Mapping[str, Sequence[SizePoint]], series: Mapping[str, Series]) -> None:
    values: list[float] = []
    for kind, points in kinds.items():
        style, ordered = series[kind], sorted(points, key=lambda point: point[0])
        present = [(size, spread) for size, _, spread in ordered if spread.values]
        for size, spread in present:
            if len(spread.values) > 1:
                axis.plot([size] * len(spread.values), spread.values, ".", color=style.color, markersize=3, alpha=0.8)
            values += spread.values
        axis.plot([size for size, _ in present], [spread.mean for _, spread in present], **style.line(), zorder=4)  # type: ignore[arg-type]
    sizes = sorted(size for points in kinds.values() for size, _, _ in points)
    axis.set_xscale("log")
    axis.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    amount_axis(axis.xaxis, sizes[0] / 1.2, sizes[-1] * 1.2, is_power=False)
    axis.grid(visible=False, axis="x")
    axis.set_xlabel("parameters")
    nice_log_ticks(axis, values)
    axis.set_ylabel("perplexity")
    tell_if_empty(axis, values)
    lost = [line.variant.run for points in kinds.values() for _, line, spread in points if not spread.values]
    tell_missing(axis, list(dict.fromkeys(lost)) if values else [])


BY_SHARE = "curriculum"
EXPLICIT = "explicit"


@dataclass(frozen=True)
class Branches:
    """The branches of one run by share; a trunk that goes on to the end stands at 1."""

    run: str
    lines: Mapping[float, Line]
    comparison: Comparison
    explicit: tuple[Line, ...]

    @property
    def length(self) -> int | None:
        return trained_length(next(iter(self.lines.values())))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for line in (*self.lines.values(), *self.explicit) for role in line.roles)

    def spread(self, line: Line) -> Spread:
        """Perplexity at the training length."""
        cell = line.at(self.length)
        return Spread(()) if cell is None else cell.spread("perplexity")


def curriculum(results: PerplexityResults) -> Figure | None:
    """A panel for each test set on which several branches of one curriculum were evaluated; None without any."""
    found = [branches for comparison in results.comparisons for branches in _branches(comparison, results)]
    if not found:
        return None
    series = series_of_names([*((branches.run, True) for branches in found), (EXPLICIT, False)])
    if not any(branches.explicit for branches in found):
        del series[EXPLICIT]
    titles = [f"{branches.comparison.title}, {branches.length} tokens" for branches in found]
    panels = tuple(
        Panel(
            title,
            partial(_draw_by_share, branches=branches, series=series),
            f"{title}: perplexity by share of the bounded phase",
        )
        for title, branches in zip(titles, found, strict=True)
    )
    roles = tuple(dict.fromkeys(role for branches in found for role in branches.roles))
    return Figure(BY_SHARE, "Perplexity by share of the bounded phase", panels, tuple(series.values()), roles)


def _branches(comparison: Comparison, results: PerplexityResults) -> list[Branches]:
    found = []
    for run in dict.fromkeys(line.variant.run for line in comparison.headlines if line.variant.is_implicit):
        lines = branches_of(comparison, run, results.training)
        if len(lines) < 2:
            continue
        trunk = [line for line in comparison.headlines if line.variant.run == run and line not in lines.values()]
        tokens = next(iter(lines.values())).train_spread("train_tokens").mean
        explicit = tuple(
            line
            for line in comparison.headlines
            if not line.variant.is_implicit and line.train_spread("train_tokens").mean == tokens
        )
        found.append(Branches(run, {**lines, 1.0: trunk[0]} if trunk else lines, comparison, explicit))
    return found


def _draw_by_share(axis: Axes, branches: Branches, series: Mapping[str, Series]) -> None:
    style = series[branches.run]
    shown: list[float] = []
    for line in branches.explicit:
        mean = branches.spread(line).mean
        if mean is not None:
            explicit = series[EXPLICIT]
            axis.axhline(mean, color=explicit.color, linestyle=(0, explicit.dashes), linewidth=1.3)
            shown.append(mean)
    present = [(share, spread) for share, line in branches.lines.items() if (spread := branches.spread(line)).values]
    for share, spread in present:
        if len(spread.values) > 1:
            axis.plot([share] * len(spread.values), spread.values, ".", color=style.color, markersize=3, alpha=0.8)
        shown += spread.values
    axis.plot([share for share, _ in present], [spread.mean for _, spread in present], **style.line(), zorder=4)  # type: ignore[arg-type]
    axis.xaxis.set_major_locator(FixedLocator(list(branches.lines)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))
    low, high = min(branches.lines), max(branches.lines)
    margin = 0.08 * (high - low)
    axis.set(xlim=(low - margin, high + margin), xlabel="share of the steps in the bounded phase")
    axis.grid(visible=False, axis="x")
    nice_log_ticks(axis, shown)
    axis.set_ylabel("perplexity")
    tell_if_empty(axis, shown)
    tell_missing(axis, [f"{share:.0%}" for share, line in branches.lines.items() if not branches.spread(line).values])
