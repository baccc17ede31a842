"""Word problems: accuracy by length, position, mode and share of hard tokens; tables for the page, CSV and LaTeX.

A cell is a model on a test set in a mode, over its seeds. Models that were tested at their training length only tell
how many layers a length takes; the figures by length leave them out where others of the task go beyond it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_contracts.hints import natural
from implicit_llm_report.axes import accuracy_axis, length_axis, mark_training, tell_if_empty, ticks_at
from implicit_llm_report.charts import Chart, Line, chart_figure
from implicit_llm_report.frame import COSTS, LAST_TEN, Group, Spread, groups, headlines, mode_rank, roles_of, shares_of
from implicit_llm_report.published import Published, PublishedNumber
from implicit_llm_report.section import Section, SectionInputs, Table
from implicit_llm_report.style import INK, MUTED, Series, mode_series
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import fields, files_of, spread_fields

CHANCE = Series("chance (best constant answer)", MUTED, "", (1, 2))
PUBLISHED = Series("published or reference number, same mode", INK, "*", has_line=False)
COST = COSTS[0]
CSV_METRICS = (
    "accuracy_last10", "accuracy_sequence", "accuracy_token", "f_evaluations_per_token", "iterations_per_token",
    "residual", "unconverged_share", "token_match_sequential",
)  # fmt: skip
TASK, TEST, CELL = ["group", "monoid"], ["group", "monoid", "hard_fraction"], ["name", "data", "mode"]
MANY_SHARES = 3
RECURRENT = ("lstm",)  # families that read a sequence token by token, without a solver
MAX_POSITIONS = 512
LABEL_HEIGHT = 0.07  # of the name of a model, in the units of an accuracy


def task_label(test: Group) -> str:
    return test.group if test.monoid == "none" else f"{test.group} × monoid"


def title_of(test: Group) -> str:
    """ "S5, 20 % hard"; several shares are mixed in equal parts."""
    hard = " / ".join(f"{100 * share:g}" for share in shares_of(test.hard_fraction))
    return f"{task_label(test)}, {hard} % hard"


def is_harder(test: Group) -> bool | None:
    """Whether the test has a larger share of hard tokens than anything in training; None when that is unknown."""
    if test.train_hard_fraction is None:
        return None
    return max(shares_of(test.hard_fraction)) > max(shares_of(test.train_hard_fraction))


def by_task(rows: pd.DataFrame, columns: Sequence[str] = TASK) -> list[Group]:
    """The tests by task, that of the largest group first, then by share of hard tokens."""
    chance = rows[rows["metric"] == "chance_last10"].groupby(TASK)["value"].min().fillna(1.0)

    def order(test: Group) -> tuple:
        task = (test.group, test.monoid)
        return chance.get(task, 1.0), task, shares_of(test.hard_fraction)

    return groups(rows, columns, order=order)


def of_lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the models that were tested at their training length only, where others of the task go beyond it."""
    beyond = rows[rows["length"] != rows["train_length"]]
    tasks = set(zip(beyond["group"], beyond["monoid"], strict=True))
    is_other = np.array([task not in tasks for task in zip(rows["group"], rows["monoid"], strict=True)], bool)
    return rows[rows["name"].isin(set(beyond["name"])) | is_other]


