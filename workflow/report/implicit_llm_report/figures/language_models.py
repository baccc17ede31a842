"""Draw figures of language models: perplexity by length, size and share of the bounded phase; CatbAbI; convergence."""

from collections.abc import Mapping, Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_report.claims.measure import EQUAL, choose, in_rivals
from implicit_llm_report.figures.charts import (
    Chart,
    Line,
    chart_figure,
    charts_of,
    length_axis,
    log_ticks,
    ticks_at,
)
from implicit_llm_report.figures.style import BAND
from implicit_llm_report.figures.svg import Figure
from implicit_llm_report.inputs.frame import PERPLEXITY, Group, Spread, groups, headlines, is_close, plain, short_count
from implicit_llm_report.inputs.sources import Given
from implicit_llm_report.tables import title_of

LEAST_RESIDUAL = 1e-9  # smaller values are rounding errors, and zero has no logarithm
KINDS = {"free": "implicit, free phase", "bounded": "implicit, bounded phase alone"}


def perplexity_by_length(given: Given) -> Figure | None:
    """Draw held-out perplexity against the length of the test sequences, one panel per family, size and test set."""
    rows = headlines(given.perplexities)
    charts = charts_of(rows, ("models", "data"), "length", PERPLEXITY, length_axis, y_label=PERPLEXITY)
    return chart_figure("perplexity-by-length", "Perplexity by test length", charts)


def perplexity_by_parameters(given: Given) -> Figure | None:
    """Draw a panel for each family and test set with models of several sizes; return None if there are none."""
    rows = _at_training_length(given)
    kinds = [
        KINDS.get(b, "implicit" if i else "explicit") for b, i in zip(rows["budget"], rows["is_implicit"], strict=True)
    ]
    rows = rows.assign(name=kinds, label=kinds)
    spoken = [
        choice.cell
        for test in groups(rows, ("family", "data"))
        for choice in map(choose, _rivals(test))
        if choice.words is not None
    ]
    if not spoken:
        return None
    shown = pd.concat([cell.rows for cell in spoken])
    charts = charts_of(shown, ("family", "data"), "num_parameters", PERPLEXITY, _decorate_sizes, y_label=PERPLEXITY)
    charts = [chart for chart in charts if any(len(line.points) > 1 for line in chart.lines)]
    return chart_figure("perplexity-by-parameters", "Perplexity by parameters", charts)


def _at_training_length(given: Given) -> pd.DataFrame:
    rows = headlines(given.perplexities)
    return rows[rows["length_factor"] == 1]


def _rivals(test: Group) -> list[list[Group]]:
    """Return the groups of competing models, which have one kind and size.

    A group contains only the models with as many tokens as an implicit model of the test, if there are any.
    """
    cells = groups(test.rows, ("run", "phase", "name", "mode"))
    tokens = [cell.mean("train_tokens") for cell in cells if cell.is_implicit]
    found = in_rivals(cells, ("name",), ("num_parameters",))
    return [[c for c in mine if any(is_close(c.mean("train_tokens"), t, EQUAL["train_tokens"]) for t in tokens)] or mine
            for mine in found]  # fmt: skip


def _decorate_sizes(axis: Axes, test: Group) -> None:
    sizes = list(test.cells("num_parameters"))
    axis.set_xscale("log")
    axis.set(xlim=(sizes[0] / 1.2, sizes[-1] * 1.2), xlabel="parameters")
    log_ticks(axis.xaxis, short_count)


def curriculum(given: Given) -> Figure | None:
    """Draw a panel for each run and test set with several branches of one curriculum; return None if there are none."""
    rows, charts = _at_training_length(given), []
    for run in groups(rows[rows["is_implicit"].astype(bool)], ("run", "data")):
        # A trunk that continues to the end is drawn at 1; explicit runs with as many tokens are levels.
        shares = run.rows["share_bounded"].where(run.rows["share_bounded"].notna(), 1.0)
        branches = Group(run.rows.assign(name=run.run, label="implicit", share_bounded=shares)).cells("share_bounded")
        if len([share for share in branches if share < 1]) < 2:
            continue
        ends = [(share, one) for share, branch in branches.items() for one in groups(branch.rows, ("phase",))]
        points = [(share, one.spread(PERPLEXITY)) for share, one in ends]
        mine = Line(run.run, True, points, groups=list(branches.values()))
        same = rows[(rows["models"] == run.models) & (rows["data"] == run.data) & (~rows["is_implicit"].astype(bool))]
        levels = [
            Line("explicit", False, level=one.spread(PERPLEXITY), groups=[one])
            for one in groups(same, ("name",))
            if one.train_tokens == run.train_tokens
        ]
        title = f"{run.run}, {run.data}"
        decorate = partial(_decorate_branches, shares=list(branches))
        charts.append(Chart(title, [mine, *levels], decorate, PERPLEXITY))
    return chart_figure("curriculum", "Perplexity by share of the bounded phase", charts)


