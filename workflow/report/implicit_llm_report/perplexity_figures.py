"""Figures of held-out perplexity: by length, by position, by size, and by the share of the bounded phase."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from implicit_llm_report.axes import (
    amount_axis,
    length_axis,
    mark_training,
    ticks_at,
)
from implicit_llm_report.babi import SAME_TOKENS
from implicit_llm_report.charts import Chart, Line, chart_figure
from implicit_llm_report.frame import Group, Spread
from implicit_llm_report.pairs import choose_line, kinds_of
from implicit_llm_report.perplexity import (
    PERPLEXITY,
    Comparison,
    PerplexityResults,
    branches_of,
    is_close,
    perplexity_at,
    tokens_of,
    trained_length,
)
from implicit_llm_report.svg import Figure


def perplexity_by_length(results: PerplexityResults) -> Figure | None:
    """Held-out perplexity against the length of the test rows, one panel a family, size and test set."""
    charts = []
    for found in results.comparisons:
        lines = [_line(found.name(line), line) for line in found.headlines]
        decorate = partial(_decorate_lengths, comparison=found)
        charts.append(_chart(found.title, lines, decorate, "perplexity against test length"))
    return chart_figure("perplexity-by-length", "Perplexity by test length", charts)


def _chart(title: str, lines: Sequence[Line], decorate: Any, words: str) -> Chart:
    return Chart(title, lines, decorate, f"{title}: {words}", PERPLEXITY, is_accuracy=False)


def _line(label: str, line: Group) -> Line:
    points = [(length, cell.spread(PERPLEXITY)) for length, cell in line.cells("length").items()]
    return Line(label, line.is_implicit, points, groups=[line])


def _decorate_lengths(axis: Axes, comparison: Comparison) -> None:
    lengths = comparison.lengths
    mark_training(axis, comparison.train_lengths, (lengths[0], lengths[-1]), is_log=True)
    length_axis(axis, lengths)


BY_POSITION = "perplexity-by-position"
MOST_PANELS = 9  # beyond, each comparison is shown at its longest length only, which has all positions of the others
MOST_TICKS = 8
LEAST_TOKENS = 256  # of a point; bins with fewer are drawn together with their neighbours


def perplexity_by_position(results: PerplexityResults) -> Figure | None:
    """Held-out perplexity against the position in the row, one panel a comparison and test length.

    Every model in the mode that speaks for it, and the implicit run that was trained longest in its other modes too.
    """
    shown = [(comparison, length) for comparison in results.comparisons for length in comparison.lengths]
    if len(shown) > MOST_PANELS:
        shown = [(comparison, comparison.lengths[-1]) for comparison in results.comparisons]
    charts = []
    for found, length in shown:
        # The headline lines come first and are wide, so that modes that agree with them show on top of them.
        lines = [_curve(_name(found, line), line, length) for line in _lines(found)]
        decorate = partial(_decorate_positions, comparison=found, length=length)
        words = f"perplexity at each position of rows of {length} tokens"
        charts.append(_chart(f"{found.group.title}: {length} tokens", lines, decorate, words))
    return chart_figure(BY_POSITION, "Perplexity by position", charts)


def _lines(comparison: Comparison) -> list[Group]:
    """The headline lines, then the other modes of the last implicit variant."""
    headlines = list(comparison.headlines)
    last = next(((line.run, line.phase) for line in reversed(headlines) if line.is_implicit), None)
    others = [line for line in comparison.lines if (line.run, line.phase) == last and not line.is_headline]
    return [*headlines, *others]


def _name(comparison: Comparison, line: Group) -> str:
    name = comparison.name(line)
    return f"{name}, {line.mode}" if line.is_implicit else name


def _curve(label: str, line: Group, length: int) -> Line:
    """The seeds share their bins."""
    cell = line.cells("length").get(length)
    curves = [] if cell is None else list(_curves(cell))
    seeds = zip(*(np.exp(losses).tolist() for _, losses in curves), strict=True)
    points = list(zip(curves[0][0].tolist(), map(Spread, seeds), strict=True)) if curves else []
    return Line(label, line.is_implicit, points, groups=[line], width=2.4 if line.is_headline else 1.1)


def _decorate_positions(axis: Axes, comparison: Comparison, length: int) -> None:
    mark_training(axis, comparison.train_lengths, (1, length), is_log=True)
    axis.set_xscale("log", base=2)
    ticks_at(axis, _ticks(length))
    axis.set(xlim=(0.9, length * 1.1), xlabel="tokens before the predicted one")


def _curves(cell: Group) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of every seed that has one: the middles of the bins on a logarithmic axis, and the losses there."""
    shared: list[float] | None = None
    for curve in cell.curves("loss_by_position"):
        if None in curve["loss"]:
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


