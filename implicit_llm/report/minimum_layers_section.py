"""Minimum number of layers against length: the figure, the tables and the part of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from implicit_llm.report.axes import tell_if_empty, tell_missing
from implicit_llm.report.claims import METRIC_WORDS
from implicit_llm.report.config import MinimumLayersConfig
from implicit_llm.report.minimum_layers import Fewest, LayersNeeded, layers_needed
from implicit_llm.report.results import Task
from implicit_llm.report.section import Section, SectionInputs
from implicit_llm.report.style import Series, run_series
from implicit_llm.report.svg import Figure, Panel
from implicit_llm.report.table_text import csv_text, escape, rounded

NAME = "minimum-layers"


@dataclass(frozen=True)
class MinimumLayersTable:
    """What the page shows: kinds of models by length, and the accuracies behind them."""

    title: str
    config: MinimumLayersConfig
    kinds: tuple[LayersNeeded, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({at.length for kind in self.kinds for at in kind.at_lengths}))

    @property
    def measure_words(self) -> str:
        return METRIC_WORDS[self.config.measure]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for kind in self.kinds for role in kind.roles)


def minimum_layers_section(given: SectionInputs) -> Section | None:
    """Fewest layers that solve the group of the report's configuration at each length."""
    config = given.config.minimum_layers
    if config is None:
        return None
    title = f"{Task(config.group, config.monoid).label}: layers needed"
    table = MinimumLayersTable(title, config, layers_needed(given.results, config))
    files = {NAME: {"csv": _csv(table), "tex": _latex(table)}}
    return Section(NAME, "sections/minimum-layers.html.j2", [table], [_figure(table)], files)


def _figure(table: MinimumLayersTable) -> Figure:
    series = [run_series(kind.label, 0, is_implicit=kind.is_implicit) for kind in table.kinds]
    panel = Panel(
        f"{Task(table.config.group, table.config.monoid).label}, accuracy ≥ {table.config.threshold:g}",
        partial(_draw, table=table, series=series),
        f"{table.title} against training length",
    )
    return Figure(NAME, "Layers needed by length", (panel,), tuple(series), table.roles)


def _draw(axis: Axes, table: MinimumLayersTable, series: Sequence[Series]) -> None:
    deepest = max((depth for kind in table.kinds for depth in kind.num_layers), default=1)
    above, missing = 2.0 * deepest, []
    for kind, style in reversed(list(zip(table.kinds, series, strict=True))):  # implicit ones on top
        heights = [(at.length, _height(at.by_mean, above)) for at in kind.at_lengths]
        missing += [f"{kind.label} at {length}" for length, height in heights if height is None]
        present = [(length, height) for length, height in heights if height is not None]
        axis.plot([length for length, _ in present], [height for _, height in present], **style.line(), zorder=4)
        for at in kind.at_lengths:  # hollow: what the best seed reaches with fewer layers
            best = _height(at.by_best, above)
            if best is not None and best != _height(at.by_mean, above):
                axis.plot(at.length, best, marker=style.marker, color=style.color, fillstyle="none", zorder=5)
    ticks = [2**power for power in range(int(deepest).bit_length()) if 2**power <= deepest]
    axis.set_yscale("log", base=2)
    axis.set(ylim=(0.8, above * 1.25), ylabel="layers needed", xlabel="length of training and test (tokens)")
    axis.yaxis.set(major_locator=FixedLocator([*ticks, above]), minor_locator=NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"> {deepest}" if value == above else f"{value:g}"))
    axis.xaxis.set_major_locator(FixedLocator(list(table.lengths)))
    axis.grid(visible=False, axis="x")
    tell_if_empty(axis, [at for kind in table.kinds for at in kind.at_lengths if _height(at.by_mean, above)])
    tell_missing(axis, missing)


def _height(fewest: Fewest, above: float) -> float | None:
    """Where it is drawn: unsolved at the top, missing nowhere."""
    if fewest.num_layers is not None:
        return float(fewest.num_layers)
    return None if fewest.words == "missing" else above


def _csv(table: MinimumLayersTable) -> str:
    """One line a kind, length and depth; empty where there is no number."""
    measure = table.config.measure
    head = ["model", "length", "num_layers", "run", "mode", "num_seeds", "num_missing", f"{measure}_mean"]
    head += [f"{measure}_low", f"{measure}_high", "best_seed", "threshold", "minimum_by_mean", "minimum_by_best_seed"]
    return csv_text(head, _csv_rows(table))


def _csv_rows(table: MinimumLayersTable) -> Iterator[list[object]]:
    for kind in table.kinds:
        for at in kind.at_lengths:
            for depth in at.depths:
                point, spread, best = depth.cell.first, depth.spread, depth.best
                about = ["implicit" if kind.is_implicit else "explicit", at.length, depth.num_layers]
                numbers = [rounded(value) for value in (spread.mean, spread.low, spread.high)]
                seeds = [len(spread.values), spread.num_missing]
                fewest = [at.by_mean.words, at.by_best.words]
                yield [*about, point.run, point.mode, *seeds, *numbers, best and best.seed, at.threshold, *fewest]


def _latex(table: MinimumLayersTable) -> str:
    """Layers needed, by the mean over seeds and in parentheses by the best seed; needs the package booktabs."""
    config = table.config
    lines = [
        f"% {table.title.replace('×', 'x')}: fewest layers with {table.measure_words} of {config.threshold:g} or more, "
        "by the mean over seeds (by the best seed)",
        rf"\begin{{tabular}}{{l{'r' * len(table.lengths)}}}",
        r"\toprule",
        " & ".join(["Model", *(f"$L={length}$" for length in table.lengths)]) + r" \\",
        r"\midrule",
    ]
    for kind in table.kinds:
        entries = [_latex_entry(kind, length) for length in table.lengths]
        lines.append(" & ".join([escape(kind.label), *entries]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_entry(kind: LayersNeeded, length: int) -> str:
    at = kind.at(length)
    if at is None:
        return ""
    words = [fewest.words.replace(">", "$>$").replace("≤", r"$\leq$") for fewest in (at.by_mean, at.by_best)]
    return words[0] if words[0] == words[1] else f"{words[0]} ({words[1]})"
