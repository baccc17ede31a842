"""Figures of training: loss and accuracy against step, the health of the solver, and the spectral radius."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from implicit_llm_contracts.hints import natural
from implicit_llm_report.axes import tell_if_empty
from implicit_llm_report.model_groups import ModelGroup
from implicit_llm_report.style import BAND, MUTED, Series, run_series
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.training_runs import LANGUAGE_MODEL, LOSS, TrainingRun
from implicit_llm_report.word_problems import by_task, task_label

WORD_PROBLEM, CATBABI = "word_problem", "catbabi"  # tasks of training runs
KIND_WORDS = {WORD_PROBLEM: "word problems", CATBABI: "CatbAbI", LANGUAGE_MODEL: "text"}
SHORT_BAND, HIDDEN_BAND = 0.25, 0.15  # shares of the axis: a phase's name is set at the right end, or left out

# Journal keys, as the training stage names them.
ACCURACY = "accuracy_last10"
NUM_ITER, RESIDUAL, UNCONVERGED = "num_iter", "residual", "unconverged_share"

CURVES = ((LOSS, "loss"), (ACCURACY, "accuracy, last 10 tokens"))
HEALTH = (
    (NUM_ITER, "Iterations", "solver iterations"),
    (RESIDUAL, "Relative residual", "largest in the batch"),
    (UNCONVERGED, "Unconverged", "share of tokens"),
)

MIN_POINTS = 10  # of a short branch
MAX_POINTS = 120  # more points than this are averaged in equal bins: beyond, a line of 500 pixels shows noise only


def training_curves(runs: Sequence[TrainingRun], words: pd.DataFrame, groups: Sequence[ModelGroup]) -> Figure | None:
    """Loss against the global step, phases shaded, and training accuracy of word problems; a row of panels a task."""
    panels, legend, roles = [], [], []
    for label, mine in _by_task(runs, words, groups).items():
        series = _series(mine, groups)
        curves = CURVES if all(run.task in (WORD_PROBLEM, None) for run in mine) else CURVES[:1]
        panels += [_curve_panel(label, mine, series, key, name) for key, name in curves]
        legend += [series[run.run] for run in mine]
        roles += [phase.role for run in mine for phase in run.phases]
    if not panels:
        return None
    return Figure("training-curves", "Training curves", tuple(panels), tuple(dict.fromkeys(legend)), tuple(roles))


def implicit_series(implicit: Sequence[TrainingRun]) -> dict[str, Series]:
    """How the line of each implicit run is drawn, by its name."""
    names = dict.fromkeys(run.run for run in implicit)
    return {name: run_series(name, index, is_implicit=True) for index, name in enumerate(names)}


def by_kind_of_task(runs: Sequence[TrainingRun]) -> dict[str, list[TrainingRun]]:
    """The runs by the words for their task."""
    found: dict[str, list[TrainingRun]] = {}
    for run in runs:
        found.setdefault(KIND_WORDS.get(run.task or WORD_PROBLEM, run.task or ""), []).append(run)
    return found


def solver_health(runs: Sequence[TrainingRun]) -> Figure | None:
    """Iterations, residual and share of unconverged tokens of implicit runs along training, a row a kind of task."""
    implicit = [run for run in runs if run.is_implicit]
    if not implicit:
        return None
    series, by_kind = implicit_series(implicit), by_kind_of_task(implicit)
    panels = tuple(
        Panel(
            title if len(by_kind) == 1 else f"{title}: {kind}",
            partial(_draw_health, runs=mine, series=series, key=key, label=label),
        )
        for kind, mine in by_kind.items()
        for key, title, label in HEALTH
    )
    roles = tuple(phase.role for run in implicit for phase in run.phases)
    return Figure("solver-health", "Solver health along training", panels, tuple(series.values()), roles)


def _curve_panel(label: str, runs: Sequence[TrainingRun], series: Mapping[str, Series], key: str, name: str) -> Panel:
    description = f"{label}: {name} against training step"
    return Panel(
        f"{label}, training", partial(_draw_curves, runs=runs, series=series, key=key, label=name), description
    )


def _draw_curves(axis: Axes, runs: Sequence[TrainingRun], series: Mapping[str, Series], key: str, label: str) -> None:
    implicit = next((run for run in runs if run.is_implicit), None)
    if implicit is not None:
        _shade_phases(axis, implicit, max(run.end_step for run in runs))
    for run in reversed(runs):  # implicit runs come first and are drawn on top
        _draw_chains(axis, run, key, series[run.run])
    last = max((phase.end_step for run in runs for phase in run.phases), default=1)
    axis.set(xlim=(0, last), xlabel="training step", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.grid(visible=False, axis="x")
    if key == LOSS:
        axis.set_ylim(bottom=None if any(run.task == LANGUAGE_MODEL for run in runs) else 0)
    else:
        axis.set_ylim(-0.03, 1.05)
        axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))


def _draw_chains(axis: Axes, run: TrainingRun, key: str, series: Series) -> list[float]:
    """The run's unbroken curve, and its branches, each from a dot at the step where it leaves; returns the values."""
    style = series.line(has_markers=False) | {"linewidth": 1.5}
    drawn: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    shown: list[float] = []
    for chain in run.chains:
        pairs = [pair for phase in chain for pair in phase.series(key)]
        share = (chain[-1].end_step - chain[0].start_step) / run.end_step
        steps, values = _binned(pairs, max(MIN_POINTS, round(share * MAX_POINTS)))
        before = run.before(chain[0])
        if key == LOSS and before is not None and len(steps) and len(drawn[before.name][0]):
            start = chain[0].start_step
            value = np.interp(start, *drawn[before.name])
            steps, values = np.insert(steps, 0, start), np.insert(values, 0, value)
            axis.plot(start, value, marker=".", color=series.color, markersize=6, zorder=5)
        drawn |= {phase.name: (steps, values) for phase in chain}
        axis.plot(steps, values, **style)
        shown += values.tolist()
    return shown