def without_fraction_sweep(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the models of a task that stand for one of many shares of hard tokens; they fill a figure of their own.

    The shares at which an implicit model was evaluated in several modes stay.
    """
    dropped: set[str] = set()
    for task in groups(rows, TASK):
        mine = task.rows
        if mine["train_hard_fraction"].nunique(dropna=False) > MANY_SHARES:
            several = mine.groupby("name")["mode"].transform("nunique") > 1
            kept = set(mine[several]["train_hard_fraction"])
            dropped |= set(mine[~mine["train_hard_fraction"].isin(kept)]["name"]) if kept else set()
    return rows[~rows["name"].isin(dropped)]


def accuracy_section(given: SectionInputs) -> Section | None:
    """Word problems."""
    rows = given.words
    if rows.empty:
        return None
    tables = accuracy_tables(rows)
    shown = without_fraction_sweep(of_lengths(rows))
    figures = (
        accuracy_by_mode(shown),
        accuracy_by_length(shown, given.published.numbers),
        accuracy_by_position(shown),
        accuracy_by_hard_fraction(rows),
    )
    cells = {table.title: [cell for row in table.rows for cell in row.cells("length").values()] for table in tables}
    found = [(title, [_csv_row(cell, given.published) for cell in mine]) for title, mine in cells.items()]
    values = {LAST_TEN: "accuracy on the last ten tokens"}
    files = {"accuracy": files_of(found, {"run": "Model", "mode": "Mode"}, values, by="length")}
    return Section("accuracy", "sections/accuracy.html.j2", tables, figures, files)


def accuracy_tables(rows: pd.DataFrame) -> list[Table]:
    """One a task and share of hard tokens; of each model the headline mode first."""

    def order(row: Group) -> tuple:
        return not row.is_implicit, natural(row.name), not row.is_headline, mode_rank(row.mode)

    return [
        Table(title_of(test), test, groups(test.rows, ("name", "mode"), order=order), list(test.cells("length")))
        for test in by_task(rows, TEST)
    ]


def _csv_row(cell: Group, published: Published) -> dict[str, object]:
    """Every number, and every seed of the accuracy: none is left out."""
    best, number, seeds = cell.best(LAST_TEN), published.beside(cell, LAST_TEN), cell.by_seed(LAST_TEN)
    by_seed = "; ".join(f"{s}: {'missing' if v is None else f'{v:.6g}'}" for s, v in seeds.items())
    return {
        **{"run": cell.name, **fields(cell, "model", "num_layers", "num_parameters", "group", "monoid")},
        "hard_fraction": " ".join(f"{share:g}" for share in shares_of(cell.hard_fraction)),
        **fields(cell, "length", "train_length", "mode"),
        **{"num_seeds": len(cell.spread(LAST_TEN).values), "num_samples": cell.num_samples},
        "chance_last10": cell.spread("chance_last10").high,
        **spread_fields(CSV_METRICS, cell.spread),
        **{"best_seed": best and best.seed, "accuracy_last10_by_seed": by_seed if len(seeds) > 1 else None},
        "published_accuracy_last10": number and number.value,
        "published_mark": number and number.mark,
    }


def accuracy_by_length(rows: pd.DataFrame, published: Sequence[PublishedNumber] = ()) -> Figure | None:
    """Last-ten accuracy against test length, implicit against explicit. Source: paper, Fig. 1 right and Fig. 3."""
    shown, marks = headlines(rows), [CHANCE]
    labels, charts = _labels(shown), []
    for test in by_task(shown, TEST):
        cells = groups(test.rows, CELL)
        beside = [n for n in published if n.metric == LAST_TEN and any(n.is_beside(cell) for cell in cells)]
        lines = [_line(labels[model.name], model, "length") for model in groups(test.rows, ("name",))]
        charts.append(Chart(title_of(test), lines, partial(_decorate_lengths, test=test, known=beside)))
        marks += [PUBLISHED] if beside and PUBLISHED not in marks else []
    return chart_figure("accuracy-by-length", "Accuracy by sequence length", charts, marks)


def _line(label: str, model: Group, column: str) -> Line:
    cells = model.cells(column)
    return Line(label, model.is_implicit, [(x, cell.spread(LAST_TEN)) for x, cell in cells.items()], groups=[model])


def _labels(rows: pd.DataFrame) -> dict[str, str]:
    """What the line of each model is called: the only model of its kind on a task by its kind."""
    labels = {}
    for kind in groups(rows, (*TASK, "is_implicit")):
        models = groups(kind.rows, ("name",))
        for model in models:
            alone = f"implicit ({model.mode})" if model.is_implicit else "explicit"
            labels[model.name] = alone if len(models) == 1 else model.name
    return labels


def _decorate_lengths(axis: Axes, test: Group, known: Sequence[PublishedNumber]) -> None:
    cells = test.cells("length")
    lengths = sorted({*cells, *(number.test.length for number in known)})
    mark_training(axis, set(test.rows["train_length"]), (lengths[0], lengths[-1]), is_log=True)
    chance = [(length, cell.chance) for length, cell in cells.items() if cell.chance is not None]
    axis.plot(*zip(*chance, strict=True), **CHANCE.line(has_markers=False) | {"linewidth": 1.2})
    for number in known:
        axis.plot(number.test.length, number.value, **PUBLISHED.line(), zorder=6, clip_on=False)
    length_axis(axis, lengths)


def accuracy_by_position(rows: pd.DataFrame) -> Figure | None:
    """Accuracy at each position of the longest test sequences: every mode of the only implicit model of a task."""
    labels, charts, shown = _labels(headlines(rows)), [], []
    known: dict[str, Series] = {}
    for test in by_task(rows, TEST):
        length = max(test.rows["length"])
        cells = groups(test.rows[test.rows["length"] == length], CELL, order=lambda cell: not cell.is_headline)
        if len({cell.name for cell in cells if cell.is_implicit}) > 1:
            cells = [cell for cell in cells if cell.is_headline]
        shown.append((f"{title_of(test)}, length {length}", cells))
    is_by_name = any(sum(cell.is_implicit for cell in cells if cell.is_headline) > 1 for _, cells in shown)
    for title, cells in shown:
        lines = []
        for index, cell in enumerate(cells):
            series = mode_series(cell.mode)
            known |= {} if is_by_name else {series.label: series}
            label = labels[cell.name] if is_by_name and cell.is_headline else series.label
            lines.append(_curve(label, cell, 1.4 if index else 2.8))
        decorate = partial(_decorate_positions, cells=cells)
        charts.append(Chart(title, lines, decorate, y_label="accuracy at this position"))
    title = "Accuracy at each position of the longest sequences"
    return chart_figure("accuracy-by-position", title, charts, [CHANCE], known)


def _curve(label: str, cell: Group, width: float) -> Line:
    """The headline mode is wide and comes first, so that modes that agree with it show on top of it."""
    curves = cell.curves("accuracy_per_position")
    return Line(label, cell.is_implicit, _by_position(curves) if curves else (), groups=[cell], width=width)


def _decorate_positions(axis: Axes, cells: Sequence[Group]) -> None:
    length = cells[0].length
    mark_training(axis, {cell.train_length for cell in cells}, (1, length), is_log=False)
    chances = [curve for cell in cells for curve in cell.curves("chance_per_position")]
    if chances:
        points = [(x, spread.mean) for x, spread in _by_position(chances[:1])]
        axis.plot(*zip(*points, strict=True), **CHANCE.line(has_markers=False) | {"linewidth": 1.2})
    axis.set(xlim=(1, max(2, length)), xlabel="position in the sequence (token)")


def _by_position(curves: Sequence[Sequence[float]]) -> list[tuple[float, Spread]]:
    """Of each seed the mean over equal bins of positions, where there are more of these than can be seen."""
    table = np.column_stack((np.arange(1, len(curves[0]) + 1), np.transpose(curves)))
    parts = np.array_split(table, min(len(table), MAX_POSITIONS))
    return [(x, Spread(tuple(values))) for x, *values in (part.mean(axis=0).tolist() for part in parts)]


def serial_steps(cell: Group) -> dict[int | None, float | None]:
    """By seed, how many f-evaluations wait for one another, divided by the length: 1 for a recurrent network."""
    blocks = {"sequential": cell.length, "blockwise": math.ceil(cell.length / (cell.eval_block_len or cell.length))}
    share = 1.0 if cell.family in RECURRENT else blocks.get(cell.eval_mode, 1) / cell.length
    return {seed: None if work is None else work * share for seed, work in cell.by_seed(COST).items()}


def accuracy_by_mode(rows: pd.DataFrame) -> Figure | None:
    """Last-ten accuracy against serial steps a token: a panel for each test and length, every model in every mode."""
    if not rows["is_implicit"].any():
        return None
    panels, shown = [], []
    for test in by_task(rows, TEST):
        for length, of_length in test.cells("length").items():
            cells = groups(of_length.rows, CELL)
            title = f"{title_of(test)}, length {length}"
            panels.append(Panel(title, partial(_draw_modes, cells=cells), f"{title}: accuracy against serial steps"))
            shown += cells
    title = "Accuracy against serial depth, by model and mode"
    return Figure("accuracy-by-mode", title, tuple(panels), _modes(shown), roles_of(shown))


def _modes(cells: Sequence[Group]) -> tuple[Series, ...]:
    """The legend of the modes, explicit last, as in the tables."""
    modes = sorted({cell.mode for cell in cells}, key=lambda mode: (mode == "parallel", mode_rank(mode)))
    return tuple(map(mode_series, modes))


def _draw_modes(axis: Axes, cells: Sequence[Group]) -> None:
    """A mark for each model and mode at the mean over seeds, their range as a line; models of one kind are named."""
    axis.axvline(1, color=MUTED, linewidth=0.8, linestyle=(0, (1.2, 1.2)))
    kinds = Counter(kind for kind, _ in {(cell.is_implicit, cell.name) for cell in cells})
    places, labels = [], []
    for cell in cells:
        steps, accuracy = Spread.of(serial_steps(cell).values()).mean, cell.spread(LAST_TEN)
        if steps is None or accuracy.mean is None:
            continue
        places.append(steps)
        series = mode_series(cell.mode)
        axis.plot([steps, steps], [accuracy.low, accuracy.high], color=series.color, linewidth=1)  # type: ignore[arg-type]
        axis.plot(steps, accuracy.mean, **series.line() | {"linestyle": "none", "markersize": 6}, clip_on=False)
        if cell.is_headline and kinds[cell.is_implicit] > 1:
            labels.append((accuracy.mean, steps, cell.name, series.color))
    height = -1.0
    for accuracy_mean, steps, name, color in sorted(labels):  # from below, none on another
        height = max(accuracy_mean, height + LABEL_HEIGHT)
        place: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(name, (steps, height), **place, fontsize=6, color=color)
    low, high = min([0.1, *places]) / 1.6, max([2.0, *places]) * 1.6
    axis.set_xscale("log")
    ticks_at(axis, [tick for tick in (0.001, 0.01, 0.1, 1, 10, 100) if low <= tick <= high])
    axis.set(xlim=(low, high), xlabel="serial steps per token (1: a recurrent network)")
    accuracy_axis(axis, "accuracy, last 10 tokens")
    tell_if_empty(axis, places)


def accuracy_by_hard_fraction(rows: pd.DataFrame) -> Figure | None:
    """A panel for each test of models that differ in the share of hard tokens in training; None without any."""
    charts = []
    shown = headlines(rows[rows["train_hard_fraction"].notna()])
    for test in by_task(shown, TEST):
        for length, cells in test.cells("length").items():
            kinds = groups(cells.rows, ("is_implicit", "train_length"), lambda k: (not k.is_implicit, k.train_length))
            lines = [_by_share(kind) for kind in kinds]
            if any(len(line.points) > 1 for line in lines):
                title = f"{title_of(test)}, length {length}"
                shares = sorted({share for line in lines for share, _ in line.points})
                decorate = partial(_decorate_shares, shares=shares, chance=cells.chance)
                charts.append(Chart(title, lines, decorate, f"{title}: accuracy by share of hard tokens in training"))
    title = "Accuracy by the share of hard tokens in training"
    return chart_figure("accuracy-by-hard-fraction", title, charts, [CHANCE])


def _by_share(kind: Group) -> Line:
    """Of several models that were trained with one share the most accurate."""
    best: dict[float, tuple[Spread, Group]] = {}
    for cell in groups(kind.rows, CELL):
        share, spread = max(shares_of(cell.train_hard_fraction)), cell.spread(LAST_TEN)
        if share not in best or (spread.mean or -1.0) > (best[share][0].mean or -1.0):
            best[share] = spread, cell
    label = f"{'implicit' if kind.is_implicit else 'explicit'}, trained at {kind.train_length}"
    points = [(share, spread) for share, (spread, _) in sorted(best.items())]
    return Line(label, kind.is_implicit, points, groups=[cell for _, cell in best.values()])


def _decorate_shares(axis: Axes, shares: Sequence[float], chance: float | None) -> None:
    if chance is not None:
        axis.axhline(chance, **CHANCE.line(has_markers=False) | {"linewidth": 1.2})
    axis.set_xscale("symlog", linthresh=0.02, linscale=0.4)
    ticks_at(axis, shares, lambda share: f"{100 * share:g}")
    axis.set(xlim=(min(0.0, shares[0]) if shares[0] < 0.02 else shares[0] / 1.25, shares[-1] * 1.25))
    axis.set_xlabel("hard tokens in training (%)")


def glances(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """For each task, headline accuracies of both kinds of model at a few lengths of the easiest tests."""
    found = []
    for task in by_task(headlines(rows)):
        tests = groups(task.rows, TEST)
        trained = [cell for test in tests for cell in groups(test.rows, CELL) if is_harder(cell) is False]
        cells = trained or groups(task.rows, CELL)
        easiest = min(shares_of(cell.hard_fraction) for cell in cells)
        cells = [cell for cell in cells if shares_of(cell.hard_fraction) == easiest]
        lengths = sorted({cell.length for cell in cells})
        beyond = {4 * cell.train_length for cell in cells if cell.train_length} & set(lengths)  # as in the paper
        rows_of_task = [_glance(cells, length) for length in sorted({lengths[0], *beyond, lengths[-1]})]
        found.append({"label": task_label(task), "hard_fractions": easiest, "rows": rows_of_task})
    return found


def _glance(cells: Sequence[Group], length: int) -> Mapping[str, Any]:
    at = [cell for cell in cells if cell.length == length]
    row: dict[str, Any] = {"length": length, "chance": at[-1].chance, "is_trained": at[-1].train_length == length}
    for key, is_implicit in (("implicit", True), ("explicit", False)):
        mine = [cell for cell in at if cell.is_implicit == is_implicit]
        row[key] = max(mine, key=lambda cell: cell.spread(LAST_TEN).mean or 0.0, default=None)
    return row
