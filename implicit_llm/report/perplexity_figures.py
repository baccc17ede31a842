"""The figure of perplexity against test length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes

from implicit_llm.report.axes import length_axis, mark_training, nice_log_ticks, tell_if_empty, tell_missing
from implicit_llm.report.perplexity_results import Comparison, Line, PerplexityResults
from implicit_llm.report.style import Series, run_series
from implicit_llm.report.svg import Figure, Panel

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
            partial(_draw, comparison=comparison, series=series),
            f"{comparison.title}: perplexity against test length",
        )
        for comparison in results.comparisons
    )
    lines = [line for comparison in results.comparisons for line in comparison.headlines]
    roles = tuple(dict.fromkeys(role for line in lines for role in line.roles))
    return Figure("perplexity-by-length", "Perplexity by test length", panels, tuple(series.values()), roles)


def series_of_names(names: Iterable[tuple[str, bool]]) -> dict[str, Series]:
    """A series for each (name, is implicit), implicit ones first; equal names of different panels share one."""
    names = list(dict.fromkeys(names))
    return {
        name: run_series(name, index, is_implicit=is_implicit)
        for is_implicit in (True, False)
        for index, name in enumerate(name for name, kind in names if kind == is_implicit)
    }


def _draw(axis: Axes, comparison: Comparison, series: Mapping[str, Series]) -> None:
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
