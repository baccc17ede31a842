"""Draw perplexity by length, position, size and share of the bounded phase, and accuracy by task of CatbAbI."""

import math
from collections.abc import Sequence
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
    log_axis,
    log_ticks,
    longest_charts,
    mark_training,
    ticks_at,
)
from implicit_llm_report.figures.svg import BAND, Figure
from implicit_llm_report.inputs.frame import PERPLEXITY, Group, Spread, groups, headlines, is_close, plain, short_count
from implicit_llm_report.inputs.sources import Given

LEAST_TOKENS = 256  # the fewest tokens of a point of perplexity by position
KINDS = {"free": "implicit, free phase", "bounded": "implicit, bounded phase alone"}


def perplexity_by_length(given: Given) -> Figure | None:
    """Draw held-out perplexity against the length of the test sequences, one panel per family, size and test set."""
    rows = headlines(given.perplexities)
    charts = charts_of(rows, ("models", "data"), "length", PERPLEXITY, length_axis, y_label=PERPLEXITY)
    return chart_figure("perplexity-by-length", "Perplexity by test length", charts)


def perplexity_by_position(given: Given) -> Figure | None:
    test = ("models", "data", "length")
    charts = longest_charts(given.perplexities, test, _perplexities, _decorate_perplexity, y_label=PERPLEXITY)
    return chart_figure("perplexity-by-position", "Perplexity by position", charts)


def _perplexities(cell: Group) -> list[tuple[float, Spread]]:
    """Return position and perplexity of bins with enough tokens.

    Leave out seeds that lack a loss or have other bins than the first seed. The position is the geometric mean of the
    ends of a bin.
    """
    curves = [curve for curve in cell.details("loss_by_position") if None not in curve["loss"]]
    if not curves:
        return []
    starts, ends, counts = (curves[0][key] for key in ("start", "end", "num_tokens"))
    losses = zip(*(curve["loss"] for curve in curves if curve["start"] == starts), strict=True)
    bins = zip(starts, ends, counts, losses, strict=True)
    return [
        (math.sqrt(start * end), Spread(tuple(map(math.exp, seeds))))
        for start, end, count, seeds in bins
        if count >= LEAST_TOKENS
    ]


def _decorate_perplexity(axis: Axes, test: Group) -> None:
    length = test.length
    mark_training(axis, test.rows, 1, length)
    ticks = [length / 4**power for power in range(12) if 4**power <= length]
    log_axis(axis, ticks, (0.9, length * 1.1), "tokens before the predicted one")


def perplexity_by_parameters(given: Given) -> Figure | None:
    """Draw perplexity at the training length by size, one panel per family and test set; None without several sizes.

    Of competing models, only the one with the best score is drawn, and none of them if they have no score.
    """
    rows = headlines(given.perplexities).query("length_factor == 1")
    kinds = [
        KINDS.get(b, "implicit" if i else "explicit") for b, i in zip(rows["budget"], rows["is_implicit"], strict=True)
    ]
    rows = rows.assign(name=kinds, label=kinds)
    spoken = [
        cell
        for test in groups(rows, ("family", "data"))
        for cell, words in map(choose, _rivals(test))
        if words is not None
    ]
    if not spoken:
        return None
    shown = pd.concat([cell.rows for cell in spoken])
    charts = charts_of(shown, ("family", "data"), "num_parameters", PERPLEXITY, _decorate_sizes, y_label=PERPLEXITY)
    charts = [chart for chart in charts if any(len(line.points) > 1 for line in chart.lines)]
    return chart_figure("perplexity-by-parameters", "Perplexity by parameters", charts)


def _rivals(test: Group) -> list[list[Group]]:
    """Return the groups of competing models, which have one kind and size.

    If some models of a group trained on as many tokens as an implicit model of the test, only these compete.
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
    """Draw perplexity by share of the bounded phase, one panel for each test set of each implicit run with branches.

    A run needs at least two branches that start at different steps. Return None without such a run.
    """
    rows, charts = headlines(given.perplexities).query("length_factor == 1"), []
    for run in groups(rows[rows["is_implicit"].astype(bool)], ("run", "data")):
        # A bounded phase that continues to the end is drawn at 1. Explicit runs with equally many training tokens are
        # levels.
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
        decorate = partial(_decorate_branches, shares=list(branches))
        charts.append(Chart(f"{run.run}, {run.data}", [mine, *levels], decorate, PERPLEXITY))
    return chart_figure("curriculum", "Perplexity by share of the bounded phase", charts)


def _decorate_branches(axis: Axes, shares: Sequence[float]) -> None:
    ticks_at(axis, shares, lambda share: f"{100 * share:.3g} %")
    margin = 0.08 * (max(shares) - min(shares))
    axis.set(xlim=(min(shares) - margin, max(shares) + margin), xlabel="share of the steps in the bounded phase")


def accuracy_by_babi_task(given: Given) -> Figure | None:
    """Draw accuracy on the test set for all questions and for each task, for every model in its headline mode.

    If runs compete, only the one with the best validation score is drawn, because a grid of settings has too many runs
    for a figure; if none has a score, all are drawn. Numbers of the protocol "carried" are not drawn.
    """
    rows = headlines(plain(given.measured, "catbabi"))
    rows = rows[(rows["split"] == "test") & (rows["metric"] == "accuracy") & (rows["protocol"] != "carried")]
    shown = []
    for test in groups(rows, ("data",)):
        for rivals in in_rivals(
            groups(test.rows, ("name",)), ("is_implicit", "family", "num_layers"), ("train_tokens",)
        ):
            chosen, words = choose(rivals)
            shown += rivals if words is None else [chosen]
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