def _shade_phases(axis: Axes, run: TrainingRun, last_step: int) -> None:
    """Bands behind the phases up to the last one, the first band dark, with their names on top where there is room."""
    path = run.path(run.chains[-1][-1])
    ends = [phase.start_step for phase in path[1:]] + [path[-1].end_step]
    for index, (phase, end) in enumerate(zip(path, ends, strict=True)):
        if index % 2 == 0:
            axis.axvspan(phase.start_step, end, color=BAND, linewidth=0, zorder=0)
        share = (end - phase.start_step) / last_step
        if share < HIDDEN_BAND:
            continue
        is_short = share < SHORT_BAND
        axis.annotate(
            phase.label,
            (end if is_short else (phase.start_step + end) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right" if is_short else "center",
            va="bottom",
            fontsize=7.5,
            color=MUTED,
        )


def _draw_health(axis: Axes, runs: Sequence[TrainingRun], series: Mapping[str, Series], key: str, label: str) -> None:
    shown = [value for run in runs for value in _draw_chains(axis, run, key, series[run.run])]
    axis.set(xlabel="training step", ylabel=label)
    axis.set_xlim(0, max(run.end_step for run in runs))
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.grid(visible=False, axis="x")
    tell_if_empty(axis, shown, "not measured")
    if not shown:
        return
    phases = [phase.solver for run in runs for phase in run.phases if phase.solver]
    _mark_limit(axis, key, [solver for solver in phases if solver.get("mode") != "unrolled"])
    if key == RESIDUAL:
        axis.set_yscale("log")
        axis.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axis.set_ylim(bottom=0)


def _mark_limit(axis: Axes, key: str, solvers: Sequence[Mapping]) -> None:
    """The tolerance or the iteration limit, where all runs have the same."""
    name, words = {RESIDUAL: ("tol", "tolerance"), NUM_ITER: ("max_iter", "limit")}.get(key, ("", ""))
    values = {solver.get(name) for solver in solvers}
    if len(values) != 1 or (value := values.pop()) is None:
        return
    axis.axhline(value, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0.5)
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (3, 3), "textcoords": "offset points"}
    axis.annotate(f"{words} {value:g}", (0, value), **place, fontsize=7.5, color=MUTED)


