"""Test-time compute: trained models with another iteration budget or another tolerance than their own.

A line is one model in one mode with the swept setting at several values. Beside it stand the same model and mode as
they are evaluated elsewhere, without the sweep, and the explicit models of the same kind on the same test set.
Source: Schöne et al. 2025, Fig. 1 centre.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_report.figures.axes import tell_if_empty, ticks_at
from implicit_llm_report.figures.charts import Chart, Line, chart_figure
from implicit_llm_report.figures.style import INK, Series
from implicit_llm_report.figures.svg import Figure, Panel
from implicit_llm_report.inputs.frame import AVERAGE, COST, LAST_TEN, METRIC_WORDS, PERPLEXITY, Group, groups
from implicit_llm_report.inputs.given import Given
from implicit_llm_report.registry import registry
from implicit_llm_report.tables import title_of

ITERATIONS, TOLERANCE = "eval_max_iter", "eval_tol"
MEASURES = {"word_problem": LAST_TEN, "perplexity": PERPLEXITY, "lm_eval": AVERAGE}  # by the kind of evaluation
AS_TRAINED = "as trained"  # instead of a swept value
FIGURES = {
    ITERATIONS: ("test-time-iterations", "Accuracy and perplexity by iterations at test time"),
    TOLERANCE: ("test-time-tolerance", "Accuracy and perplexity by tolerance at test time"),
}
OWN = Series("unswept: stops by its tolerance", INK, "o", has_line=False)


def swept_rows(given: Given) -> pd.DataFrame:
    """The rows of sweeps, by test and setting, with the unswept ones of the same models and of explicit models."""
    frame, found = given.frame, []
    for kind, measure in MEASURES.items():
        rows = frame[(frame["kind"] == kind) & frame["source"].isna() & frame["metric"].isin((measure, COST))]
        if kind == "lm_eval":  # the first average stands for a suite
            firsts = {suite.all_columns[len(suite.columns)].task for suite in given.suites if suite.averages}
            rows = rows[rows["task"].isin(firsts) & (rows["metric"] == AVERAGE)]
        for test in groups(rows, ("data", "length", "models")):
            swept = test.rows[test.rows["swept"].notna() & test.rows["is_implicit"].astype(bool)]
            plain = test.rows[test.rows["swept"].isna()]
            for key, mine in swept.groupby("swept", sort=False):
                is_own = plain["name"].isin(set(mine["name"])) & plain["mode"].isin(set(mine["base"]))
                others = plain[is_own | ~plain["is_implicit"].astype(bool)]
                found += [mine, others.assign(swept=key, base=others["mode"], at=AS_TRAINED)]
    return pd.concat([frame[:0], *found])


def test_time_iterations(given: Given) -> Figure | None:
    return _figure(given, ITERATIONS)


def test_time_tolerance(given: Given) -> Figure | None:
    return _figure(given, TOLERANCE)


def _figure(given: Given, key: str) -> Figure | None:
    """None where nothing sweeps the setting, or would have."""
    name, title = FIGURES[key]
    rows, entry = swept_rows(given), registry().tables["test-time"]
    charts = []
    for test in groups(rows[rows["swept"] == key], entry.by):
        measure = MEASURES[test.kind]
        lines = [_line(model, measure, key) for model in groups(test.rows, entry.rows)]
        values = sorted({x for line in lines for x, _ in line.points})
        decorate, label = partial(_sweep_axis, values=values, key=key), METRIC_WORDS[measure]
        charts.append(Chart(title_of(test, entry), lines, decorate, label, is_accuracy=measure != PERPLEXITY))
    missing = (item.config.get("sweep") or () for item in given.config.missing if item.is_implicit)
    if not charts and not any(key in sweep for sweep in missing):
        return None
    empty = Figure(name, title, (Panel(title, partial(tell_if_empty, shown=())),), (), ())
    return chart_figure(name, title, charts, [OWN]) or empty


def _line(model: Group, measure: str, key: str) -> Line:
    """The model as it is stands at the iterations it took, or at its tolerance; an explicit one is a level."""
    cells = model.cells("at")
    own = cells.pop(AS_TRAINED, None)
    if not model.is_implicit:
        return Line(model.name, False, level=None if own is None else own.spread(measure), groups=[model])
    place = own and (own.spread(COST).mean if key == ITERATIONS else own.eval_tol)
    points = [(value, cell.spread(measure)) for value, cell in cells.items()]
    mark = (place, own.spread(measure)) if own is not None and place else None
    return Line(model.name, True, points, groups=[model], mark=mark)


def _sweep_axis(axis: Axes, values: Sequence[float], key: str) -> None:
    """Each swept value with its tick, the work growing to the right."""
    axis.set_xscale("log")
    ticks_at(axis, values)
    axis.set_xlabel("iterations allowed for a block")
    if key == TOLERANCE:
        axis.invert_xaxis()
        axis.set_xlabel("tolerance (relative residual; stricter to the right)")
