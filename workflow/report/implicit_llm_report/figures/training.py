"""Figures of training: loss by step, tokens and FLOPs, accuracy, the health of the solver, and the spectral radius."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from implicit_llm_contracts.hints import natural
from implicit_llm_report.figures.axes import amount_axis
from implicit_llm_report.figures.charts import Chart, Line, chart_figure
from implicit_llm_report.figures.style import BAND, MUTED
from implicit_llm_report.figures.svg import Figure
from implicit_llm_report.figures.word_problems import TASK, of_lengths
from implicit_llm_report.inputs.frame import Spread, groups
from implicit_llm_report.inputs.given import Given
from implicit_llm_report.inputs.training_runs import FLOPS, LANGUAGE_MODEL, LOSS, STEP, TOKENS, Phase, TrainingRun
from implicit_llm_report.registry import Entry
from implicit_llm_report.tables import title_of

WORD_PROBLEM, CATBABI = "word_problem", "catbabi"  # tasks of training runs
KIND_WORDS = {WORD_PROBLEM: "Word problems", CATBABI: "CatbAbI", LANGUAGE_MODEL: "Text"}
SHORT_BAND, HIDDEN_BAND = 0.25, 0.15  # shares of the axis: a phase's name is set at the right end, or left out
SHOWN_FROM = 0.01  # of the longest run: the fall from the untrained loss would flatten everything after it

# Journal keys, as the training stage names them.
ACCURACY, NUM_ITER, RESIDUAL, SPECTRAL_RADIUS = "accuracy_last10", "num_iter", "residual", "spectral_radius"
CURVES = {LOSS: "loss", ACCURACY: "accuracy, last 10 tokens"}
HEALTH = {
    NUM_ITER: "solver iterations",
    RESIDUAL: "largest relative residual",
    "unconverged_share": "unconverged tokens",
}
LIMITS = {RESIDUAL: ("tol", "tolerance"), NUM_ITER: ("max_iter", "limit")}
WORDS = {STEP: "training step", TOKENS: "training tokens", FLOPS: "training FLOPs"}


def training_curves(given: Given) -> Figure | None:
    """Loss against the global step, phases shaded, and training accuracy of word problems; a row of panels a task.

    Leaves out runs that only show how many layers a length needs.
    """
    left_out = set(given.words["run"]) - set(of_lengths(given.words)["run"])
    runs = [run for run in given.inputs.training if run.run not in left_out] or given.inputs.training
    charts = []
    for task, mine in _by_task(given, runs).items():
        is_word_problem = all(run.task in (WORD_PROBLEM, None) for run in mine)
        for key in CURVES if is_word_problem else (LOSS,):
            title = f"{task}, training" if key == LOSS else f"{task}, training accuracy"
            charts.append(_chart(title, mine, key, _decorate_steps, CURVES[key], is_accuracy=key == ACCURACY))
    return chart_figure("training-curves", "Training curves", charts)


def _by_task(given: Given, runs: Sequence[TrainingRun]) -> dict[str, list[TrainingRun]]:
    """Runs under the label of their task, implicit first; a word problem is known from its evaluation."""
    tasks = groups(given.words, TASK)
    labels = {run: title_of(task, Entry(by=tuple(TASK))) for task in tasks for run in task.rows["run"].unique()}
    labels |= given.models | {run.run: KIND_WORDS[CATBABI] for run in runs if run.task == CATBABI}
    found: dict[str, list[TrainingRun]] = {}
    for run in sorted(runs, key=lambda run: (not run.is_implicit, natural(run.run), run.seed or 0)):
        found.setdefault(labels.get(run.run, "not evaluated"), []).append(run)
    return dict(sorted(found.items()))


def _chart(
    title: str,
    runs: Sequence[TrainingRun],
    key: str,
    decorate: Callable[..., None],
    label: str,
    x: str = STEP,
    **look: Any,
) -> Chart:
    """A line for each end of a curriculum, from the first step on."""
    seeds: dict[tuple[str, str], list[tuple[TrainingRun, Phase]]] = {}
    for run in runs:
        for phase in run.last_phases:
            seeds.setdefault((run.run, phase.name), []).append((run, phase))
    lines = [_line(mine, key, x) for mine in seeds.values()]
    roles = tuple(phase.role for run in runs for phase in run.phases)
    return Chart(title, lines, partial(decorate, runs=runs, lines=lines), label, roles=roles, **look)


def _line(seeds: Sequence[tuple[TrainingRun, Phase]], key: str, x: str) -> Line:
    (run, phase), *_ = seeds
    curves = pd.concat([one.along(last, key, x) for one, last in seeds])
    bins = curves.groupby(level=[0, 1], sort=False)
    points = list(zip(bins[x].mean(), map(Spread, bins[key].agg(tuple)), strict=True))
    names = [run.run, phase.label] if len(run.last_phases) > 1 else [run.run]
    kind = "implicit" if run.is_implicit else "explicit"
    width = None if key == SPECTRAL_RADIUS else 1.5
    return Line(" ".join(names), run.is_implicit, points, width=width, short=" ".join([kind, *names[1:]]))


def _decorate_steps(axis: Axes, runs: Sequence[TrainingRun], lines: Sequence[Line]) -> None:
    axis.set(xlim=(0, max(run.end_step for run in runs)), xlabel=WORDS[STEP])
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    implicit = next((run for run in runs if run.is_implicit), None)
    if implicit is not None:
        _shade_phases(axis, implicit, axis.get_xlim()[1])


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


def solver_health(given: Given) -> Figure | None:
    """Iterations, residual and share of unconverged tokens of implicit runs along training, a row a kind of task."""
    charts = [
        _chart(kind, mine, key, _decorate_steps, label, is_accuracy=key == "unconverged_share", level=_limit(key, mine))
        for kind, mine in _implicit_kinds(given.inputs.training, HEALTH).items()
        for key, label in HEALTH.items()
    ]
    return chart_figure("solver-health", "Solver health along training", charts)


def _implicit_kinds(runs: Iterable[TrainingRun], keys: Iterable[str]) -> dict[str, list[TrainingRun]]:
    """By kind of task the implicit runs; kinds in which a key was measured, or else all."""
    implicit, wanted = [run for run in runs if run.is_implicit], tuple(keys)
    measured = {run.task for run in implicit for phase in run.phases for key in wanted if len(phase.series(key))}
    kinds: dict[str, list[TrainingRun]] = {}
    for run in (run for run in implicit if run.task in measured or not measured):
        kinds.setdefault(KIND_WORDS.get(run.task or WORD_PROBLEM, run.task or ""), []).append(run)
    return kinds


def _limit(key: str, runs: Sequence[TrainingRun]) -> tuple[str, float] | None:
    """The tolerance or the iteration limit, where all runs have the same."""
    name, words = LIMITS.get(key, ("", ""))
    solvers = [phase.solver for run in runs for phase in run.phases if phase.solver]
    limits = {value for one in solvers if one.get("mode") != "unrolled" and (value := one.get(name)) is not None}
    return (words, limits.pop()) if len(limits) == 1 else None


def spectral_radius(given: Given) -> Figure | None:
    """One panel a kind of task; below 1 the iteration contracts."""
    kinds = _implicit_kinds(given.inputs.training, [SPECTRAL_RADIUS])
    label = "spectral radius of ∂f/∂z"
    look: dict[str, Any] = {"is_accuracy": False, "level": ("contracts below", 1.0)}
    charts = [_chart(kind, mine, SPECTRAL_RADIUS, _decorate_steps, label, **look) for kind, mine in kinds.items()]
    return chart_figure("spectral-radius", "Spectral radius of ∂f/∂z along training", charts)


def loss_by_tokens(given: Given) -> Figure | None:
    return _loss_by(TOKENS, given)


def loss_by_flops(given: Given) -> Figure | None:
    return _loss_by(FLOPS, given)


def _loss_by(amount: str, given: Given) -> Figure | None:
    """Smoothed loss against `amount` (tokens or FLOPs) of the language models, a panel a family and size."""
    runs = [run for run in given.inputs.training if run.task == LANGUAGE_MODEL]
    label = "training loss (nats per token)"
    charts = [
        _chart(title, mine, LOSS, partial(_decorate_amounts, x=amount), label, amount, is_accuracy=False)
        for title, mine in _by_task(given, runs).items()
    ]
    return chart_figure(f"loss-by-{amount}", f"Training loss by {WORDS[amount]}", charts)


def _decorate_amounts(axis: Axes, runs: Sequence[TrainingRun], lines: Sequence[Line], x: str) -> None:
    amounts = [place for line in lines for place, _ in line.points] or [1.0]
    last = max(amounts)
    first = max(min(amounts), SHOWN_FROM * last)
    axis.set_xscale("log")
    axis.set(xlim=(first / 1.1, last * 1.15), xlabel=WORDS[x])
    amount_axis(axis.xaxis, first, last, is_power=x == FLOPS)
