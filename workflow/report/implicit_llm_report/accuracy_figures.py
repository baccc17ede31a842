"""Figures of accuracy: by length, by position, by share of hard tokens, and against the work it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from implicit_llm_report.axes import length_axis, mark_training, tell_if_empty, tell_missing
from implicit_llm_report.published import PublishedNumber
from implicit_llm_report.results import COST, LAST_TEN, Cell, Point, Results, Task, hard_label, mode_rank
from implicit_llm_report.style import INK, MUTED, Series, mode_series, run_series, series_of_names
from implicit_llm_report.svg import Figure, Panel

CHANCE = Series("chance (best constant answer)", MUTED, "", (1, 2))
PUBLISHED = Series("published or reference number, same mode", INK, "*", has_line=False)
ACCURACY_LIMITS = (-0.03, 1.05)
MAX_POSITIONS = 512
MOST_NAMED = 4  # runs of a panel whose best seeds are named


@dataclass(frozen=True)
class Setting:
    """What one panel of accuracies shares: the task and the share of hard tokens in the test."""

    task: Task
    hard_fractions: tuple[float, ...]

    @property
    def title(self) -> str:
        return f"{self.task.label}, {hard_label(self.hard_fractions)}"


def settings_of(cells: Iterable[Cell], results: Results) -> list[Setting]:
    """The panels that `cells` fill: the largest group first, then by share of hard tokens."""
    found = {Setting(cell.first.task, cell.first.hard_fractions) for cell in cells}
    return sorted(found, key=lambda setting: (results.tasks.index(setting.task), setting.hard_fractions))


def accuracy_by_length(results: Results, published: Sequence[PublishedNumber] = ()) -> Figure | None:
    """Last-ten accuracy against test length, implicit against explicit. Source: paper, Fig. 1 right and Fig. 3."""
    cells = list(results.headline_cells())
    if not cells:
        return None
    series = _series_of_runs(results)
    panels, known = [], []
    for setting in settings_of(cells, results):
        mine = [cell for cell in cells if setting_of(cell) == setting]
        beside = [n for n in published if n.metric == LAST_TEN and any(n.is_beside(cell.first) for cell in mine)]
        known += beside
        panels.append(Panel(setting.title, partial(_draw_lengths, cells=mine, known=beside, series=series)))
    legend = [*dict.fromkeys(series.values()), CHANCE, *([PUBLISHED] if known else [])]
    return Figure("accuracy-by-length", "Accuracy by sequence length", tuple(panels), tuple(legend), _roles(cells))


def accuracy_by_position(results: Results) -> Figure | None:
    """Accuracy at each position of the longest test sequences, in every mode."""
    panels, shown = [], []
    for setting in settings_of(results.cells, results):
        cells = [cell for cell in results.cells if setting_of(cell) == setting]
        longest = max(cell.first.length for cell in cells)
        mine = _one_run_or_headlines([cell for cell in cells if cell.first.length == longest], results)
        title = f"{setting.title}, length {longest}"
        panels.append(Panel(title, partial(_draw_positions, cells=mine)))
        shown += mine
    if not panels:
        return None
    title = "Accuracy at each position of the longest sequences"
    return Figure("accuracy-by-position", title, tuple(panels), (*_legend_of_modes(shown), CHANCE), _roles(shown))


def accuracy_by_mode(results: Results) -> Figure | None:
    """Last-ten accuracy against f-evaluations a token: one line a mode, one point a test length."""
    if not any(point.is_implicit for point in results.points):
        return None
    panels, shown = [], []
    for setting in settings_of(results.cells, results):
        of_setting = [cell for cell in results.cells if setting_of(cell) == setting]
        mine = _best_run(of_setting, results) + [cell for cell in of_setting if not cell.first.is_implicit]
        panels.append(Panel(setting.title, partial(_draw_modes, cells=mine)))
        shown += mine
    title = "Accuracy and work by evaluation mode"
    return Figure("accuracy-by-mode", title, tuple(panels), _legend_of_modes(shown), _roles(shown))


def _draw_lengths(axis: Axes, cells: list[Cell], known: list[PublishedNumber], series: dict[str, Series]) -> None:
    lengths = sorted({cell.first.length for cell in cells} | {number.test.length for number in known})
    mark_training(axis, (cell.first.train_length for cell in cells), (lengths[0], lengths[-1]), is_log=True)
    chance = {cell.first.length: cell.first.chance_last10 for cell in cells if cell.first.chance_last10 is not None}
    axis.plot(list(chance), list(chance.values()), **CHANCE.line(has_markers=False), linewidth=1.2)
    runs = list(dict.fromkeys(cell.first.run for cell in cells))
    for run in runs:
        mine = [cell for cell in cells if cell.first.run == run]
        _draw_spread(axis, mine, series[run])
        if len(runs) <= MOST_NAMED:
            _name_best(axis, mine, series[run])
    for number in known:
        axis.plot(number.test.length, number.value, **PUBLISHED.line(), zorder=6, clip_on=False)
    length_axis(axis, lengths)
    accuracy_axis(axis, "accuracy, last 10 tokens")
    tell_missing(
        axis, [f"{cell.first.run} at {cell.first.length}" for cell in cells if not cell.spread(LAST_TEN).values]
    )


def _draw_spread(axis: Axes, cells: list[Cell], series: Series) -> None:
    """The mean over seeds as a line, every seed as a thin one with points."""
    present = [(cell.first.length, cell.spread(LAST_TEN)) for cell in cells if cell.spread(LAST_TEN).values]
    lengths = [length for length, _ in present]
    if any(len(spread.values) > 1 for _, spread in present):
        for seed in sorted({point.seed or 0 for cell in cells for point in cell.points}):
            points = [point for cell in cells for point in cell.points if (point.seed or 0) == seed]
            known = [(point.length, point.accuracy_last10) for point in points if point.accuracy_last10 is not None]
            style = {"color": series.color, "linewidth": 0.6, "markersize": 2.5, "alpha": 0.6}
            axis.plot([length for length, _ in known], [value for _, value in known], ".-", **style)  # type: ignore[arg-type]
    axis.plot(lengths, [spread.mean for _, spread in present], **series.line(), zorder=4, clip_on=False)  # type: ignore[arg-type]


def _name_best(axis: Axes, cells: list[Cell], series: Series) -> None:
    """The best of several seeds, at the longest test, where seeds part the most."""
    longest = max(cells, key=lambda cell: cell.first.length)
    best = longest.best(LAST_TEN)
    if best is None:
        return
    place: dict[str, Any] = {"xytext": (-3, 4), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    axis.annotate(
        f"best: seed {best.seed}", (longest.first.length, best.value), **place, fontsize=6.5, color=series.color
    )


def _draw_positions(axis: Axes, cells: list[Cell]) -> None:
    length = cells[0].first.length
    mark_training(axis, (cell.first.train_length for cell in cells), (1, length), is_log=False)
    chance = next((cell.first.chance_per_position for cell in cells if cell.first.chance_per_position), None)
    if chance is not None:
        axis.plot(*_by_position([chance]), **CHANCE.line(has_markers=False), linewidth=1.2)
    drawn = []
    for index, cell in enumerate(cells):
        curves = [point.accuracy_per_position for point in cell.points if point.accuracy_per_position is not None]
        if curves:
            drawn.append(cell)
            # The headline mode comes first: a wide line, so that modes that agree with it show on top of it.
            line = mode_series(cell.first.mode).line(has_markers=False) | {"linewidth": 2.8 if index == 0 else 1.4}
            axis.plot(*_by_position(curves), **line)
    axis.set(xlim=(1, max(2, length)), xlabel="position in the sequence (token)")
    accuracy_axis(axis, "accuracy at this position")
    tell_if_empty(axis, drawn)


def _by_position(curves: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Positions and the mean of the curves, over equal bins where there are more positions than can be seen."""
    mean = np.mean(curves, axis=0)
    parts = np.array_split(np.column_stack((np.arange(1, len(mean) + 1), mean)), min(len(mean), MAX_POSITIONS))
    return tuple(np.array([part.mean(axis=0) for part in parts]).T)


