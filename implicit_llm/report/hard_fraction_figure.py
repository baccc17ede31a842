"""The figure of accuracy against the share of hard tokens in training. Source: paper, Fig. 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from implicit_llm.report.accuracy_figures import CHANCE, accuracy_axis, setting_of, settings_of
from implicit_llm.report.axes import tell_if_empty, tell_missing
from implicit_llm.report.results import LAST_TEN, Cell, Point, Results
from implicit_llm.report.style import Series, run_series
from implicit_llm.report.svg import Figure, Panel

NAME = "accuracy-by-hard-fraction"
MANY_SHARES = 3


def accuracy_by_hard_fraction(results: Results) -> Figure | None:
    """A panel for each test of models that differ in the share of hard tokens in training; None without any."""
    cells = [cell for cell in results.headline_cells() if cell.first.train_hard_fraction is not None]
    panels, shown, kinds = [], [], []
    for setting in settings_of(cells, results):
        of_setting = [cell for cell in cells if setting_of(cell) == setting]
        for length in sorted({cell.first.length for cell in of_setting}):
            lines = _lines([cell for cell in of_setting if cell.first.length == length])
            if not any(len(line) > 1 for line in lines.values()):
                continue
            shown += [cell for line in lines.values() for cell in line.values()]
            kinds += list(lines)
            panels.append((f"{setting.title} in the test, length {length}", lines))
    if not panels:
        return None
    series = _series(sorted(set(kinds), key=lambda kind: (not kind[0], kind[1] or 0)))
    drawn = tuple(
        Panel(
            title, partial(_draw, lines=lines, series=series), f"{title}: accuracy by share of hard tokens in training"
        )
        for title, lines in panels
    )
    roles = tuple(dict.fromkeys(role for cell in shown for role in cell.roles))
    legend = (*series.values(), CHANCE)
    return Figure(NAME, "Accuracy by the share of hard tokens in training", drawn, legend, roles)


def without_fraction_sweep(results: Results) -> Results:
    """Without the runs of a task that stand for one of many shares of hard tokens; they fill a figure of their own.

    The shares at which an implicit model was evaluated in several modes stay.
    """
    dropped: set[str] = set()
    for task in results.tasks:
        mine = [point for point in results.points if point.task == task]
        if len({point.train_hard_fraction for point in mine}) <= MANY_SHARES:
            continue
        modes: dict[str, set[str]] = {}
        for point in mine:
            modes.setdefault(point.run, set()).add(point.mode)
        kept = {point.train_hard_fraction for point in mine if len(modes[point.run]) > 1}
        dropped |= {point.run for point in mine if kept and point.train_hard_fraction not in kept}
    return replace(results, points=tuple(point for point in results.points if point.run not in dropped))


Kind = tuple[bool, int | None]  # implicit or not, training length


def _lines(cells: Sequence[Cell[Point]]) -> dict[Kind, dict[tuple[float, ...], Cell[Point]]]:
    """By kind of model the cells by share of hard tokens in training; of several runs the most accurate."""
    found: dict[Kind, dict[tuple[float, ...], Cell[Point]]] = {}
    for cell in cells:
        fraction = cell.first.train_hard_fraction
        share = fraction if isinstance(fraction, tuple) else (float(fraction or 0.0),)
        line = found.setdefault((cell.first.is_implicit, cell.first.train_length), {})
        if share not in line or _height(cell) > _height(line[share]):
            line[share] = cell
    return {kind: dict(sorted(line.items(), key=lambda item: max(item[0]))) for kind, line in found.items()}


def _height(cell: Cell[Point]) -> float:
    mean = cell.spread(LAST_TEN).mean
    return float("-inf") if mean is None else mean


def _series(kinds: Sequence[Kind]) -> dict[Kind, Series]:
    counts = {True: 0, False: 0}
    found = {}
    for is_implicit, length in kinds:
        label = f"{'implicit' if is_implicit else 'explicit'}, trained at {length}"
        found[is_implicit, length] = run_series(label, counts[is_implicit], is_implicit=is_implicit)
        counts[is_implicit] += 1
    return found


def _draw(
    axis: Axes, lines: Mapping[Kind, Mapping[tuple[float, ...], Cell[Point]]], series: Mapping[Kind, Series]
) -> None:
    values: list[float] = []
    for kind, line in lines.items():
        style = series[kind]
        present = [(max(share), cell.spread(LAST_TEN)) for share, cell in line.items() if cell.spread(LAST_TEN).values]
        for share, spread in present:
            if len(spread.values) > 1:
                axis.plot([share] * len(spread.values), spread.values, ".", color=style.color, markersize=3, alpha=0.8)
            values += spread.values
        axis.plot([share for share, _ in present], [spread.mean for _, spread in present], **style.line(), zorder=4)  # type: ignore[arg-type]
    cells = [cell for line in lines.values() for cell in line.values()]
    chance = next((cell.first.chance_last10 for cell in cells if cell.first.chance_last10 is not None), None)
    if chance is not None:
        axis.axhline(chance, **CHANCE.line(has_markers=False), linewidth=1.2)
    shares = sorted({max(share) for line in lines.values() for share in line})
    axis.set_xscale("symlog", linthresh=0.02, linscale=0.4)
    axis.xaxis.set_major_locator(FixedLocator(shares))
    axis.xaxis.set_minor_locator(FixedLocator([]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}"))
    axis.set(xlim=(min(0.0, shares[0]) if shares[0] < 0.02 else shares[0] / 1.25, shares[-1] * 1.25))
    axis.set_xlabel("hard tokens in training (%)")
    accuracy_axis(axis, "accuracy, last 10 tokens")
    tell_if_empty(axis, values)
    lost = [cell.first.run for cell in cells if not cell.spread(LAST_TEN).values]
    tell_missing(axis, lost if values else [])
