"""Training loss against tokens or FLOPs, smoothed, with each phase joined to the one it starts from.

A curve is an array of shape (points, 3): step, tokens or FLOPs, loss, each the mean over a bin of steps. The bins are
the same for all seeds of a run, so that seeds are averaged bin by bin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from implicit_llm_report.axes import amount_axis, nice_log_ticks, tell_if_empty
from implicit_llm_report.model_groups import ModelGroup, Variant
from implicit_llm_report.style import PAPER, Series, series_of_names
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.training_runs import FLOPS, LANGUAGE_MODEL, LOSS, TOKENS, Phase, Solver, TrainingRun

# Beyond so many points a line of 500 pixels shows noise only. A phase that starts at step 0 has bins of equal ratio
# first, since its axis is logarithmic, and then equal ones, which show the decay of the learning rate; a later phase
# covers a small part of that axis and has equal bins.
EARLY_SHARE, EARLY_BINS, LATE_BINS, BRANCH_BINS = 0.2, 40, 50, 30
STEP, AMOUNT, VALUE = 0, 1, 2
END_SHARE = 0.02  # of all steps: so many last ones make the loss at the end


@dataclass(frozen=True)
class PhaseCurve:
    """The curves of one phase of a run: of each seed, and their mean; each begins where the phase before it ended."""

    variant: Variant
    seeds: tuple[np.ndarray, ...]
    mean: np.ndarray
    is_branch: bool
    roles: tuple[str, ...]


def phase_curves(runs: Sequence[TrainingRun], group: ModelGroup, amount: str) -> list[PhaseCurve]:
    """All phases of the runs of a group, by run and start; `amount` is a journal key: tokens or flops."""
    curves = []
    for name in group.runs:
        seeds = [run for run in runs if run.run == name]
        phases = {phase.name: phase for run in reversed(seeds) for phase in run.phases}
        for phase in sorted(phases.values(), key=lambda phase: (phase.start_step, phase.name)):
            curves.append(_phase_curve(seeds, phase, amount))
    return curves


def path_curve(run: TrainingRun, phase: Phase, amount: str) -> np.ndarray:
    """The smoothed curve of one seed from step 0 to the end of `phase`, through the phases before it."""
    path = run.path(phase)
    ends = [following.start_step for following in path[1:]] + [phase.end_step]
    parts = []
    for part, end in zip(path, ends, strict=True):
        curve = present(smoothed(part, amount))
        parts.append(curve[curve[:, STEP] <= end])
    return np.concatenate(parts)


def loss_at(curve: np.ndarray, amount: float) -> float | None:
    """The loss at so many tokens or FLOPs, between points linear in the logarithm; None outside of the curve."""
    if not len(curve) or not curve[0, AMOUNT] <= amount <= curve[-1, AMOUNT] * (1 + 1e-9):
        return None
    return float(np.interp(np.log(amount), np.log(curve[:, AMOUNT]), curve[:, VALUE]))


def end_loss(phase: Phase) -> float | None:
    """Mean loss of the last steps up to the end of a phase; None when its journal has none of them."""
    losses = [loss for step, loss in phase.series(LOSS) if step > (1 - END_SHARE) * phase.end_step]
    return sum(losses) / len(losses) if losses else None


def smoothed(phase: Phase, amount: str) -> np.ndarray:
    """Means over bins of steps; a row of NaN for a bin without points, so that bins of seeds can be matched."""
    amounts = dict(phase.series(amount))
    rows = np.array([(step, amounts[step], loss) for step, loss in phase.series(LOSS) if amounts.get(step, 0) > 0])
    first, end = phase.start_step, phase.end_step + 1
    edges = _edges_from_zero(end) if first == 0 else np.linspace(first, end, BRANCH_BINS + 1)
    curve = np.full((len(edges) - 1, 3), np.nan)
    if len(rows):
        index = np.clip(np.searchsorted(edges, rows[:, STEP], side="right") - 1, 0, len(curve) - 1)
        for bin_ in np.unique(index):
            curve[bin_] = rows[index == bin_].mean(axis=0)
    return curve


def _edges_from_zero(end: int) -> np.ndarray:
    middle = max(1.0, EARLY_SHARE * end)
    return np.concatenate(
        [np.geomspace(1, middle, EARLY_BINS, endpoint=False), np.linspace(middle, end, LATE_BINS + 1)]
    )


def present(curve: np.ndarray) -> np.ndarray:
    """The points of a curve without the empty bins."""
    return curve[np.isfinite(curve[:, STEP])]


def _phase_curve(runs: Sequence[TrainingRun], phase: Phase, amount: str) -> PhaseCurve:
    own, before, roles = [], [], []
    for run in runs:
        mine = next((p for p in run.phases if p.name == phase.name), None)
        if mine is not None:
            previous = run.before(mine)
            own.append(smoothed(mine, amount))
            before.append(None if previous is None else smoothed(previous, amount))
            roles.append(mine.role)
    start = phase.start_step
    seeds = tuple(_joined(first, curve, start) for first, curve in zip(before, own, strict=True))
    trunks = [curve for curve in before if curve is not None]
    mean = _joined(_mean(trunks) if trunks else None, _mean(own), start)
    variant = Variant(runs[0].run, phase.name, Solver.of(phase.solver), runs[0].is_implicit)
    return PhaseCurve(variant, seeds, mean, is_branch=bool(trunks), roles=tuple(roles))


def _joined(before: np.ndarray | None, own: np.ndarray, start_step: int) -> np.ndarray:
    """`own` with the point of the curve before it at the step where the phase starts."""
    own = present(own)
    trunk = None if before is None else present(before)
    if trunk is None or not len(trunk) or not len(own):
        return own
    joint = [start_step, *(np.interp(start_step, trunk[:, STEP], trunk[:, column]) for column in (AMOUNT, VALUE))]
    return np.vstack([joint, own])


def _mean(curves: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over the seeds that have a bin."""
    stacked = np.stack(curves)
    counts = np.isfinite(stacked).sum(axis=0)
    return np.where(counts > 0, np.nansum(stacked, axis=0) / np.maximum(counts, 1), np.nan)


