"""Figures of training: loss and accuracy against step, and the health of the solver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from implicit_llm.report.inputs import TrainingRun
from implicit_llm.report.results import Results
from implicit_llm.report.style import BAND, MUTED, Series, run_series
from implicit_llm.report.svg import Figure, Panel

# Journal keys, as the training stage names them.
LOSS, ACCURACY = "loss", "accuracy_last10"
NUM_ITER, RESIDUAL, UNCONVERGED = "num_iter", "residual", "unconverged_share"

CURVES = ((LOSS, "loss"), (ACCURACY, "accuracy, last 10 tokens"))
HEALTH = (
    (NUM_ITER, "Solver iterations", "iterations"),
    (RESIDUAL, "Relative residual", "largest in the batch"),
    (UNCONVERGED, "Unconverged tokens", "share of tokens"),
)

MAX_POINTS = 120  # more points than this are averaged in equal bins: beyond, a line of 500 pixels shows noise only


def training_curves(runs: Sequence[TrainingRun], results: Results) -> Figure | None:
    """Loss and training accuracy against the global step, phases shaded; one pair of panels a task."""
    panels, legend, roles = [], [], []
    for label, mine in _by_task(runs, results).items():
        series = _series(mine)
        panels += [_curve_panel(label, mine, series, key, name) for key, name in CURVES]
        legend += [series[run.run] for run in mine]
        roles += [phase.role for run in mine for phase in run.phases]
    if not panels:
        return None
    return Figure("training-curves", "Training curves", tuple(panels), tuple(dict.fromkeys(legend)), tuple(roles))


def solver_health(runs: Sequence[TrainingRun]) -> Figure | None:
    """Iterations, residual and share of unconverged tokens of the implicit runs along training."""
    implicit = [run for run in runs if run.is_implicit]
    if not implicit:
        return None
    names = dict.fromkeys(run.run for run in implicit)
    series = {name: run_series(name, index, is_implicit=True) for index, name in enumerate(names)}
    panels = tuple(
        Panel(title, partial(_draw_health, runs=implicit, series=series, key=key, label=label))
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
        _shade_phases(axis, implicit)
    for run in reversed(runs):  # implicit runs come first and are drawn on top
        steps, values = _binned(*_finite(*run.series(key)))
        axis.plot(steps, values, **series[run.run].line(has_markers=False), linewidth=1.5)
    last = max((phase.end_step for run in runs for phase in run.phases), default=1)
    axis.set(xlim=(0, last), xlabel="training step", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.grid(visible=False, axis="x")
    if key == LOSS:
        axis.set_ylim(bottom=0)
    else:
        axis.set_ylim(-0.03, 1.05)
        axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))


def _shade_phases(axis: Axes, run: TrainingRun) -> None:
    """Bands behind the phases, the first one dark, with their short names at the top."""
    for index, phase in enumerate(run.phases):
        if index % 2 == 0:
            axis.axvspan(phase.start_step, phase.end_step, color=BAND, linewidth=0, zorder=0)
        axis.annotate(
            phase.label,
            ((phase.start_step + phase.end_step) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=MUTED,
        )


def _draw_health(axis: Axes, runs: Sequence[TrainingRun], series: Mapping[str, Series], key: str, label: str) -> None:
    curves = [(run, *_binned(*_finite(*run.series(key)))) for run in runs]
    for run, steps, values in curves:
        axis.plot(steps, values, **series[run.run].line(has_markers=False), linewidth=1.5)
    axis.set(xlabel="training step", ylabel=label)
    axis.set_xlim(0, max(phase.end_step for run in runs for phase in run.phases))
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.grid(visible=False, axis="x")
    if not any(len(steps) for _, steps, _ in curves):
        axis.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=9, color=MUTED)
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


def _by_task(runs: Sequence[TrainingRun], results: Results) -> dict[str, list[TrainingRun]]:
    """Runs under the label of their task, implicit first; the task of a run is known from its evaluation."""
    task_of = {point.run: point.task for point in results.points}
    grouped: dict[str, list[TrainingRun]] = {task.label: [] for task in results.tasks}
    for run in sorted(runs, key=lambda run: (not run.is_implicit, run.run, run.seed or 0)):
        grouped.setdefault(task_of[run.run].label if run.run in task_of else "not evaluated", []).append(run)
    return {label: mine for label, mine in grouped.items() if mine}


def _series(runs: Sequence[TrainingRun]) -> dict[str, Series]:
    series: dict[str, Series] = {}
    for is_implicit in (True, False):
        names = list(dict.fromkeys(run.run for run in runs if run.is_implicit == is_implicit))
        for index, name in enumerate(names):
            label = ("implicit" if is_implicit else "explicit") if len(names) == 1 else name
            series[name] = run_series(label, index, is_implicit=is_implicit)
    return series


def _finite(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    pairs = [(step, value) for step, value in zip(steps, values, strict=True) if np.isfinite(value)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _binned(steps: Sequence[int], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Means over equal bins, at most MAX_POINTS of them."""
    bins = min(MAX_POINTS, len(steps))
    if bins == 0:
        return np.array([]), np.array([])
    parts = np.array_split(np.column_stack([steps, values]), bins)
    means = np.array([part.mean(axis=0) for part in parts])
    return means[:, 0], means[:, 1]
