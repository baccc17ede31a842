"""The figure of convergence by iteration: the residual of the tokens, and how many predictions are the final ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from implicit_llm.report.axes import tell_if_empty, tell_missing
from implicit_llm.report.duality_results import ConvergenceLine, convergence_lines
from implicit_llm.report.perplexity_figures import series_of_names
from implicit_llm.report.style import MUTED, Series
from implicit_llm.report.svg import Figure, Panel

NAME = "convergence-by-iteration"
LEAST_RESIDUAL = 1e-9  # below lies rounding, and zero has no logarithm
Curve = Mapping[str, Sequence[float]]
DrawnLine = tuple[ConvergenceLine, list[Curve]]


def convergence_by_iteration(records: Iterable[Mapping[str, Any]]) -> Figure | None:
    """Two panels a data set and length, of every implicit model."""
    by_place = convergence_lines(records)
    if not by_place:
        return None
    series = series_of_names((line.name, True) for lines in by_place.values() for line in lines)
    panels = []
    for (data, length), lines in by_place.items():
        title = f"{data}, {length} tokens"
        residual, agreement = partial(_draw_residual, lines, series), partial(_draw_agreement, lines, series)
        panels.append(Panel(f"{title}: residual", residual, f"{title}: residual of the tokens by evaluations of f"))
        words = f"{title}: share of predictions equal to the final ones by evaluations of f"
        panels.append(Panel(f"{title}: predictions", agreement, words))
    roles = tuple(dict.fromkeys(role for lines in by_place.values() for line in lines for role in line.cell.roles))
    return Figure(NAME, "Convergence by iteration", tuple(panels), tuple(series.values()), roles)


def _draw_residual(lines: Sequence[ConvergenceLine], series: Mapping[str, Series], axis: Axes) -> None:
    """The median over tokens as a line, up to the 90 % quantile as a band; of seeds the geometric mean."""
    drawn = _with_curves(lines)
    for line, curves in drawn:
        style = series[line.name]
        median, high = (_geometric_mean(curves, f"residual_token_{name}") for name in ("median", "q90"))
        evaluations = curves[0]["f_evaluations"]
        axis.fill_between(evaluations, median, high, color=style.color, alpha=0.16, linewidth=0)
        axis.plot(evaluations, median, **style.line(has_markers=False))
    for tolerance in sorted({line.cell.first.eval_tol for line, _ in drawn if line.cell.first.eval_tol}):
        axis.axhline(tolerance, color=MUTED, linewidth=0.8, linestyle=(0, (1.2, 1.2)))
        axis.annotate(f"tolerance {tolerance:g}", (1, tolerance), xycoords=("axes fraction", "data"), fontsize=7,
                      color=MUTED, ha="right", va="bottom")  # fmt: skip
    axis.set_yscale("log")
    axis.yaxis.set(major_locator=LogLocator(numticks=6), minor_locator=NullLocator())
    axis.set(ylabel="relative residual of a token")
    _evaluations_axis(axis, drawn)
    tell_if_empty(axis, drawn)
    if drawn:
        tell_missing(axis, [line.name for line in lines if not _curves(line)])


def _draw_agreement(lines: Sequence[ConvergenceLine], series: Mapping[str, Series], axis: Axes) -> None:
    """The mean over seeds as a line, their range as a band."""
    drawn = _with_curves(lines)
    for line, curves in drawn:
        style = series[line.name]
        shares = np.array([curve["agreement_with_last"] for curve in curves])
        evaluations = curves[0]["f_evaluations"]
        if len(curves) > 1:
            low, high = shares.min(axis=0), shares.max(axis=0)
            axis.fill_between(evaluations, low, high, color=style.color, alpha=0.16, linewidth=0)
        axis.plot(evaluations, shares.mean(axis=0), **style.line(has_markers=False))
    axis.set(ylim=(-0.03, 1.03), ylabel="predictions as at the last one")
    axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    _evaluations_axis(axis, drawn)
    tell_if_empty(axis, drawn)


def _with_curves(lines: Sequence[ConvergenceLine]) -> list[DrawnLine]:
    """Those that have curves, with them; the first line is drawn last, on top."""
    return [(line, curves) for line in reversed(lines) if (curves := _curves(line))]


def _curves(line: ConvergenceLine) -> list[Curve]:
    """Those of the seeds, as far as they look at the same evaluations."""
    curves = [point.convergence for point in line.cell.points if point.convergence is not None]
    return [curve for curve in curves if curve["f_evaluations"] == curves[0]["f_evaluations"]]


def _geometric_mean(curves: Sequence[Curve], key: str) -> np.ndarray:
    values = np.array([curve[key] for curve in curves], dtype=float)
    return np.exp(np.log(np.maximum(values, LEAST_RESIDUAL)).mean(axis=0))


def _evaluations_axis(axis: Axes, drawn: Sequence[DrawnLine]) -> None:
    last = max((curves[0]["f_evaluations"][-1] for _, curves in drawn), default=2)
    axis.set_xscale("log", base=2)
    ticks = [2**power for power in range(13) if 2**power <= last]
    axis.xaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set(xlim=(0.9, 1.1 * last), xlabel="f-evaluations per token")
    axis.grid(visible=False, axis="x")