def _draw_modes(axis: Axes, cells: list[Cell]) -> None:
    lengths = sorted({cell.first.length for cell in cells})
    cells = [cell for cell in cells if cell.spread(LAST_TEN).values and cell.spread(COST).values]
    for key in dict.fromkeys((cell.first.run, cell.first.mode) for cell in cells):
        mine = [cell for cell in cells if (cell.first.run, cell.first.mode) == key]
        _draw_mode(axis, mine, lengths)
    highest = max((cell.spread(COST).mean or 1.0 for cell in cells), default=1.0)
    right = max(20.0, highest * 1.6)
    axis.set_xscale("log")
    axis.set(xlim=(0.8, right), xlabel="f-evaluations per token (fewer is cheaper)")
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if tick <= right]
    axis.xaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    accuracy_axis(axis, "accuracy, last 10 tokens")
    tell_if_empty(axis, cells)


def _draw_mode(axis: Axes, cells: list[Cell], lengths: list[int]) -> None:
    """A line through the test lengths; the longer the test, the larger the point, the smaller ones in front."""
    series = mode_series(cells[0].first.mode)
    points = [(cell.spread(COST).mean, cell.spread(LAST_TEN).mean) for cell in cells]
    line = series.line(has_markers=False)
    axis.plot([cost for cost, _ in points], [accuracy for _, accuracy in points], **line, linewidth=1.3)  # type: ignore[arg-type]
    for cell, (cost, accuracy) in zip(cells, points, strict=True):
        rank = lengths.index(cell.first.length)
        marker = series.line() | {"linestyle": "none", "markersize": 4 + 2.6 * rank, "zorder": 5 - rank / 10}
        axis.plot(cost, accuracy, **marker, clip_on=False)  # type: ignore[arg-type]