def _by_task(
    runs: Sequence[TrainingRun], words: pd.DataFrame, groups: Sequence[ModelGroup]
) -> dict[str, list[TrainingRun]]:
    """Runs under the label of their task, implicit first; a word problem is known from its evaluation."""
    tasks = by_task(words)
    labels = {run: task_label(task) for task in tasks for run in task.rows["run"].unique()}
    labels |= {run: group.title for group in groups for run in group.runs}
    labels |= {run.run: "CatbAbI" for run in runs if run.task == CATBABI}
    grouped: dict[str, list[TrainingRun]] = {task_label(task): [] for task in tasks}
    for run in sorted(runs, key=lambda run: (not run.is_implicit, natural(run.run), run.seed or 0)):
        grouped.setdefault(labels.get(run.run, "not evaluated"), []).append(run)
    return {label: mine for label, mine in grouped.items() if mine}


def _series(runs: Sequence[TrainingRun], groups: Sequence[ModelGroup]) -> dict[str, Series]:
    series: dict[str, Series] = {}
    for is_implicit in (True, False):
        names = list(dict.fromkeys(run.run for run in runs if run.is_implicit == is_implicit))
        for index, name in enumerate(names):
            group = next((group for group in groups if name in group.runs), None)
            if group is not None:
                label = group.run_name(name, is_implicit=is_implicit)
            else:
                label = ("implicit" if is_implicit else "explicit") if len(names) == 1 else name
            series[name] = run_series(label, index, is_implicit=is_implicit)
    return series


def _binned(pairs: Sequence[tuple[int, float]], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over equal bins, at most `most` of them: steps and values."""
    bins = min(most, len(pairs))
    if bins == 0:
        return np.array([]), np.array([])
    means = np.array([part.mean(axis=0) for part in np.array_split(np.array(pairs, dtype=float), bins)])
    return means[:, 0], means[:, 1]


SPECTRAL_RADIUS = "spectral_radius"  # journal key


def spectral_radius_along_training(runs: Sequence[TrainingRun]) -> Figure | None:
    """One panel a kind of task, one line a run and unbroken chain of phases; below 1 the iteration contracts."""
    implicit = [run for run in runs if run.is_implicit]
    if not implicit:
        return None
    series, by_kind = implicit_series(implicit), by_kind_of_task(implicit)
    panels = tuple(
        Panel(
            kind.capitalize() if kind.islower() else kind,
            partial(_draw, runs=mine, series=series),
            f"{kind}: spectral radius of df/dz against training step",
        )
        for kind, mine in by_kind.items()
    )
    roles = tuple(phase.role for run in implicit for phase in run.phases)
    title = "Spectral radius of ∂f/∂z along training"
    return Figure("spectral-radius", title, panels, tuple(series.values()), roles)


def _draw(axis: Axes, runs: Sequence[TrainingRun], series: Mapping[str, Series]) -> None:
    """Every seed is a line: there are ten points in each."""
    shown = []
    for run in runs:
        for chain in run.chains:
            pairs = [pair for phase in chain for pair in phase.series(SPECTRAL_RADIUS)]
            style = series[run.run].line() | {"markersize": 3.5, "linewidth": 1.2}
            axis.plot([step for step, _ in pairs], [value for _, value in pairs], **style)
            shown += pairs
    axis.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0.5)
    axis.set(xlabel="training step", ylabel="spectral radius of ∂f/∂z", xlim=(0, max(run.end_step for run in runs)))
    axis.set_ylim(0, max([1.1, *(1.08 * value for _, value in shown)]))
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.grid(visible=False, axis="x")
    tell_if_empty(axis, shown, "not measured")