def _decorate_branches(axis: Axes, shares: Sequence[float]) -> None:
    ticks_at(axis, shares, lambda share: f"{100 * share:.3g} %")
    margin = 0.08 * (max(shares) - min(shares))
    axis.set(xlim=(min(shares) - margin, max(shares) + margin), xlabel="share of the steps in the bounded phase")


def accuracy_by_babi_task(given: Given) -> Figure | None:
    """Draw accuracy on the test set for all questions and for each task, for every model in its headline mode.

    If runs compete, only the one chosen on the validation set is drawn, because a grid has too many runs for a figure.
    """
    rows = headlines(plain(given.measured, "catbabi"))
    rows = rows[(rows["split"] == "test") & (rows["metric"] == "accuracy") & (rows["protocol"] != "carried")]
    shown = []
    for test in groups(rows, ("data",)):
        for rivals in in_rivals(
            groups(test.rows, ("name",)), ("is_implicit", "family", "num_layers"), ("train_tokens",)
        ):
            choice = choose(rivals)
            shown += rivals if choice.words is None else [choice.cell]
    if not shown:
        return None
    rows = pd.concat([cell.rows.assign(place=cell.rows["task"].fillna(0).astype(int)) for cell in shown])
    charts = charts_of(
        rows, ("data",), "place", "accuracy", _decorate_tasks,
        y_label="accuracy at questions", is_accuracy=True, has_lines=False,
    )  # fmt: skip
    return chart_figure("accuracy-by-babi-task", "Accuracy on each CatbAbI task", charts, is_wide=True)


def _decorate_tasks(axis: Axes, test: Group) -> None:
    axis.axvspan(-0.5, 0.5, color=BAND, linewidth=0, zorder=0)
    ticks_at(axis, list(test.cells("place")), lambda place: f"{place}" if place else "all")
    axis.set_xlabel("task")


def convergence_by_iteration(given: Given) -> Figure | None:
    """Draw two panels for each data set and length: residuals of implicit models, and shares of final predictions."""
    frame, charts = given.measured, []
    rows = frame[(frame["kind"] == "duality") & (frame["measure"] == "convergence") & frame["sweep"].isna()]
    for test in groups(rows, ("data", "length")):
        models, title = groups(test.rows, ("name",)), title_of(test, ("data", "length"))
        last = max((curve["f_evaluations"][-1] for model in models for curve in _traces(model)), default=2)
        residuals = [_trace(model, "residual_token_median", 1.7) for model in models]
        residuals += [_trace(model, "residual_token_q90", 0.8) for model in models if _traces(model)]
        decorate, tolerances = partial(_decorate_trace, last=last), {model.eval_tol for model in models} - {None}
        level = ("tolerance", tolerances.pop()) if len(tolerances) == 1 else None
        label = "relative residual of a token"
        charts.append(Chart(f"{title}: residual", residuals, decorate, label, level=level))
        final = [_trace(model, "agreement_with_last", 1.7) for model in models]
        charts.append(
            Chart(f"{title}: predictions", final, decorate, "predictions as at the last one", is_accuracy=True)
        )
    return chart_figure("convergence-by-iteration", "Convergence by iteration", charts)


def _trace(model: Group, key: str, width: float) -> Line:
    curves = list(_traces(model))
    seeds = zip(*([max(value, LEAST_RESIDUAL) for value in curve[key]] for curve in curves), strict=True)
    points = list(zip(curves[0]["f_evaluations"], map(Spread, seeds), strict=True)) if curves else []
    return Line(model.name, True, points, groups=[model], width=width)


def _traces(model: Group) -> list[Mapping[str, Sequence[float]]]:
    """Return the traces of the seeds that have the same evaluations as the first one."""
    curves = model.curves("convergence")
    return [curve for curve in curves if curve["f_evaluations"] == curves[0]["f_evaluations"]]


def _decorate_trace(axis: Axes, last: float) -> None:
    axis.set_xscale("log", base=2)
    ticks_at(axis, [2**power for power in range(13) if 2**power <= last])
    axis.set(xlim=(0.9, 1.1 * last), xlabel="f-evaluations per token")
