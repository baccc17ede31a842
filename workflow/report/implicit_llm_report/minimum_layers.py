"""The fewest layers that solve a group at the length they were trained on: Merrill's protocol.

For every kind of model and training length, models of several depths are tested at that very length; the smallest depth
whose accuracy reaches the threshold counts. It is judged on the mean over seeds, and beside it on the best seed.
Source: Schöne et al. 2025, Fig. 1 left; after Merrill, Petty and Sabharwal 2024.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from implicit_llm_report.axes import tell_if_empty, tell_missing
from implicit_llm_report.config import MinimumLayersConfig
from implicit_llm_report.inputs import TRAIN, ReportInputs
from implicit_llm_report.measures import METRIC_WORDS
from implicit_llm_report.results import BestSeed, Cell, Point, Results, Spread, Task
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.style import Series, run_series
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import csv_text, escape, rounded


@dataclass(frozen=True)
class Depth:
    """Models of one depth at one training length."""

    num_layers: int
    cell: Cell[Point]
    measure: str

    @property
    def spread(self) -> Spread:
        return self.cell.spread(self.measure)

    @property
    def best(self) -> BestSeed | None:
        return self.cell.best(self.measure)


@dataclass(frozen=True)
class Fewest:
    """The smallest depth that solves a length.

    num_layers: None where none of the tested ones does; `is_bound` where a smaller depth gave no number, or where
    nothing solves it and a depth gave none. deepest: the largest with a number, None where nothing has one.
    """

    num_layers: int | None
    is_bound: bool
    deepest: int | None

    @property
    def words(self) -> str:
        """ "4", "≤ 4" where a smaller depth is missing, "> 16" where none of the depths does it, "missing"."""
        if self.num_layers is not None:
            return f"≤ {self.num_layers}" if self.is_bound else str(self.num_layers)
        return "missing" if self.is_bound or self.deepest is None else f"> {self.deepest}"


@dataclass(frozen=True)
class AtLength:
    """All depths of one kind of model at one training length, the shallowest first."""

    length: int
    depths: tuple[Depth, ...]
    threshold: float

    @property
    def by_mean(self) -> Fewest:
        return self._fewest([depth.spread.mean for depth in self.depths])

    @property
    def by_best(self) -> Fewest:
        return self._fewest([depth.spread.high for depth in self.depths])

    def at(self, num_layers: int) -> Depth | None:
        return next((depth for depth in self.depths if depth.num_layers == num_layers), None)

    def _fewest(self, values: list[float | None]) -> Fewest:
        known = [depth.num_layers for depth, value in zip(self.depths, values, strict=True) if value is not None]
        deepest, is_missing = max(known, default=None), False
        for depth, value in zip(self.depths, values, strict=True):
            if value is not None and value >= self.threshold:
                return Fewest(depth.num_layers, is_missing, deepest)
            is_missing |= value is None
        return Fewest(None, is_missing, deepest)


@dataclass(frozen=True)
class LayersNeeded:
    """One kind of model, explicit or implicit, over the training lengths."""

    is_implicit: bool
    at_lengths: tuple[AtLength, ...]

    @property
    def label(self) -> str:
        counts = sorted({depth.num_layers for at in self.at_lengths for depth in at.depths})
        words = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{'implicit' if self.is_implicit else 'explicit'}, {words} layer{'' if counts == [1] else 's'}"

    @property
    def num_layers(self) -> tuple[int, ...]:
        return tuple(sorted({depth.num_layers for at in self.at_lengths for depth in at.depths}))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for at in self.at_lengths for depth in at.depths for role in depth.cell.roles))

    def at(self, length: int) -> AtLength | None:
        return next((at for at in self.at_lengths if at.length == length), None)


def layers_needed(results: Results, config: MinimumLayersConfig) -> tuple[LayersNeeded, ...]:
    """Both kinds of model, implicit first, as far as there are runs of the group; each in its headline mode."""
    task = Task(config.group, config.monoid)
    cells = [cell for cell in results.headline_cells() if _is_meant(cell.first, task, config.hard_fraction)]
    found = []
    for is_implicit in (True, False):
        mine = [cell for cell in cells if cell.first.is_implicit == is_implicit]
        lengths = sorted({cell.first.length for cell in mine})
        at_lengths = tuple(
            AtLength(length, _depths([c for c in mine if c.first.length == length], config.measure), config.threshold)
            for length in lengths
        )
        if at_lengths:
            found.append(LayersNeeded(is_implicit, at_lengths))
    return tuple(found)


def _is_meant(point: Point, task: Task, hard_fraction: float | None) -> bool:
    """Tested at the length it was trained on, with no more hard tokens than in training."""
    if point.task != task or not point.is_trained_length or point.num_layers is None:
        return False
    return not point.is_harder and hard_fraction in (None, point.hard_fraction)


def _depths(cells: Iterable[Cell[Point]], measure: str) -> tuple[Depth, ...]:
    """One a depth: on the hardest of the tests, and of several runs the one of the highest mean."""
    chosen: dict[int, Depth] = {}
    for cell in cells:
        depth = Depth(cell.first.num_layers or 0, cell, measure)
        other = chosen.get(depth.num_layers)
        if other is None or _rank(depth) > _rank(other):
            chosen[depth.num_layers] = depth
    return tuple(chosen[num_layers] for num_layers in sorted(chosen))


def _rank(depth: Depth) -> tuple[float, float]:
    mean = depth.spread.mean
    return (max(depth.cell.first.hard_fractions), float("-inf") if mean is None else mean)


NAME = "minimum-layers"
ABOVE = 1.5  # how far over the deepest model a length stands that it does not solve


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
    table = MinimumLayersTable(title, config, needed_of(given))
    files = {NAME: {"csv": _csv(table), "tex": _latex(table)}}
    return Section(NAME, "sections/minimum-layers.html.j2", [table], [_figure(table)], files)


def needed_of(given: SectionInputs) -> tuple[LayersNeeded, ...]:
    """By kind of model; nothing where the report's configuration names no group."""
    if given.config.minimum_layers is None:
        return ()
    points = tuple(_placed(point, given.inputs) for point in given.results.points)
    return layers_needed(Results(points, given.results.headline_mode), given.config.minimum_layers)


