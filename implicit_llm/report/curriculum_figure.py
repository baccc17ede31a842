"""The figure of perplexity against the share of the bounded phase. Source: paper, Fig. 14a."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from implicit_llm.report.axes import nice_log_ticks, tell_if_empty, tell_missing
from implicit_llm.report.equal_flops import trained_length
from implicit_llm.report.perplexity_figures import series_of_names
from implicit_llm.report.perplexity_results import Comparison, Line, PerplexityResults
from implicit_llm.report.phase_share import branches_of
from implicit_llm.report.results import Spread
from implicit_llm.report.style import Series
from implicit_llm.report.svg import Figure, Panel

NAME = "curriculum"
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
            partial(_draw, branches=branches, series=series),
            f"{title}: perplexity by share of the bounded phase",
        )
        for title, branches in zip(titles, found, strict=True)
    )
    roles = tuple(dict.fromkeys(role for branches in found for role in branches.roles))
    return Figure(NAME, "Perplexity by share of the bounded phase", panels, tuple(series.values()), roles)


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


def _draw(axis: Axes, branches: Branches, series: Mapping[str, Series]) -> None:
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
