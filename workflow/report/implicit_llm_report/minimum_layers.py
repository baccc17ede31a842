"""The fewest layers that solve a group at the length they were trained on: Merrill's protocol.

For every kind of model and training length, models of several depths are tested at that very length; the smallest depth
whose accuracy reaches the threshold counts. It is judged on the mean over seeds, and beside it on the best seed.
Source: Schöne et al. 2025, Fig. 1 left; after Merrill, Petty and Sabharwal 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from implicit_llm_report.axes import tell_if_empty, tell_missing, ticks_at
from implicit_llm_report.config import MinimumLayersConfig
from implicit_llm_report.frame import Group, Spread, groups, headlines, roles_of, shares_of
from implicit_llm_report.inputs import TRAIN, ReportInputs
from implicit_llm_report.measures import METRIC_WORDS
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.style import Series, run_series
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import fields, files_of, spread_fields
from implicit_llm_report.word_problems import is_harder

NAME = "minimum-layers"
ABOVE = 1.5  # how far over the deepest model a length stands that it does not solve


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
class LayersNeeded:
    """One kind of model, explicit or implicit: by training length the models by depth, the shallowest first."""

    is_implicit: bool
    models: Mapping[int, Mapping[int, Group]]
    config: MinimumLayersConfig

    @property
    def num_layers(self) -> list[int]:
        return sorted({depth for models in self.models.values() for depth in models})

    @property
    def label(self) -> str:
        counts = self.num_layers
        words = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{'implicit' if self.is_implicit else 'explicit'}, {words} layer{'' if counts == [1] else 's'}"

    @property
    def roles(self) -> tuple[str, ...]:
        return roles_of(model for models in self.models.values() for model in models.values())

    def spread(self, length: int, num_layers: int) -> Spread:
        return self.models[length][num_layers].spread(self.config.measure)

    def fewest(self, length: int, *, is_best_seed: bool = False) -> Fewest:
        """By the mean over seeds, or by the best of them."""
        spreads = {depth: self.spread(length, depth) for depth in self.models[length]}
        values = {depth: spread.high if is_best_seed else spread.mean for depth, spread in spreads.items()}
        known = {depth: value for depth, value in values.items() if value is not None}
        solved = next((depth for depth, value in known.items() if value >= self.config.threshold), None)
        is_bound = any(value is None for depth, value in values.items() if solved is None or depth < solved)
        return Fewest(solved, is_bound, max(known, default=None))


@dataclass(frozen=True)
class MinimumLayersTable:
    """What the page shows: kinds of models by length, and the accuracies behind them."""

    task: str
    config: MinimumLayersConfig
    kinds: tuple[LayersNeeded, ...]

    @property
    def title(self) -> str:
        return f"{self.task}: layers needed"

    @property
    def lengths(self) -> list[int]:
        return sorted({length for kind in self.kinds for length in kind.models})

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
    task = config.group if config.monoid == "none" else f"{config.group} × monoid"
    table = MinimumLayersTable(task, config, needed_of(given))
    values = {"minimum_by_mean": f"fewest layers with {table.measure_words} of {config.threshold:g} or more"}
    files = {NAME: files_of([(table.title, list(_csv_rows(table)))], {"model": "Model"}, values, by="length")}
    return Section(NAME, "sections/minimum-layers.html.j2", [table], [_figure(table)], files)


def needed_of(given: SectionInputs) -> tuple[LayersNeeded, ...]:
    """By kind of model, each in its headline mode; nothing where the report's configuration names no group."""
    config = given.config.minimum_layers
    if config is None:
        return ()
    return layers_needed(_with_training(headlines(given.words), given.inputs), config)


def layers_needed(rows: pd.DataFrame, config: MinimumLayersConfig) -> tuple[LayersNeeded, ...]:
    """Both kinds of model, implicit first: tested at the length trained on, with no more hard tokens than in training.

    On the hardest of the tests, and of several models of one depth that of the highest mean.
    """
    is_meant = (rows["group"] == config.group) & (rows["monoid"] == config.monoid) & rows["num_layers"].notna()
    rows = rows[is_meant & (rows["length"] == rows["train_length"])]
    found: dict[bool, dict[int, dict[int, Group]]] = {}
    for model in sorted(groups(rows, ("name", "data")), key=lambda m: (not m.is_implicit, m.length, m.num_layers)):
        if not is_harder(model) and config.hard_fraction in (None, model.hard_fraction):
            depths = found.setdefault(model.is_implicit, {}).setdefault(model.length, {})
            other = depths.setdefault(model.num_layers, model)
            depths[model.num_layers] = max(other, model, key=partial(_rank, measure=config.measure))
    return tuple(LayersNeeded(is_implicit, models, config) for is_implicit, models in found.items())