KINDS = {
    "free": "implicit, free phase",
    "bounded": "implicit, bounded phase alone",
    "implicit": "implicit",
    "explicit": "explicit",
}


def perplexity_by_parameters(results: PerplexityResults) -> Figure | None:
    """A panel for each family and test set with models of several sizes; None without any."""
    found: dict[str, dict[str, dict[int, Group]]] = {}
    for comparison in results.comparisons:
        kinds = found.setdefault(f"{comparison.group.family}, {comparison.data}", {})
        for kind, line in _speaking(comparison):
            kinds.setdefault(kind, {})[line.num_parameters] = line
    charts = []
    for title, kinds in found.items():
        if any(len(sizes) > 1 for sizes in kinds.values()):
            lines = [_by_size(label, kinds[kind]) for kind, label in KINDS.items() if kind in kinds]
            sizes = sorted(size for lines_of_kind in kinds.values() for size in lines_of_kind)
            charts.append(_chart(title, lines, partial(_decorate_sizes, sizes=sizes), "perplexity by size"))
    return chart_figure("perplexity-by-parameters", "Perplexity by parameters", charts)


def _by_size(label: str, sizes: Mapping[int, Group]) -> Line:
    points = [(size, perplexity_at(line, trained_length(line))) for size, line in sorted(sizes.items())]
    return Line(label, label != "explicit", points, groups=list(sizes.values()))


def _speaking(comparison: Comparison) -> Iterator[tuple[str, Group]]:
    """Of each kind of model of one size the line that stands for it, at the training length and equal tokens."""
    tokens = [tokens_of(line) for line in comparison.headlines if line.is_implicit]
    by_kind: dict[str, list[Group]] = {}
    for line in comparison.headlines:
        of_line = kinds_of(line, comparison.headlines)
        by_kind.setdefault(next(kind for kind in KINDS if kind in of_line), []).append(line)
    for kind, lines in by_kind.items():
        rivals = [line for line in lines if any(is_close(tokens_of(line), t, SAME_TOKENS) for t in tokens)] or lines
        line = choose_line(rivals, trained_length(rivals[0]) or 0, comparison.training).line
        if line.num_parameters is not None:
            yield kind, line


def _decorate_sizes(axis: Axes, sizes: Sequence[int]) -> None:
    low, high = sizes[0] / 1.2, sizes[-1] * 1.2
    axis.set_xscale("log")
    axis.set(xlim=(low, high), xlabel="parameters")
    amount_axis(axis.xaxis, low, high, is_power=False)


def curriculum(results: PerplexityResults) -> Figure | None:
    """A panel for each run and test set with several branches of one curriculum; None without any."""
    charts = []
    for found in results.comparisons:
        for run in dict.fromkeys(line.run for line in found.headlines if line.is_implicit):
            branches = branches_of(found, run)
            if len(branches) > 1:
                charts.append(_by_share(found, run, branches))
    return chart_figure("curriculum", "Perplexity by share of the bounded phase", charts)


def _by_share(found: Comparison, run: str, branches: Mapping[float, Group]) -> Chart:
    """A trunk that goes on to the end stands at 1; explicit runs of as many tokens are levels."""
    first = next(iter(branches.values()))
    length, phases = trained_length(first), [line.phase for line in branches.values()]
    trunk = [line for line in found.headlines if line.run == run and line.phase not in phases]
    lines = {**branches, 1.0: trunk[0]} if trunk else branches
    points = [(share, perplexity_at(line, length)) for share, line in lines.items()]
    explicit = [line for line in found.explicit if tokens_of(line) == tokens_of(first)]
    levels = [Line("explicit", False, level=perplexity_at(line, length), groups=[line]) for line in explicit]
    drawn = [Line(run, True, points, groups=list(lines.values())), *levels]
    decorate = partial(_decorate_branches, shares=list(lines))
    return _chart(f"{found.title}, {length} tokens", drawn, decorate, "perplexity by share of the bounded phase")


def _decorate_branches(axis: Axes, shares: Sequence[float]) -> None:
    ticks_at(axis, shares, lambda share: f"{100 * share:.3g} %")
    margin = 0.08 * (max(shares) - min(shares))
    axis.set(xlim=(min(shares) - margin, max(shares) + margin), xlabel="share of the steps in the bounded phase")
