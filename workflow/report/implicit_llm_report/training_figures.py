"""Figures of training: loss by step, tokens and FLOPs, accuracy, the health of the solver, and the spectral radius."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from implicit_llm_contracts.hints import natural
from implicit_llm_report.axes import accuracy_axis, amount_axis, nice_log_ticks, tell_if_empty
from implicit_llm_report.model_groups import ModelGroup
from implicit_llm_report.style import BAND, MUTED, PAPER, Series, series_of_names
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.training_runs import FLOPS, LANGUAGE_MODEL, LOSS, STEP, TOKENS, Phase, TrainingRun
from implicit_llm_report.word_problems import by_task, task_label

WORD_PROBLEM, CATBABI = "word_problem", "catbabi"  # tasks of training runs
KIND_WORDS = {WORD_PROBLEM: "Word problems", CATBABI: "CatbAbI", LANGUAGE_MODEL: "Text"}
SHORT_BAND, HIDDEN_BAND = 0.25, 0.15  # shares of the axis: a phase's name is set at the right end, or left out
SHOWN_FROM = 0.01  # of the longest run: the fall from the untrained loss would flatten everything after it

# Journal keys, as the training stage names them.
ACCURACY, NUM_ITER, RESIDUAL, SPECTRAL_RADIUS = "accuracy_last10", "num_iter", "residual", "spectral_radius"
CURVES = ((LOSS, "loss"), (ACCURACY, "accuracy, last 10 tokens"))
HEALTH = (
    (NUM_ITER, "Iterations", "solver iterations"),
    (RESIDUAL, "Relative residual", "largest in the batch"),
    ("unconverged_share", "Unconverged", "share of tokens"),
)
LIMITS = {RESIDUAL: ("tol", "tolerance"), NUM_ITER: ("max_iter", "limit")}
WORDS = {TOKENS: "training tokens", FLOPS: "training FLOPs"}


@dataclass(frozen=True)
class Curves:
    """A panel of journals: `key` against `x`, every seed a line; `name` of a run and phase is its label in `series`."""

    runs: Sequence[TrainingRun]
    key: str
    label: str
    series: Mapping[str, Series]
    name: Callable[[TrainingRun, Phase], str]
    decorate: Callable[[Axes, Curves, pd.DataFrame], None]
    x: str = STEP

    @property
    def lines(self) -> dict[tuple[str, str], list[tuple[TrainingRun, Phase]]]:
        """By run and phase its seeds."""
        found: dict[tuple[str, str], list[tuple[TrainingRun, Phase]]] = {}
        for run in self.runs:
            for phase in run.phases:
                found.setdefault((run.run, phase.name), []).append((run, phase))
        return found

    def draw(self, axis: Axes) -> None:
        """Each phase goes on from the one before it; a dot marks where a branch leaves its trunk."""
        shown = [pd.DataFrame(columns=[self.x, self.key], dtype=float)]
        for seeds in reversed(self.lines.values()):  # implicit runs come first and are drawn on top
            series = self.series[self.name(*seeds[0])]
            curves = [curve for run, phase in seeds if len(curve := run.curve(phase, self.key, self.x))]
            if curves:
                self._draw_line(axis, curves, series, has_dot=seeds[0][0].is_branch(seeds[0][1]))
            shown += curves
        axis.set_ylabel(self.label)
        axis.grid(visible=False, axis="x")
        points = pd.concat([curve for curve in shown if len(curve)] or shown)
        tell_if_empty(axis, list(points.index), "not measured" if self.x == STEP else "not recorded")
        if self.x == STEP:
            axis.set(xlim=(0, max(run.end_step for run in self.runs)), xlabel="training step")
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if len(points):
            self.decorate(axis, self, points)

    def _draw_line(self, axis: Axes, curves: Sequence[pd.DataFrame], series: Series, *, has_dot: bool) -> None:
        style = series.line(has_markers=False)
        if self.x != STEP and len(curves) > 1:  # amounts are alike in all seeds: their mean is bold
            for curve in curves:
                axis.plot(curve[self.x], curve[self.key], color=series.color, linewidth=0.6, alpha=0.45)
            curves = [pd.concat(curves).groupby(level=0).mean()]
        for curve in curves:
            axis.plot(curve[self.x], curve[self.key], **style | {"linewidth": 1.5}, zorder=4)
            if self.key == SPECTRAL_RADIUS:
                measured = curve[curve.index >= 0]
                axis.plot(
                    measured[self.x], measured[self.key], **series.line() | {"linestyle": "none", "markersize": 3.5}
                )
            if has_dot:
                dot: dict[str, Any] = {"markeredgecolor": PAPER, "markeredgewidth": 0.7, "markersize": 5.5}
                axis.plot(*curve[[self.x, self.key]].iloc[0], marker=series.marker, color=series.color, **dot, zorder=6)


def _figure(name: str, title: str, panels: Mapping[str, Curves], words: str = "training step") -> Figure | None:
    """None without panels."""
    roles = dict.fromkeys(phase.role for panel in panels.values() for run in panel.runs for phase in run.phases)
    legend = dict.fromkeys(series for panel in panels.values() for series in panel.series.values())
    drawn = tuple(Panel(head, panel.draw, f"{head}: {panel.label} against {words}") for head, panel in panels.items())
    return Figure(name, title, drawn, tuple(legend), tuple(roles)) if panels else None


def training_curves(runs: Sequence[TrainingRun], words: pd.DataFrame, groups: Sequence[ModelGroup]) -> Figure | None:
    """Loss against the global step, phases shaded, and training accuracy of word problems; a row of panels a task."""
    tasks, panels = _by_task(runs, words, groups), {}
    labels = {run: label for mine in tasks.values() for run, label in _labels(mine, groups).items()}
    series = series_of_names((labels[run.run], run.is_implicit) for mine in tasks.values() for run in mine)
    for task, mine in tasks.items():
        is_word_problem = all(run.task in (WORD_PROBLEM, None) for run in mine)
        for key, label in CURVES if is_word_problem else CURVES[:1]:
            title = f"{task}, training" if key == LOSS else f"{task}, training accuracy"
            panels[title] = Curves(mine, key, label, series, lambda run, _: labels[run.run], _decorate_steps)
    return _figure("training-curves", "Training curves", panels)


def _decorate_steps(axis: Axes, curves: Curves, points: pd.DataFrame) -> None:
    implicit = next((run for run in curves.runs if run.is_implicit), None)
    if implicit is not None:
        _shade_phases(axis, implicit, axis.get_xlim()[1])
    if curves.key == ACCURACY:
        accuracy_axis(axis, curves.label)
    elif curves.runs[0].task != LANGUAGE_MODEL:
        axis.set_ylim(bottom=0)


def _shade_phases(axis: Axes, run: TrainingRun, last_step: float) -> None:
    """Bands behind the phases up to the last one, the first band dark, with their names on top where there is room."""
    path = run.path(run.phases[-1])
    ends = [phase.start_step for phase in path[1:]] + [path[-1].end_step]
    for index, (phase, end) in enumerate(zip(path, ends, strict=True)):
        if index % 2 == 0:
            axis.axvspan(phase.start_step, end, color=BAND, linewidth=0, zorder=0)
        share = (end - phase.start_step) / last_step
        if share >= HIDDEN_BAND:
            x, ha = (end, "right") if share < SHORT_BAND else ((phase.start_step + end) / 2, "center")
            place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": ha}
            axis.annotate(phase.label, (x, 1.0), xytext=(0, 2), **place, va="bottom", fontsize=7.5, color=MUTED)


def solver_health(runs: Sequence[TrainingRun]) -> Figure | None:
    """Iterations, residual and share of unconverged tokens of implicit runs along training, a row a kind of task."""
    kinds = _implicit_kinds(runs, [key for key, *_ in HEALTH])
    panels = {
        title if len(kinds) == 1 else f"{title}: {kind}": curves
        for kind, (mine, series) in kinds.items()
        for key, title, label in HEALTH
        for curves in [Curves(mine, key, label, series, lambda run, _: run.run, _decorate_health)]
    }
    return _figure("solver-health", "Solver health along training", panels)


def _implicit_kinds(
    runs: Iterable[TrainingRun], keys: Sequence[str]
) -> dict[str, tuple[list[TrainingRun], dict[str, Series]]]:
    """By kind of task the implicit runs and the series of all; kinds in which a key was measured, or else all."""
    implicit = [run for run in runs if run.is_implicit]
    measured = {run.task for run in implicit for phase in run.phases for key in keys if len(phase.series(key))}
    kinds: dict[str, list[TrainingRun]] = {}
    for run in (run for run in implicit if run.task in measured or not measured):
        kinds.setdefault(KIND_WORDS.get(run.task or WORD_PROBLEM, run.task or ""), []).append(run)
    series = series_of_names((run.run, True) for mine in kinds.values() for run in mine)
    return {kind: (mine, series) for kind, mine in kinds.items()}


def _decorate_health(axis: Axes, curves: Curves, points: pd.DataFrame) -> None:
    """The tolerance or the iteration limit, where all runs have the same."""
    name, words = LIMITS.get(curves.key, ("", ""))
    solvers = [phase.solver for run in curves.runs for phase in run.phases if phase.solver]
    limits = {solver.get(name) for solver in solvers if solver.get("mode") != "unrolled"}
    if len(limits) == 1 and (limit := limits.pop()) is not None:
        axis.axhline(limit, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0.5)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (3, 3), "textcoords": "offset points"}
        axis.annotate(f"{words} {limit:g}", (0, limit), **place, fontsize=7.5, color=MUTED)
    if curves.key == RESIDUAL:
        axis.set_yscale("log")
        axis.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
    else:
        axis.set_ylim(bottom=0)


def spectral_radius_along_training(runs: Sequence[TrainingRun]) -> Figure | None:
    """One panel a kind of task; below 1 the iteration contracts."""
    panels = {
        kind: Curves(
            mine, SPECTRAL_RADIUS, "spectral radius of ∂f/∂z", series, lambda run, _: run.run, _decorate_radius
        )
        for kind, (mine, series) in _implicit_kinds(runs, [SPECTRAL_RADIUS]).items()
    }
    return _figure("spectral-radius", "Spectral radius of ∂f/∂z along training", panels)


def _decorate_radius(axis: Axes, curves: Curves, points: pd.DataFrame) -> None:
    axis.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0.5)
    axis.set_ylim(0, max(1.1, 1.08 * points[SPECTRAL_RADIUS].max()))


def loss_by(amount: str, runs: Sequence[TrainingRun], groups: Sequence[ModelGroup]) -> Figure | None:
    """Smoothed loss against `amount` (tokens or FLOPs) of the language models, each phase a line of its own."""
    found = {}
    for group in groups:
        mine = sorted(
            (r for r in runs if r.task == LANGUAGE_MODEL and r.run in group.runs), key=lambda r: group.runs.index(r.run)
        )
        if mine:
            found[group.title] = group, mine
    names = partial(_phase_name, groups=[group for group, _ in found.values()], runs=runs)
    series = series_of_names(
        (names(run, p), run.is_implicit) for _, mine in found.values() for run in mine for p in run.phases
    )
    panels = {
        title: Curves(mine, LOSS, "training loss (nats per token)", series, names, _decorate_amounts, amount)
        for title, (_, mine) in found.items()
    }
    return _figure(f"loss-by-{amount}", f"Training loss by {WORDS[amount]}", panels, WORDS[amount])


def _phase_name(run: TrainingRun, phase: Phase, groups: Sequence[ModelGroup], runs: Sequence[TrainingRun]) -> str:
    group = next(group for group in groups if run.run in group.runs)
    phases = {other.name: other.short_label for one in runs if one.run == run.run for other in one.phases}
    return group.name(run.run, phase.name, phase.short_label, phases, is_implicit=run.is_implicit)


def _decorate_amounts(axis: Axes, curves: Curves, points: pd.DataFrame) -> None:
    last = points[curves.x].max()
    first = max(points[curves.x].min(), SHOWN_FROM * last)
    axis.set_xscale("log")
    axis.set(xlim=(first / 1.1, last * 1.15), xlabel=WORDS[curves.x])
    amount_axis(axis.xaxis, first, last, is_power=curves.x == FLOPS)
    nice_log_ticks(axis, points[points[curves.x] >= first][LOSS])


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


def _labels(runs: Sequence[TrainingRun], groups: Sequence[ModelGroup]) -> dict[str, str]:
    """What the runs of a task are called: the only one of its kind by its kind."""
    group = next((group for group in groups if runs[0].run in group.runs), None)
    if group is not None:
        return {run.run: group.run_name(run.run, is_implicit=run.is_implicit) for run in runs}
    kinds = {run.run: "implicit" if run.is_implicit else "explicit" for run in runs}
    return {run: kind if list(kinds.values()).count(kind) == 1 else run for run, kind in kinds.items()}
