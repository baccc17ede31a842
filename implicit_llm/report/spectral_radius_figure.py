"""The figure of the spectral radius of df/dz at the fixed point along training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from implicit_llm.report.axes import tell_if_empty
from implicit_llm.report.style import MUTED, Series
from implicit_llm.report.svg import Figure, Panel
from implicit_llm.report.training_figures import by_kind_of_task, implicit_series
from implicit_llm.report.training_runs import TrainingRun

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
