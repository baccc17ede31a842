"""Duality: do a model's ways of reading agree, as a table, and how fast it converges, as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_report.axes import ticks_at
from implicit_llm_report.charts import Chart, Line, chart_figure
from implicit_llm_report.frame import Group, Spread, groups, mode_rank
from implicit_llm_report.published import Published, PublishedDuality
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.style import MUTED
from implicit_llm_report.svg import Figure
from implicit_llm_report.table_text import files_of, spread_fields

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


def duality_section(given: SectionInputs) -> Section | None:
    """Agreement of every two modes, beside the published number."""
    tables = duality_tables(given.inputs.frame, given.published)
    if not tables:
        return None
    found = [(f"{table.data}, rows of {table.length} tokens", list(map(_csv_row, table.rows))) for table in tables]
    names = {"run": "Model", "phase": "Phase", "mode": "Mode", "against": "Against"}
    values = {"token_agreement": "same token", "logit_distance_mean": "logit distance", "kl": "KL"}
    files = {NAME: files_of(found, names, values, form=".4g")}
    return Section(NAME, "sections/duality.html.j2", tables, [_figure(given.inputs.frame)], files)


def duality_tables(frame: pd.DataFrame, published: Published) -> list[Table]:
    """One a data set and length: explicit models last, of each model the pairs with the nearest to generation first."""
    pairs = _rows_of(frame, "pair")
    tables = []
    for test in groups(pairs, ("data", "length"), order=lambda test: (test.data, test.length)):
        found = groups(test.rows, ("run", "phase", "mode", "against"), order=_order)
        rows = (Row(pair.name, pair, published.beside(pair, "token_agreement")) for pair in found)
        tables.append(Table(test.data, test.length, tuple(rows)))
    return tables


def _rows_of(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    return frame[(frame["kind"] == NAME) & (frame["measure"] == measure) & frame["sweep"].isna()]


def _order(pair: Group) -> tuple:
    return (not pair.is_implicit, pair.run, pair.phase or "", pair.against != "sequential", mode_rank(pair.mode))


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


def _figure(frame: pd.DataFrame) -> Figure | None:
    """Two panels a data set and length, of every implicit model: its residual, and how many predictions are final."""
    charts = []
    for test in groups(_rows_of(frame, "convergence"), ("data", "length"), order=lambda t: (t.data, t.length)):
        models = groups(test.rows, ("run", "phase"), order=lambda model: model.name)
        title, tolerances = f"{test.data}, {test.length} tokens", {model.eval_tol for model in models if model.eval_tol}
        last = max((curve["f_evaluations"][-1] for model in models for curve in _curves(model)), default=2)
        medians = [_line(model, "residual_token_median", 1.7) for model in models]
        tails = [_line(model, "residual_token_q90", 0.8) for model in models if _curves(model)]
        residual = partial(_decorate, last=last, tolerances=sorted(tolerances))
        words = f"{title}: residual of the tokens by evaluations of f"
        y_label = "relative residual of a token"
        charts.append(Chart(f"{title}: residual", medians + tails, residual, words, y_label, is_accuracy=False))
        final = [_line(model, "agreement_with_last", 1.7) for model in models]
        words = f"{title}: share of predictions equal to the final ones by evaluations of f"
        y_label = "predictions as at the last one"
        charts.append(Chart(f"{title}: predictions", final, partial(_decorate, last=last), words, y_label))
    return chart_figure(FIGURE, "Convergence by iteration", charts)


def _line(model: Group, key: str, width: float) -> Line:
    curves = _curves(model)
    seeds = zip(*([max(value, LEAST_RESIDUAL) for value in curve[key]] for curve in curves), strict=True)
    points = list(zip(curves[0]["f_evaluations"], map(Spread, seeds), strict=True)) if curves else []
    return Line(model.name, True, points, groups=[model], width=width)


def _curves(model: Group) -> list[Curve]:
    """Those of the seeds, as far as they look at the same evaluations."""
    curves = model.curves("convergence")
    return [curve for curve in curves if curve["f_evaluations"] == curves[0]["f_evaluations"]]


def _decorate(axis: Axes, last: float, tolerances: Sequence[float] = ()) -> None:
    for tolerance in tolerances:
        axis.axhline(tolerance, color=MUTED, linewidth=0.8, linestyle=(0, (1.2, 1.2)))
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "annotation_clip": True, "ha": "right"}
        axis.annotate(f"tolerance {tolerance:g}", (1, tolerance), **place, va="bottom", fontsize=7, color=MUTED)
    axis.set_xscale("log", base=2)
    ticks_at(axis, [2**power for power in range(13) if 2**power <= last])
    axis.set(xlim=(0.9, 1.1 * last), xlabel="f-evaluations per token")
