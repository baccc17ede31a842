"""Draw figures of training: loss by step, tokens and FLOPs, accuracy, solver health, and the spectral radius."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_contracts.config.tasks import CATBABI, LANGUAGE_MODEL, WORD_PROBLEM
from implicit_llm_contracts.hints import natural
from implicit_llm_contracts.runs.metrics import METRICS
from implicit_llm_report.figures.charts import Chart, Line, chart_figure, log_ticks
from implicit_llm_report.figures.svg import Figure
from implicit_llm_report.figures.word_problems import TASK, of_lengths
from implicit_llm_report.inputs.frame import LAST_TEN, Spread, groups, kind_of, short_count
from implicit_llm_report.inputs.sources import Given
from implicit_llm_report.inputs.training_runs import FLOPS, LOSS, STEP, TOKENS, Phase, TrainingRun, grouped
from implicit_llm_report.tables import title_of

KIND_WORDS = {WORD_PROBLEM: "Word problems", CATBABI: "CatbAbI", LANGUAGE_MODEL: "Text"}
SHOWN_FROM = 0.01  # share of the longest run; an earlier start would show the first drop and flatten the rest

# Journal keys of the training stage.
SPECTRAL_RADIUS = "spectral_radius"
HEALTH = {key: metric.axis for key, metric in METRICS.items() if metric.axis}
LIMITS = {"residual": ("tol", "tolerance"), "num_iter": ("max_iter", "limit")}
WORDS = {STEP: "training step", TOKENS: "training tokens", FLOPS: "training FLOPs"}
LOSS_WORDS = "training loss (nats per token)"


def training_curves(given: Given) -> Figure | None:
    """Draw loss against the global step (for text against tokens), and training accuracy of word problems.

    The runs that `of_lengths` removes, which were tested only at their training length, are left out.
    """
    left_out = set(given.words["run"]) - set(of_lengths(given.words)["run"])
    charts = []
    for title, runs in _by_task(given, left_out).items():
        amount = TOKENS if runs[0].task == LANGUAGE_MODEL else STEP
        charts.append(_chart(f"{title}, training", runs, LOSS, LOSS_WORDS, amount))
        if runs[0].task in (WORD_PROBLEM, None):
            charts.append(
                _chart(f"{title}, training accuracy", runs, LAST_TEN, "accuracy, last 10 tokens", is_accuracy=True)
            )
    return chart_figure("training-curves", "Training curves", charts)


def loss_by_flops(given: Given) -> Figure | None:
    charts = [
        _chart(title, runs, LOSS, LOSS_WORDS, FLOPS)
        for title, runs in _by_task(given).items()
        if runs[0].task == LANGUAGE_MODEL
    ]
    return chart_figure("loss-by-flops", "Training loss by training FLOPs", charts)


def _by_task(given: Given, left_out: Iterable[str] = ()) -> dict[str, list[TrainingRun]]:
    """Return the evaluated runs except `left_out`, or all runs if none would remain, by panel title.

    Implicit runs come first in each panel.
    """
    frame, training = given.measured, given.training
    labels = {run: models for run, models in zip(frame["run"], frame["models"], strict=True) if models}
    for task in groups(given.words, TASK):
        labels |= dict.fromkeys(task.rows["run"], title_of(task, TASK))
    shown = set(frame["run"]) - set(left_out)
    runs = sorted(training, key=lambda run: (not run.is_implicit, natural(run.run), run.seed or 0))
    evaluated = [run for run in runs if run.run in shown] or runs
    return dict(sorted(grouped(evaluated, lambda run: labels.get(run.run, _kind(run))).items()))


def _kind(run: TrainingRun) -> str:
    return KIND_WORDS.get(run.task or WORD_PROBLEM, str(run.task))


def _chart(title: str, runs: Sequence[TrainingRun], key: str, label: str, x: str = STEP, **look: Any) -> Chart:
    """Return a chart with a line for each last phase of a run, from the first step on; the seeds share a line."""
    ends = [(run, phase) for run in runs for phase in run.last_phases]
    lines = [_line(seeds, key, x) for seeds in grouped(ends, lambda end: (end[0].run, end[1].name)).values()]
    last = max((place for line in lines for place, _ in line.points), default=1.0)
    roles = tuple(phase.role for run in runs for phase in run.phases)
    return Chart(title, lines, partial(_decorate, x=x, last=last), label, roles=roles, **look)


def _line(seeds: Sequence[tuple[TrainingRun, Phase]], key: str, x: str) -> Line:
    (run, phase), *_ = seeds
    curves = pd.concat([one.along(last, key, x) for one, last in seeds])
    bins = curves.groupby(level=[0, 1], sort=False)  # by phase and bin
    points = [(place, Spread(found)) for place, found in zip(bins[x].mean(), bins[key].agg(tuple), strict=True)]
    names = [run.name, phase.label] if len(run.last_phases) > 1 else [run.name]
    width = None if key == SPECTRAL_RADIUS else 1.5
    short = None if run.name != run.run else " ".join([kind_of(run), *names[1:]])
    return Line(" ".join(names), run.is_implicit, points, width=width, short=short)


def _decorate(axis: Axes, x: str, last: float) -> None:
    axis.set(xlim=(0, last), xlabel=WORDS[x])
    if x != STEP:
        axis.set_xscale("log")
        axis.set_xlim(SHOWN_FROM * last, 1.15 * last)
        log_ticks(axis.xaxis, short_count if x == TOKENS else "{:g}".format)


def solver_health(given: Given) -> Figure | None:
    """Draw iterations, residual and share of unconverged tokens of implicit runs along training, by kind of task."""
    charts = [
        _chart(kind, runs, key, label, is_accuracy=key == "unconverged_share", level=_limit(key, runs))
        for kind, runs in _implicit_kinds(given).items()
        for key, label in HEALTH.items()
    ]
    return chart_figure("solver-health", "Solver health along training", _measured(charts))


def _implicit_kinds(given: Given) -> dict[str, list[TrainingRun]]:
    return grouped((run for run in given.training if run.is_implicit), _kind)


def _measured(charts: list[Chart]) -> list[Chart]:
    """Remove lines that have no points, such as the residual of unrolled phases, then charts that have no lines.

    If no chart would be left, return all of them unchanged.
    """
    kept = [replace(chart, lines=[line for line in chart.lines if line.points]) for chart in charts]
    return [chart for chart in kept if chart.lines] or charts


def _limit(key: str, runs: Sequence[TrainingRun]) -> tuple[str, float] | None:
    """Return the label and value of the tolerance or iteration limit that all phases except unrolled ones share.

    Return None if they differ, or if the metric `key` has no limit.
    """
    if key not in LIMITS:
        return None
    name, words = LIMITS[key]
    solvers = [phase.solver for run in runs for phase in run.phases if phase.solver]
    limits = {getattr(one, name) for one in solvers if one.mode != "unrolled"} - {None}
    return (words, limits.pop()) if len(limits) == 1 else None


def spectral_radius(given: Given) -> Figure | None:
    """Draw the spectral radius of implicit runs, one panel per kind of task; below 1 the iteration contracts."""
    charts = [
        _chart(kind, runs, SPECTRAL_RADIUS, "spectral radius of ∂f/∂z", level=("contracts below", 1.0))
        for kind, runs in _implicit_kinds(given).items()
    ]
    return chart_figure("spectral-radius", "Spectral radius of ∂f/∂z along training", _measured(charts))