def _rank(model: Group, measure: str) -> tuple[float, float]:
    mean = model.spread(measure).mean
    return max(shares_of(model.hard_fraction)), -1.0 if mean is None else mean


def _with_training(rows: pd.DataFrame, inputs: ReportInputs) -> pd.DataFrame:
    """Missing results with what their training tells of them, so that their depth shows as missing."""
    trained = {source.job.run: source for source in inputs.sources.values() if source.stage == TRAIN}
    layers = {run: (source.config.get("model") or {}).get("num_hidden_layers") for run, source in trained.items()}
    lengths = {run: (source.summary.get("data") or {}).get("length") for run, source in trained.items()}
    told = {"num_layers": rows["run"].map(layers), "train_length": rows["run"].map(lengths)}
    return rows.assign(**{column: rows[column].fillna(values) for column, values in told.items()})


def _figure(table: MinimumLayersTable) -> Figure:
    series = [run_series(kind.label, 0, is_implicit=kind.is_implicit) for kind in table.kinds]
    title = f"{table.task}, accuracy ≥ {table.config.threshold:g}"
    draw = partial(_draw, table=table, series=series)
    panel = Panel(title, draw, f"{table.title} against training length")
    return Figure(NAME, "Layers needed by length", (panel,), tuple(series), table.roles)


def _draw(axis: Axes, table: MinimumLayersTable, series: Sequence[Series]) -> None:
    """A filled point by the mean over seeds, an empty one where fewer layers do for the best seed."""
    deepest = max((depth for kind in table.kinds for depth in kind.num_layers), default=1)
    missing: list[str] = []
    for kind, style in reversed(list(zip(table.kinds, series, strict=True))):  # implicit ones on top
        found = {length: kind.fewest(length) for length in kind.models}
        solved = [(length, fewest.num_layers) for length, fewest in found.items() if fewest.num_layers]
        axis.plot([length for length, _ in solved], [layers for _, layers in solved], **style.line(), zorder=4)
        missing += [f"{kind.label} at {length}" for length, fewest in found.items() if fewest.words == "missing"]
        for length, fewest in found.items():
            if fewest.words.startswith(">"):
                axis.plot(length, ABOVE * (fewest.deepest or 1), "^", color=style.color, markersize=7, zorder=4)
            best = kind.fewest(length, is_best_seed=True).num_layers
            if best not in (None, fewest.num_layers):
                axis.plot(length, best, marker=style.marker, color=style.color, fillstyle="none", zorder=5)
    _axes(axis, table, deepest)
    tell_if_empty(axis, table.kinds)
    tell_missing(axis, missing)


def _axes(axis: Axes, table: MinimumLayersTable, deepest: int) -> None:
    ticks = [2**power for power in range(deepest.bit_length())]
    axis.set_yscale("log", base=2)
    axis.set(ylim=(0.8, 2 * deepest), ylabel="layers needed", xlabel="length of training and test (tokens)")
    axis.yaxis.set(major_locator=FixedLocator([*ticks, ABOVE * deepest]), minor_locator=NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"> {deepest}" if value > deepest else f"{value:g}"))
    ticks_at(axis, table.lengths)
    axis.grid(visible=False, axis="x")


def _csv_rows(table: MinimumLayersTable) -> Iterator[dict[str, object]]:
    """One line a kind, length and depth; empty where there is no number."""
    measure = table.config.measure
    for kind in table.kinds:
        for length, models in kind.models.items():
            for num_layers, model in models.items():
                spread, best = model.spread(measure), model.best(measure)
                yield {
                    **{**fields(model, "model"), "length": length, "num_layers": num_layers, "run": model.name},
                    **{"mode": model.mode, "num_seeds": len(spread.values), "num_missing": spread.num_missing},
                    **spread_fields([measure], model.spread),
                    **{"best_seed": best and best.seed, "threshold": table.config.threshold},
                    "minimum_by_mean": kind.fewest(length).words,
                    "minimum_by_best_seed": kind.fewest(length, is_best_seed=True).words,
                }
