"""Parts of axes that several figures draw: the trained lengths, notes on what is missing, ticks of logarithmic axes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from implicit_llm_report.figures.style import BAND, GRID, MUTED
from implicit_llm_report.inputs.frame import short_count

MISSING_CHARACTERS = 52  # as many as fit into a panel
_NICE = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def mark_training(axis: Axes, lengths: Iterable[int | None], shown: tuple[int, int], *, is_log: bool) -> None:
    """Shade the lengths or positions seen in training, as far as they lie in the range that is `shown`."""
    for length in sorted({length for length in lengths if length and shown[0] <= length <= shown[1]}):
        axis.axvspan(1e-3 if is_log else 0, length, color=BAND, linewidth=0, zorder=0)
        axis.axvline(length, color=GRID, linewidth=1.2, zorder=0.5)
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (0, 2), "textcoords": "offset points"}
        axis.annotate(f"◂ trained to {length}", (length, 1), **place, fontsize=7.5, color=MUTED, va="bottom")


def length_axis(axis: Axes, lengths: Sequence[int]) -> None:
    """Test lengths on a logarithmic axis, each with its tick."""
    axis.set_xscale("log", base=2)
    ticks_at(axis, lengths)
    axis.set(xlim=(lengths[0] / 1.25, lengths[-1] * 1.25), xlabel="test length (tokens)")
    axis.grid(visible=False, axis="x")


def ticks_at(axis: Axes, values: Sequence[float], words: Callable[[float], str] = "{:g}".format) -> None:
    """A tick at each of the values and nowhere else."""
    axis.xaxis.set(major_locator=FixedLocator(list(values)), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))


def accuracy_axis(axis: Axes, label: str) -> None:
    """A vertical axis from 0 to 1."""
    axis.set(ylim=(-0.03, 1.05), ylabel=label)
    axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axis.grid(visible=False, axis="x")


def nice_log_ticks(axis: Axes, values: Iterable[float], most: int = 6) -> None:
    """A logarithmic vertical axis around `values`, with round ticks, at most `most` of them."""
    present = [value for value in values if value > 0 and math.isfinite(value)]
    axis.set_yscale("log")
    low, high = min(present, default=1.0), max(present, default=10.0)
    margin = max((high / low) ** 0.06, 1.02)
    low, high = low / margin, high * margin
    axis.set_ylim(low, high)
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = [nice * 10.0**decade for decade in decades for nice in _NICE if low <= nice * 10.0**decade <= high]
    if high / low > 300:
        ticks = [10.0**decade for decade in decades if 10.0**decade >= low]
    if len(ticks) < 2:  # a narrow range: equal steps
        step = 10.0 ** math.floor(math.log10(high - low))
        ticks = [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    ticks = ticks[:: math.ceil(len(ticks) / most)]
    axis.yaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def amount_axis(axis: Axis, low: float, high: float, *, is_power: bool) -> None:
    """Ticks of a logarithmic axis of tokens ("200k", "1M") or, with `is_power`, of FLOPs ("2·10¹⁵")."""
    subs = (1,) if high / low > 300 else (1, 3) if high / low > 30 else (1, 2, 5)
    axis.set(major_locator=LogLocator(subs=subs, numticks=12), minor_locator=NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value) if is_power else short_count(value)))


def power_of_ten(value: float) -> str:
    """ "2·10¹⁵"."""
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = f"{value / 10.0**exponent:.3g}"
    raised = "10" + str(exponent).translate(_RAISED)
    return raised if factor == "1" else f"{factor}·{raised}"


def tell_if_empty(axis: Axes, shown: Sequence[Any], words: str = "missing") -> None:
    """Say in the middle of the axes that there is nothing to draw."""
    if not shown:
        axis.annotate(words, (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=9, color=MUTED)


def tell_missing(axis: Axes, names: Sequence[str]) -> None:
    """Name in a corner what has no number."""
    if names:
        text = textwrap.fill("missing: " + ", ".join(names), MISSING_CHARACTERS)
        axis.annotate(text, (0.02, 0.02), xycoords="axes fraction", fontsize=7, color=MUTED).set_in_layout(False)
