"""The figure of perplexity against parameters: how the advantage of implicit models goes on with size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes

from implicit_llm.report.axes import amount_axis, nice_log_ticks, tell_if_empty, tell_missing
from implicit_llm.report.babi_choice import SAME_TOKENS
from implicit_llm.report.equal_flops import is_close, tokens_of, trained_length
from implicit_llm.report.line_choice import choose_line
from implicit_llm.report.pairs import kinds_of
from implicit_llm.report.perplexity_results import Comparison, Line, PerplexityResults
from implicit_llm.report.results import Spread
from implicit_llm.report.style import Series, run_series
from implicit_llm.report.svg import Figure, Panel

NAME = "perplexity-by-parameters"
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
        Panel(f"{family}, {data}", partial(_draw, kinds=kinds, series=series), f"{family}, {data}: perplexity by size")
        for (family, data), kinds in shown.items()
    )
    lines = [line for kinds in shown.values() for points in kinds.values() for _, line, _ in points]
    roles = tuple(dict.fromkeys(role for line in lines for role in line.roles))
    return Figure(NAME, "Perplexity by parameters", panels, tuple(series.values()), roles)


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


def _draw(axis: Axes, kinds: Mapping[str, Sequence[SizePoint]], series: Mapping[str, Series]) -> None:
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
