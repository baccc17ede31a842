"""Draw accuracy on word problems by length, position, mode and share of hard tokens, and the fewest layers by length.

The figure of layers uses all tests at the training length. The figures by length, position and mode omit models that
were tested only at their training length, if other models of the task were tested at another length.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_report.figures.charts import (
    Chart,
    Line,
    accuracy_axis,
    chart_figure,
    charts_of,
    draw_mark,
    length_axis,
    log_axis,
    longest_charts,
    mark_training,
    note,
    tell_if_empty,
    ticks_at,
)
from implicit_llm_report.figures.svg import INK, MUTED, Figure, Panel, Series, series_of_names
from implicit_llm_report.inputs.frame import (
    LAST_TEN,
    Group,
    Spread,
    groups,
    headlines,
    kind_of,
    mode_rank,
    roles_of,
    shares_of,
)
from implicit_llm_report.inputs.layers import LAYERS, fewest_layers
from implicit_llm_report.inputs.sources import Given
from implicit_llm_report.inputs.training_runs import grouped
from implicit_llm_report.tables import title_of

CHANCE = Series("chance (best constant answer)", MUTED, "", (1, 2))
TASK, TEST, CELL = ["group", "monoid"], ["group", "monoid", "hard_fraction"], ["name", "data", "mode"]
TEST_LENGTH = (*TEST, "length")
MODE = ("eval_mode", "eval_stop", "mode")
MANY_SHARES = 3
MAX_POSITIONS = 512  # longer sequences are drawn as this many bins of positions
LABEL_HEIGHT = 0.07  # the height of a model's name, in the units of an accuracy


def of_lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Remove models tested only at their training length, if other models of the task were tested at other lengths."""
    is_beyond = rows["length"] != rows["train_length"]
    return rows[_any(is_beyond, rows[["name"]]) | ~_any(is_beyond, rows[TASK])]


def _any(is_one: pd.Series, by: pd.DataFrame) -> pd.Series:
    """Return for each row whether `is_one` is true for any row that agrees with it in the columns of `by`."""
    keys = [by[column] for column in by]
    return is_one.groupby(keys, dropna=False, sort=False).transform("any")  # unsorted, because a share may be a tuple


def without_fraction_sweep(rows: pd.DataFrame) -> pd.DataFrame:
    """Remove the models of a sweep over the training share of hard tokens, which has a figure of its own.

    The models of a task form a sweep if they have more than MANY_SHARES shares. Of these, only the shares remain at
    which a model was evaluated in several modes; if there is no such share, all remain.
    """
    share = "train_hard_fraction"
    has_few = rows.groupby(TASK, dropna=False)[share].transform("nunique", dropna=False) <= MANY_SHARES
    has_modes = rows.groupby("name")["mode"].transform("nunique") > 1
    return rows[has_few | _any(has_modes, rows[[*TASK, share]]) | ~_any(has_modes, rows[TASK])]


def accuracy_by_length(given: Given) -> Figure | None:
    """Draw last-ten accuracy by test length, implicit against explicit. Source: paper, Fig. 1 right and Fig. 3."""
    rows = headlines(without_fraction_sweep(of_lengths(given.words)))
    charts = charts_of(rows, TEST, "length", LAST_TEN, _decorate_lengths, is_accuracy=True)
    return chart_figure("accuracy-by-length", "Accuracy by sequence length", charts, [CHANCE])


def _decorate_lengths(axis: Axes, test: Group) -> None:
    draw_chance(axis, [(length, chance_of(cell)) for length, cell in test.cells("length").items()])
    length_axis(axis, test)


def chance_of(test: Group) -> float | None:
    """Return the accuracy of the best constant prediction, the highest of all records; None if no record has it."""
    return test.spread("chance_last10", over="record").high


def draw_chance(axis: Axes, points: Sequence[tuple[float, float | None]]) -> None:
    if known := [point for point in points if point[1] is not None]:
        axis.plot(*zip(*known, strict=True), **CHANCE.line() | {"linewidth": 1.2})


