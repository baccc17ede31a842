"""Draw test-time compute: trained models with another iteration budget or tolerance than in training.

A line is one model in one mode with several values of the swept setting. For comparison, the figure has the same model
and mode without the sweep, and the explicit models of the same kind on the same test set.
Source: Schöne et al. 2025, Fig. 1 centre.
"""

from collections.abc import Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_report.figures.charts import Chart, Line, chart_figure, ticks_at
from implicit_llm_report.figures.svg import Figure
from implicit_llm_report.inputs.frame import AVERAGE, COST, LAST_TEN, PERPLEXITY, Group, groups
from implicit_llm_report.inputs.sources import Given
from implicit_llm_report.inputs.suites import load_suites
from implicit_llm_report.registry import registry
from implicit_llm_report.tables import title_of

# The metric and its label, by kind of evaluation.
MEASURES = {
    "word_problem": (LAST_TEN, "accuracy, last 10 tokens"),
    "perplexity": (PERPLEXITY, "perplexity"),
    "lm_eval": (AVERAGE, "average accuracy"),
}
AS_TRAINED = "as trained"  # instead of a swept value


def swept_rows(given: Given) -> pd.DataFrame:
    """Return the rows of sweeps by test and setting, with unswept rows of the same models and of explicit models."""
    frame, found = given.frame, []
    for kind, (measure, _) in MEASURES.items():
        rows = frame[(frame["kind"] == kind) & frame["source"].isna() & frame["metric"].isin((measure, COST))]
        if kind == "lm_eval":  # the first average represents a suite
            firsts = {column.task for suite in load_suites() for column in suite.average_columns[:1]}
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
    return _figure(given, "eval_max_iter", "iterations")


def test_time_tolerance(given: Given) -> Figure | None:
    return _figure(given, "eval_tol", "tolerance")


def _figure(given: Given, key: str, words: str) -> Figure | None:
    rows, entry = swept_rows(given), registry().tables["test-time"]
    charts = []
    for test in groups(rows[rows["swept"] == key], entry.by):
        measure, label = MEASURES[test.kind]
        lines = [_line(model, measure) for model in groups(test.rows, entry.rows)]
        values = sorted({x for line in lines for x, _ in line.points})
        decorate = partial(_sweep_axis, values=values, key=key)
        charts.append(Chart(title_of(test, entry.by), lines, decorate, label, is_accuracy=measure != PERPLEXITY))
    return chart_figure(f"test-time-{words}", f"Accuracy and perplexity by {words} at test time", charts)


def _line(model: Group, measure: str) -> Line:
    """Return the line of a model; an explicit model is a level."""
    points = [(at, cell.spread(measure)) for at, cell in model.cells("at").items()]
    if model.is_implicit:
        return Line(model.name, True, [point for point in points if point[0] != AS_TRAINED], groups=[model])
    return Line(model.name, False, level=points[0][1], groups=[model])


def _sweep_axis(axis: Axes, values: Sequence[float], key: str) -> None:
    """Set a tick at each swept value, with the work growing to the right."""
    axis.set_xscale("log")
    ticks_at(axis, values)
    axis.set_xlabel("iterations allowed for a block")
    if key == "eval_tol":
        axis.invert_xaxis()
        axis.set_xlabel("tolerance (relative residual; stricter to the right)")
