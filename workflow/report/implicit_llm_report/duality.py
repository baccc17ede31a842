"""Duality: do a model's ways of reading agree, as a table, and how fast it converges, as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from implicit_llm_report.axes import tell_if_empty, tell_missing
from implicit_llm_report.frame import Group, groups
from implicit_llm_report.published import Published, PublishedDuality
from implicit_llm_report.results import mode_rank
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.style import MUTED, Series, series_of_names
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import csv_of, escape, in_percent, latex_of, latex_spread, rounded, spread_fields

NAME, FIGURE = "duality", "convergence-by-iteration"
MEASURES = ("token_agreement", "logit_distance_mean", "logit_distance_max", "logit_std", "kl")
COSTS = ("f_evaluations_per_token", "against_f_evaluations_per_token", "unconverged_share")
LEAST_RESIDUAL = 1e-9  # below lies rounding, and zero has no logarithm
Curve = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Row:
    """A model's pair of modes on a data set, and the published number of the same thing."""

    name: str
    group: Group
    published: PublishedDuality | None


@dataclass(frozen=True)
class Table:
    """All pairs on one data set at one length."""

    data: str
    length: int
    rows: tuple[Row, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for row in self.rows for role in row.group.roles))


@dataclass(frozen=True)
class Line:
    """The convergence of one model on one data set over seeds."""

    name: str
    group: Group


DrawnLine = tuple[Line, list[Curve]]


def duality_section(given: SectionInputs) -> Section | None:
    """Agreement of every two modes, beside the published number."""
    tables = duality_tables(given.inputs.frame, given.published)
    if not tables:
        return None
    files = {NAME: {"csv": csv_of(map(_csv_row, _rows(tables))), "tex": "\n".join(map(_latex, tables))}}
    return Section(NAME, "sections/duality.html.j2", tables, [_figure(given.inputs.frame)], files)


def duality_tables(frame: pd.DataFrame, published: Published) -> list[Table]:
    """One a data set and length: explicit models last, of each model the pairs with the nearest to generation first."""
    pairs = _rows_of(frame, "pair")
    tables = []
    for test in groups(pairs, ("data", "length"), order=lambda test: (test.data, test.length)):
        found = groups(test.rows, ("run", "phase", "mode", "against"), order=_order)
        rows = (Row(pair.name, pair, published.duality_beside(pair)) for pair in found)
        tables.append(Table(test.data, test.length, tuple(rows)))
    return tables