def accuracy_by_position(given: Given) -> Figure | None:
    rows = without_fraction_sweep(of_lengths(given.words))
    charts = longest_charts(
        rows, TEST_LENGTH, lambda cell: _binned(cell.details("accuracy_per_position")), _decorate_positions,
        y_label="accuracy at this position", is_accuracy=True,
    )  # fmt: skip
    return chart_figure("accuracy-by-position", "Accuracy at each position of the longest sequences", charts, [CHANCE])


def _binned(curves: Sequence[Sequence[float]]) -> list[tuple[float, Spread]]:
    """Return the seeds' curves as means over at most MAX_POSITIONS bins: mean position, and mean value of each seed."""
    if not curves:
        return []
    table = np.column_stack((np.arange(1, len(curves[0]) + 1), np.transpose(curves)))
    parts = np.array_split(table, min(len(table), MAX_POSITIONS))
    return [(x, Spread(tuple(values))) for x, *values in (part.mean(axis=0).tolist() for part in parts)]


def _decorate_positions(axis: Axes, test: Group) -> None:
    length, chances = test.length, test.details("chance_per_position")
    mark_training(axis, test.rows, 1, length)
    draw_chance(axis, [(x, spread.mean) for x, spread in _binned(chances[:1])])
    axis.set(xlim=(1, max(2, length)), xlabel="position in the sequence (token)")


def accuracy_by_mode(given: Given) -> Figure | None:
    """Draw last-ten accuracy against serial steps per token, with a panel for each test.

    The figure shows the models that were evaluated in several modes, at four times the training length. If they have no
    results at this length, it shows them at all lengths; if there are no such models, it shows all models. Return None
    without an implicit model.
    """
    rows = without_fraction_sweep(of_lengths(given.words))
    if not rows["is_implicit"].any():
        return None
    has_modes, is_long = rows.groupby("name")["mode"].transform("nunique") > 1, rows["length_factor"] == 4
    wanted = next(found for found in (has_modes & is_long, has_modes, rows["is_implicit"].notna()) if found.any())
    rows = rows[wanted]
    tests = [(title_of(test, TEST_LENGTH), groups(test.rows, CELL)) for test in groups(rows, TEST_LENGTH)]
    shown = [cell for _, cells in tests for cell in cells]
    by_work = sorted(shown, key=lambda cell: mode_rank({key: getattr(cell, key) for key in MODE}))
    series = series_of_names((with_mode(cell, kind_of(cell)), bool(cell.is_implicit)) for cell in by_work)
    panels = tuple(
        Panel(title, partial(_draw_modes, cells=cells, series=series), f"{title}: accuracy against serial steps")
        for title, cells in tests
    )
    heading = "Accuracy against serial depth, by model and mode"
    return Figure("accuracy-by-mode", heading, panels, tuple(series.values()), roles_of(shown))


def with_mode(cell: Group, name: str) -> str:
    return f"{name}, {cell.mode}" if cell.is_implicit else name


def _draw_modes(axis: Axes, cells: Sequence[Group], series: Mapping[str, Series]) -> None:
    """Draw a mark at the mean over seeds and a line over their range for each model and mode.

    If there are several models of a kind (implicit or explicit), each is named beside the mark of its headline mode.
    """
    axis.grid(axis="x")
    axis.axvline(1, color=MUTED, linewidth=0.8, linestyle=(0, (1.2, 1.2)))
    kinds = Counter(kind for kind, _ in {(cell.is_implicit, cell.name) for cell in cells})
    places, labels = [], []
    for cell in cells:
        steps, accuracy = cell.spread("serial_steps").mean, cell.spread(LAST_TEN)
        if steps is None or accuracy.mean is None:
            continue
        places.append(steps)
        look = series[with_mode(cell, kind_of(cell))]
        draw_mark(axis, steps, accuracy, look)
        if cell.is_headline and kinds[cell.is_implicit] > 1:
            labels.append((accuracy.mean, steps, cell.name, look.color))
    height = -1.0
    for accuracy_mean, steps, name, color in sorted(labels):  # from below, so that no names overlap
        height = max(accuracy_mean, height + LABEL_HEIGHT)
        note(axis, f"   {name}", (steps, height), xycoords="data", va="center", fontsize=6, color=color)
    low, high = min([0.1, *places]) / 1.6, max([2.0, *places]) * 1.6
    ticks = [tick for tick in (0.001, 0.01, 0.1, 1, 10, 100) if low <= tick <= high]
    log_axis(axis, ticks, (low, high), "serial steps per token (1: a recurrent network)", base=10)
    accuracy_axis(axis, "accuracy, last 10 tokens")
    tell_if_empty(axis, places)


