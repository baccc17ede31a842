"""The figure of perplexity by position: what a model makes of the text before a token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from implicit_llm.report.axes import mark_training, nice_log_ticks, tell_if_empty, tell_missing
from implicit_llm.report.perplexity_figures import series_of_names
from implicit_llm.report.perplexity_results import Comparison, Line, PerplexityCell, PerplexityResults
from implicit_llm.report.style import Series
from implicit_llm.report.svg import Figure, Panel

NAME = "perplexity-by-position"
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
            partial(_draw, comparison=comparison, length=length, series=series),
            f"{comparison.title}: perplexity at each position of rows of {length} tokens",
        )
        for comparison, length in shown
    )
    roles = tuple(dict.fromkeys(role for _, line in lines for role in line.roles))
    return Figure(NAME, "Perplexity by position", panels, tuple(series.values()), roles)


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


def _draw(axis: Axes, comparison: Comparison, length: int, series: Mapping[str, Series]) -> None:
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
