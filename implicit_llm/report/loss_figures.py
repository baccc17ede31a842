"""Figures of the training loss of language models against what it took: tokens, and floating-point operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from implicit_llm.report.axes import amount_axis, nice_log_ticks, tell_if_empty
from implicit_llm.report.loss_curves import AMOUNT, VALUE, PhaseCurve, phase_curves
from implicit_llm.report.model_groups import ModelGroup
from implicit_llm.report.perplexity_figures import series_of_names
from implicit_llm.report.style import PAPER, Series
from implicit_llm.report.svg import Figure, Panel
from implicit_llm.report.training_runs import FLOPS, LANGUAGE_MODEL, TOKENS, TrainingRun

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