def accuracy_axis(axis: Axes, label: str) -> None:
    axis.set(ylim=ACCURACY_LIMITS, ylabel=label)
    axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axis.grid(visible=False, axis="x")


def setting_of(cell: Cell) -> Setting:
    return Setting(cell.first.task, cell.first.hard_fractions)


def _series_of_runs(results: Results) -> dict[str, Series]:
    """The series of each run; runs of one label share it, and the only run of its kind is labelled by its kind."""
    labels: dict[str, tuple[str, bool]] = {}
    for task in results.tasks:
        for is_implicit in (True, False):
            cells = [cell for cell in results.headline_cells() if cell.first.task == task]
            runs = list(dict.fromkeys(cell.first.run for cell in cells if cell.first.is_implicit == is_implicit))
            for run in runs:
                label = ("implicit" if is_implicit else "explicit") if len(runs) == 1 else run
                if len(runs) == 1 and is_implicit:
                    label += f" ({results.headline_of(run)})"
                labels[run] = (label, is_implicit)
    series = series_of_names(labels.values())
    return {run: series[label] for run, (label, _) in labels.items()}


def _one_run_or_headlines(cells: list[Cell], results: Results) -> list[Cell]:
    """All modes of the implicit run when there is one; the headline modes when there are several to tell apart."""
    runs = {cell.first.run for cell in cells if cell.first.is_implicit}
    if len(runs) <= 1:
        return sorted(cells, key=lambda cell: cell.first.mode != results.headline_of(cell.first.run))
    return [cell for cell in cells if cell.first.mode == results.headline_of(cell.first.run)]


def _best_run(cells: list[Cell], results: Results) -> list[Cell]:
    """The cells of the implicit run with the best headline accuracy on the longest sequences."""
    implicit = [cell for cell in cells if cell.first.is_implicit]
    if not implicit:
        return []
    headline = [cell for cell in implicit if cell.first.mode == results.headline_of(cell.first.run)] or implicit
    best = max(headline, key=lambda cell: (cell.first.length, cell.spread(LAST_TEN).mean or 0.0))
    return [cell for cell in implicit if cell.first.run == best.first.run]


def _legend_of_modes(cells: list[Cell]) -> tuple[Series, ...]:
    """Explicit last, as in the tables."""
    modes = sorted({cell.first.mode for cell in cells}, key=lambda mode: (mode == "parallel", mode_rank(mode)))
    return tuple(mode_series(mode) for mode in modes)


def _roles(cells: Iterable[Cell]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(role for cell in cells for role in cell.roles))


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