def _rows_of(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    return frame[(frame["kind"] == NAME) & (frame["measure"] == measure) & frame["sweep"].isna()]


def _order(pair: Group) -> tuple:
    return (not pair.is_implicit, pair.run, pair.phase or "", pair.against != "sequential", mode_rank(pair.mode))


def _rows(tables: Sequence[Table]) -> Iterator[Row]:
    yield from (row for table in tables for row in table.rows)


def _csv_row(row: Row) -> dict[str, object]:
    pair, published = row.group, row.published
    return {
        **{"run": pair.run, "model": "implicit" if pair.is_implicit else "explicit", "family": pair.family},
        **{"num_parameters": pair.num_parameters, "phase": pair.phase, "solver": pair.phase_label, "data": pair.data},
        **{"length": pair.length, "mode": pair.mode, "against": pair.against},
        **{"num_seeds": len(pair.spread("token_agreement").values), "num_tokens": pair.num_tokens},
        **spread_fields((*MEASURES, *COSTS), pair.spread),
        "published_agreement": published and published.value,
        "published_mark": published and published.mark,
    }


def _latex(table: Table) -> str:
    comment = f"{table.data}, rows of {table.length} tokens: agreement of modes in percent, mean over seeds (range)"
    head = ("Model", "Mode", "Against", "Same token", "Logit distance", "KL", "Published")
    return latex_of(comment, head, map(_latex_row, table.rows), "lllrrrr")


def _latex_row(row: Row) -> list[str]:
    means = (rounded(row.group.spread(measure).mean) for measure in ("logit_distance_mean", "kl"))
    shown = ["missing" if value is None else f"{value:.2g}" for value in means]
    published = "" if row.published is None else f"{100 * row.published.value:.1f}"
    names = [escape(row.name), escape(row.group.mode), escape(row.group.against or "")]
    return [*names, latex_spread(in_percent(row.group.spread("token_agreement")), ".2f"), *shown, published]


def _figure(frame: pd.DataFrame) -> Figure | None:
    """Two panels a data set and length, of every implicit model: its residual, and how many predictions are final."""
    traces = _rows_of(frame, "convergence")
    series = series_of_names((name, True) for name in sorted(traces["name"].unique()))
    panels, roles = [], []
    for test in groups(traces, ("data", "length"), order=lambda test: (test.data, test.length)):
        lines = [Line(model.name, model) for model in groups(test.rows, ("run", "phase"))]
        lines.sort(key=lambda line: line.name)
        title = f"{test.data}, {test.length} tokens"
        residual, agreement = partial(_draw_residual, lines, series), partial(_draw_agreement, lines, series)
        panels.append(Panel(f"{title}: residual", residual, f"{title}: residual of the tokens by evaluations of f"))
        words = f"{title}: share of predictions equal to the final ones by evaluations of f"
        panels.append(Panel(f"{title}: predictions", agreement, words))
        roles += [role for line in lines for role in line.group.roles]
    legend, behind = tuple(series.values()), tuple(dict.fromkeys(roles))
    return Figure(FIGURE, "Convergence by iteration", tuple(panels), legend, behind) if panels else None


def _draw_residual(lines: Sequence[Line], series: Mapping[str, Series], axis: Axes) -> None:
    """The median over tokens as a line, up to the 90 % quantile as a band; of seeds the geometric mean."""
    drawn = _with_curves(lines)
    for line, curves in drawn:
        style = series[line.name]
        median, high = (_geometric_mean(curves, f"residual_token_{name}") for name in ("median", "q90"))
        evaluations = curves[0]["f_evaluations"]
        axis.fill_between(evaluations, median, high, color=style.color, alpha=0.16, linewidth=0)
        axis.plot(evaluations, median, **style.line(has_markers=False))
    for tolerance in sorted({line.group.eval_tol for line, _ in drawn if line.group.eval_tol}):
        axis.axhline(tolerance, color=MUTED, linewidth=0.8, linestyle=(0, (1.2, 1.2)))
        axis.annotate(f"tolerance {tolerance:g}", (1, tolerance), xycoords=("axes fraction", "data"), fontsize=7,
                      color=MUTED, ha="right", va="bottom")  # fmt: skip
    axis.set_yscale("log")
    axis.yaxis.set(major_locator=LogLocator(numticks=6), minor_locator=NullLocator())
    axis.set(ylabel="relative residual of a token")
    _evaluations_axis(axis, drawn)
    tell_if_empty(axis, drawn)
    if drawn:
        tell_missing(axis, [line.name for line in lines if not _curves(line)])


def _draw_agreement(lines: Sequence[Line], series: Mapping[str, Series], axis: Axes) -> None:
    """The mean over seeds as a line, their range as a band."""
    drawn = _with_curves(lines)
    for line, curves in drawn:
        style = series[line.name]
        shares = np.array([curve["agreement_with_last"] for curve in curves])
        evaluations = curves[0]["f_evaluations"]
        if len(curves) > 1:
            low, high = shares.min(axis=0), shares.max(axis=0)
            axis.fill_between(evaluations, low, high, color=style.color, alpha=0.16, linewidth=0)
        axis.plot(evaluations, shares.mean(axis=0), **style.line(has_markers=False))
    axis.set(ylim=(-0.03, 1.03), ylabel="predictions as at the last one")
    axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    _evaluations_axis(axis, drawn)
    tell_if_empty(axis, drawn)


def _with_curves(lines: Sequence[Line]) -> list[DrawnLine]:
    """Those that have curves, with them; the first line is drawn last, on top."""
    return [(line, curves) for line in reversed(lines) if (curves := _curves(line))]


def _curves(line: Line) -> list[Curve]:
    """Those of the seeds, as far as they look at the same evaluations."""
    seeds = line.group.rows.drop_duplicates("role")["detail"]
    curves = [detail["convergence"] for detail in seeds if "convergence" in detail]
    return [curve for curve in curves if curve["f_evaluations"] == curves[0]["f_evaluations"]]


def _geometric_mean(curves: Sequence[Curve], key: str) -> np.ndarray:
    values = np.array([curve[key] for curve in curves], dtype=float)
    return np.exp(np.log(np.maximum(values, LEAST_RESIDUAL)).mean(axis=0))


def _evaluations_axis(axis: Axes, drawn: Sequence[DrawnLine]) -> None:
    last = max((curves[0]["f_evaluations"][-1] for _, curves in drawn), default=2)
    axis.set_xscale("log", base=2)
    ticks = [2**power for power in range(13) if 2**power <= last]
    axis.xaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set(xlim=(0.9, 1.1 * last), xlabel="f-evaluations per token")
    axis.grid(visible=False, axis="x")
