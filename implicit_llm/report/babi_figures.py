"""The figure of accuracy on each of the bAbI tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from implicit_llm.report.axes import tell_if_empty
from implicit_llm.report.babi_choice import marked_name, speaking_cells
from implicit_llm.report.babi_results import BabiCell, BabiResults, task_spread, tasks_asked
from implicit_llm.report.perplexity_figures import series_of_names
from implicit_llm.report.results import Spread
from implicit_llm.report.style import BAND, Series
from implicit_llm.report.svg import Figure, Panel

SLOT = 0.66  # share of a task's width over which the models are spread


def accuracy_by_babi_task(results: BabiResults) -> Figure | None:
    """Accuracy on the test set at the questions of each task and of all, every model in the mode that speaks for it.

    Of runs that compete only the one chosen on the validation set is drawn: a grid has more of them than fit.
    """
    if not results.test_sets:
        return None
    series = series_of_names(
        (marked_name(results, cell), cell.first.is_implicit)
        for data in results.test_sets
        for cell in speaking_cells(results, data)
    )
    panels, roles = [], []
    for data in results.test_sets:
        cells = speaking_cells(results, data)
        names = {id(cell): marked_name(results, cell) for cell in cells}
        draw = partial(_draw, cells=cells, names=names, series=series)
        panels.append(Panel(f"CatbAbI, {data}", draw, f"CatbAbI, {data}: accuracy on each task"))
        roles += [role for cell in cells for role in cell.roles]
    title = "Accuracy on each CatbAbI task"
    return Figure(
        "accuracy-by-babi-task", title, tuple(panels), tuple(series.values()), tuple(dict.fromkeys(roles)), is_wide=True
    )


def _draw(axis: Axes, cells: list[BabiCell], names: Mapping[int, str], series: Mapping[str, Series]) -> None:
    tasks = tasks_asked(cells)
    places = {task: place for place, task in enumerate(tasks, start=1)}
    axis.axvspan(-0.5, 0.5, color=BAND, linewidth=0, zorder=0)
    for index, cell in enumerate(cells):
        offset = SLOT * ((index + 0.5) / len(cells) - 0.5)
        mine = series[names[id(cell)]]
        _draw_spread(axis, offset, cell.spread("accuracy"), mine)
        for task, place in places.items():
            _draw_spread(axis, place + offset, task_spread(cell, task), mine)
    axis.set(xlim=(-0.5, len(tasks) + 0.5), ylim=(-0.03, 1.03), xlabel="task", ylabel="accuracy at questions")
    labels = ["all", *map(str, tasks)]
    axis.xaxis.set(major_locator=FixedLocator(list(range(len(labels)))))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: labels[round(value)] if value < len(labels) else ""))
    axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axis.grid(visible=False, axis="x")
    tell_if_empty(axis, [cell for cell in cells if cell.spread("accuracy").values])


def _draw_spread(axis: Axes, place: float, spread: Spread, series: Series) -> None:
    if spread.mean is None or spread.low is None or spread.high is None:
        return
    if len(spread.values) > 1:
        axis.plot([place, place], [spread.low, spread.high], color=series.color, linewidth=1.1, zorder=3)
    axis.plot(place, spread.mean, **series.line() | {"linestyle": "none", "markersize": 4.5}, zorder=4)