def accuracy_by_hard_fraction(given: Given) -> Figure | None:
    """Draw accuracy by the training share of hard tokens, one panel for each test of models with several shares.

    Return None without such a test.
    """
    charts = []
    rows = headlines(given.words)
    for test in groups(rows[rows["train_hard_fraction"].notna()], TEST_LENGTH):
        lines = [_by_share(kind) for kind in groups(test.rows, ("is_implicit", "train_length"))]
        if any(len(line.points) > 1 for line in lines):
            shares = sorted({share for line in lines for share, _ in line.points})
            decorate = partial(_decorate_shares, shares=shares, chance=chance_of(test))
            charts.append(Chart(title_of(test, TEST_LENGTH), lines, decorate, is_accuracy=True))
    title = "Accuracy by the share of hard tokens in training"
    return chart_figure("accuracy-by-hard-fraction", title, charts, [CHANCE])


def _by_share(kind: Group) -> Line:
    """Return the line of a kind of model by training share; of several models with one share, the most accurate counts.

    The share of a model is the largest in its training data.
    """
    of_share = grouped(groups(kind.rows, CELL), lambda cell: max(shares_of(cell.train_hard_fraction)))
    best = {share: max(cells, key=lambda cell: cell.spread(LAST_TEN).mean or -1.0) for share, cells in of_share.items()}
    points = [(share, best[share].spread(LAST_TEN)) for share in sorted(best)]
    label = f"{kind_of(kind)}, trained at {kind.train_length}"
    return Line(label, bool(kind.is_implicit), points, groups=list(best.values()))


def _decorate_shares(axis: Axes, shares: Sequence[float], chance: float | None) -> None:
    draw_chance(axis, [(shares[0], chance), (shares[-1], chance)])
    axis.set_xscale("symlog", linthresh=0.02, linscale=0.4)
    ticks_at(axis, shares, lambda share: f"{100 * share:g}")
    start = min(0.0, shares[0]) if shares[0] < 0.02 else shares[0] / 1.25
    axis.set(xlim=(start, shares[-1] * 1.25), xlabel="hard tokens in training (%)")


def minimum_layers(given: Given) -> Figure | None:
    """Draw the fewest layers for each length, or a triangle if no trained depth solves it; None if not configured."""
    config = given.config.minimum_layers
    if config is None:
        return None
    needed = fewest_layers(given.depths, config).drop_duplicates(["is_implicit", "length"])
    charts = charts_of(needed, ("data",), "length", LAYERS, _decorate_layers, y_label="layers needed")
    empty = Chart(f"{config.group}, accuracy ≥ {config.threshold:g}", [], lambda axis: None, "layers needed")
    return chart_figure("minimum-layers", "Layers needed by length", charts or [empty])


def _decorate_layers(axis: Axes, test: Group) -> None:
    length_axis(axis, test, is_beyond=False)
    axis.set_xlabel("length of training and test (tokens)")
    layers = sorted(test.rows["value"].dropna().unique())
    axis.set_yticks(layers, [f"{number:g}" for number in layers])
    for length, cell in test.cells("length").items():
        for value, detail in zip(cell.rows["value"], cell.rows["detail"], strict=True):
            if detail["words"].startswith(">"):
                axis.plot(length, value, "^", color=INK, markersize=9, fillstyle="none", zorder=7)
