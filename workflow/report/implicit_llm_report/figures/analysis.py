"""Draw further analyses: test-time compute, convergence by iteration, and the Jacobian of the state.

Test-time compute: a line is one model with all its seeds, in one mode, at several iteration budgets or tolerances. The
explicit models on the same test set are shown beside it; for language models, only those of the same family and size.
The table `test-time` has a row for each point of these lines, for each explicit model, and for each model with its own
budget and tolerance ("as trained").
Source: test-time compute, Schöne et al. 2025, Fig. 1 centre; Jacobian, their Theorem 1.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from implicit_llm_report.figures.charts import Chart, Line, chart_figure, log_axis, tell_if_empty, ticks_at
from implicit_llm_report.figures.svg import Figure, Panel
from implicit_llm_report.inputs.frame import (
    COST,
    LAST_TEN,
    PERPLEXITY,
    Group,
    Spread,
    groups,
    kind_of,
    roles_of,
)
from implicit_llm_report.inputs.sources import Given
from implicit_llm_report.inputs.suites import AVERAGE, load_suites
from implicit_llm_report.registry import registry
from implicit_llm_report.tables import title_of

# Metric and axis label by kind of evaluation.
MEASURES = {
    "word_problem": (LAST_TEN, "accuracy, last 10 tokens"),
    "perplexity": (PERPLEXITY, "perplexity"),
    "lm_eval": (AVERAGE, "average accuracy"),
}
LEAST_RESIDUAL = 1e-9  # smaller residuals are rounding errors, and zero has no logarithm
MOST_PANELS = 6
RANDOM = "random layer"
SHADES = 1e-7, 1.0  # the range of the colour scale
AS_TRAINED = "as trained"  # in the column `at`, for rows without a swept value


def swept_rows(given: Given) -> pd.DataFrame:
    """Return the rows of each test and swept setting, then rows of the same models unswept and of explicit models.

    In these other rows, the column `at` is AS_TRAINED.
    """
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


def _figure(given: Given, key: str, words: str) -> Figure | None:
    rows, entry, charts = swept_rows(given), registry().tables["test-time"], []
    for test in groups(rows[rows["swept"] == key], entry.by):
        measure, label = MEASURES[test.kind]
        lines = [_line(model, measure) for model in groups(test.rows, entry.rows)]
        decorate = partial(_sweep_axis, values=sorted({x for line in lines for x, _ in line.points}), key=key)
        charts.append(Chart(title_of(test, entry.by), lines, decorate, label, is_accuracy=measure != PERPLEXITY))
    return chart_figure(f"test-time-{words}", f"Accuracy and perplexity by {words} at test time", charts)


test_time_iterations = partial(_figure, key="eval_max_iter", words="iterations")
test_time_tolerance = partial(_figure, key="eval_tol", words="tolerance")


def _line(model: Group, measure: str) -> Line:
    """Return the line of a model: its swept values if it is implicit, else one level."""
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


def convergence_by_iteration(given: Given) -> Figure | None:
    """Draw two panels for each data set and length: residuals, and the share of predictions that are already final.

    Return None without a record of convergence.
    """
    frame, charts = given.measured, []
    rows = frame[(frame["kind"] == "duality") & (frame["measure"] == "convergence") & frame["sweep"].isna()]
    for test in groups(rows, ("data", "length")):
        models, title = groups(test.rows, ("name",)), title_of(test, ("data", "length"))
        last = max((curve["f_evaluations"][-1] for model in models for curve in _traces(model)), default=2)
        residuals = [_trace(model, "residual_token_median", 1.7) for model in models]
        residuals += [_trace(model, "residual_token_q90", 0.8) for model in models if _traces(model)]
        decorate, tolerances = partial(_decorate_trace, last=last), {model.eval_tol for model in models} - {None}
        level = ("tolerance", tolerances.pop()) if len(tolerances) == 1 else None
        final = [_trace(model, "agreement_with_last", 1.7) for model in models]
        charts += [
            Chart(f"{title}: residual", residuals, decorate, "relative residual of a token", level=level),
            Chart(f"{title}: predictions", final, decorate, "predictions as at the last one", is_accuracy=True),
        ]
    return chart_figure("convergence-by-iteration", "Convergence by iteration", charts)


def _trace(model: Group, key: str, width: float) -> Line:
    curves = list(_traces(model))
    seeds = zip(*([max(value, LEAST_RESIDUAL) for value in curve[key]] for curve in curves), strict=True)
    points = list(zip(curves[0]["f_evaluations"], map(Spread, seeds), strict=True)) if curves else []
    return Line(model.name, True, points, groups=[model], width=width)


def _traces(model: Group) -> list[Mapping[str, Sequence[float]]]:
    """Return the traces of those seeds that recorded the same f-evaluations as the first seed."""
    curves = model.details("convergence")
    return [curve for curve in curves if curve["f_evaluations"] == curves[0]["f_evaluations"]]


def _decorate_trace(axis: Axes, last: float) -> None:
    ticks = [2**power for power in range(13) if 2**power <= last]
    log_axis(axis, ticks, (0.9, 1.1 * last), "f-evaluations per token")


def jacobian_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of random layers, from one evaluation per kind of model, and then those of trained models."""
    rows = frame[frame["kind"] == "jacobian"]
    is_random = rows["setting"] == RANDOM
    random = [
        kind.rows[kind.rows["role"] == min(kind.roles)].assign(name=f"{RANDOM}, {kind_of(kind)}")
        for kind in groups(rows[is_random], ("is_implicit",))
    ]
    return pd.concat([rows[:0], *random, rows[~is_random]])


def jacobian(given: Given) -> Figure | None:
    """Draw a heat map of one token for each of the first six models, or "missing" for a model without entries.

    Return None without models.
    """
    shown = groups(jacobian_rows(given.measured), ("name", "setting"))[:MOST_PANELS]
    panels = tuple(
        Panel(model.name, partial(_draw, model=model), f"{model.name}: absolute values of the Jacobian")
        for model in shown
    )
    return Figure("jacobian", "Jacobian of the state transition", panels, (), roles_of(shown)) if panels else None


def _draw(axis: Axes, model: Group) -> None:
    """Draw the absolute values of the first seed's Jacobian, with the first row on top.

    Readers with any colour vision can order the shades of the colour map cividis.
    """
    pictures = model.details("entries")
    axis.set(xticks=[], yticks=[], xlabel="entry of the state before the token", ylabel="after the token")
    axis.grid(visible=False)
    tell_if_empty(axis, pictures)
    if pictures:
        scale = LogNorm(*SHADES, clip=True)
        image = axis.imshow(np.abs(pictures[0]), cmap="cividis", norm=scale, interpolation="none")
        axis.figure.colorbar(image, ax=axis, format="{x:g}")