SHOWN_FROM = 0.01  # of the longest run: the fall from the untrained loss would flatten everything after it
WORDS = {TOKENS: "training tokens", FLOPS: "training FLOPs"}


def loss_by(amount: str, runs: Sequence[TrainingRun], groups: Sequence[ModelGroup]) -> Figure | None:
    """Smoothed loss against `amount` (tokens or flops) of the language models; None when there is no such run."""
    models = [run for run in runs if run.task == LANGUAGE_MODEL]
    if not models:
        return None
    names = {run.run for run in models}
    curves = {group: phase_curves(models, group, amount) for group in groups if names & set(group.runs)}
    series = series_of_names(
        (_name(group, curve, mine), curve.variant.is_implicit) for group, mine in curves.items() for curve in mine
    )
    panels = tuple(
        Panel(
            group.title,
            partial(_draw, group=group, curves=mine, series=series, amount=amount),
            f"{group.title}: training loss against {WORDS[amount]}",
        )
        for group, mine in curves.items()
    )
    roles = tuple(dict.fromkeys(role for mine in curves.values() for curve in mine for role in curve.roles))
    return Figure(f"loss-by-{amount}", f"Training loss by {WORDS[amount]}", panels, tuple(series.values()), roles)


def _name(group: ModelGroup, curve: PhaseCurve, curves: Sequence[PhaseCurve]) -> str:
    return group.name(curve.variant, [other.variant for other in curves])


def _draw(
    axis: Axes, group: ModelGroup, curves: Sequence[PhaseCurve], series: Mapping[str, Series], amount: str
) -> None:
    shown = [curve for curve in curves if len(curve.mean)]
    for curve in reversed(shown):  # implicit runs come first and are drawn on top
        line = series[_name(group, curve, curves)]
        _draw_curve(axis, curve, line)
    axis.set(ylabel="training loss (nats per token)", xlabel=WORDS[amount])
    tell_if_empty(axis, shown, "not recorded")
    if not shown:
        return
    points = np.concatenate([points for curve in shown for points in (curve.mean, *curve.seeds)])
    last = float(points[:, AMOUNT].max())
    first = max(float(points[:, AMOUNT].min()), SHOWN_FROM * last)
    axis.set_xscale("log")
    axis.set_xlim(first / 1.1, last * 1.15)
    amount_axis(axis.xaxis, first, last, is_power=amount == FLOPS)
    axis.grid(visible=False, axis="x")
    nice_log_ticks(axis, points[points[:, AMOUNT] >= first, VALUE].tolist())


def _draw_curve(axis: Axes, curve: PhaseCurve, series: Series) -> None:
    """Seeds thin, their mean bold, a dot where the phase leaves the one before it."""
    style = series.line(has_markers=False)
    if len(curve.seeds) > 1:
        for seed in curve.seeds:
            axis.plot(seed[:, AMOUNT], seed[:, VALUE], color=series.color, linewidth=0.6, alpha=0.45)
    axis.plot(curve.mean[:, AMOUNT], curve.mean[:, VALUE], **style, zorder=4)
    if curve.is_branch:
        dot: dict[str, Any] = {
            "color": series.color,
            "markeredgecolor": PAPER,
            "markeredgewidth": 0.7,
            "markersize": 5.5,
        }
        axis.plot(curve.mean[0, AMOUNT], curve.mean[0, VALUE], marker=series.marker, **dot, zorder=6)