def _placed(point: Point, inputs: ReportInputs) -> Point:
    """A missing result with what its training tells of it, so that its depth shows as missing."""
    if point.num_layers is not None and point.train_length is not None:
        return point
    run = point.trained_run or point.run
    for source in inputs.sources.values():
        if source.stage == TRAIN and source.job.run == run:
            layers = (source.config.get("model") or {}).get("num_hidden_layers")
            length = (source.summary.get("data") or {}).get("length")
            return replace(point, num_layers=point.num_layers or layers, train_length=point.train_length or length)
    return point


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
    shown: list[AtLength] = []
    missing: list[str] = []
    for kind, style in reversed(list(zip(table.kinds, series, strict=True))):  # implicit ones on top
        solved = [(at.length, at.by_mean.num_layers) for at in kind.at_lengths if at.by_mean.num_layers]
        axis.plot([length for length, _ in solved], [layers for _, layers in solved], **style.line(), zorder=4)
        shown += kind.at_lengths
        for at in kind.at_lengths:
            if at.by_mean.words == "missing":
                missing.append(f"{kind.label} at {at.length}")
            elif at.by_mean.num_layers is None and at.by_mean.deepest is not None:
                axis.plot(at.length, ABOVE * at.by_mean.deepest, "^", color=style.color, markersize=7, zorder=4)
            if at.by_best.num_layers not in (None, at.by_mean.num_layers):  # fewer layers do for one seed
                mark = {"marker": style.marker, "color": style.color, "fillstyle": "none"}
                axis.plot(at.length, at.by_best.num_layers, **mark, zorder=5)  # type: ignore[arg-type]
    _axes(axis, table, deepest)
    tell_if_empty(axis, shown)
    tell_missing(axis, missing)


def _axes(axis: Axes, table: MinimumLayersTable, deepest: int) -> None:
    ticks = [2**power for power in range(deepest.bit_length()) if 2**power <= deepest]
    axis.set_yscale("log", base=2)
    axis.set(ylim=(0.8, 2 * deepest), ylabel="layers needed", xlabel="length of training and test (tokens)")
    axis.yaxis.set(major_locator=FixedLocator([*ticks, ABOVE * deepest]), minor_locator=NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"> {deepest}" if value > deepest else f"{value:g}"))
    axis.xaxis.set_major_locator(FixedLocator(list(table.lengths)))
    axis.grid(visible=False, axis="x")


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
