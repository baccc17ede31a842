"""Draw accuracy and perplexity at each position of the longest sequences."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_report.figures.charts import Chart, Line, chart_figure, mark_training, ticks_at
from implicit_llm_report.figures.svg import Figure
from implicit_llm_report.figures.word_problems import (
    CHANCE,
    TEST_LENGTH,
    draw_chance,
    of_lengths,
    without_fraction_sweep,
)
from implicit_llm_report.inputs.frame import PERPLEXITY, Group, Spread, groups, headlines
from implicit_llm_report.inputs.sources import Given
from implicit_llm_report.tables import title_of

MAX_POSITIONS = 512  # longer sequences are divided into as many bins
LEAST_TOKENS = 256  # the fewest tokens of a point of perplexity
Points = list[tuple[float, Spread]]


def accuracy_by_position(given: Given) -> Figure | None:
    rows = without_fraction_sweep(of_lengths(given.words))
    charts = _charts(
        rows, TEST_LENGTH, _accuracies, _decorate_accuracy, y_label="accuracy at this position", is_accuracy=True
    )
    return chart_figure("accuracy-by-position", "Accuracy at each position of the longest sequences", charts, [CHANCE])


def perplexity_by_position(given: Given) -> Figure | None:
    test = ("models", "data", "length")
    charts = _charts(given.perplexities, test, _perplexities, _decorate_perplexity, y_label=PERPLEXITY)
    return chart_figure("perplexity-by-position", "Perplexity by position", charts)


def _charts(
    rows: pd.DataFrame,
    by: Sequence[str],
    points_of: Callable[[Group], Points],
    decorate: Callable[..., None],
    **look: Any,
) -> list[Chart]:
    """Return a panel for each test with its longest sequences: every model in its headline mode."""
    charts = []
    for all_lengths in groups(headlines(rows), by[:-1]):
        longest = Group(all_lengths.rows[all_lengths.rows["length"] == max(all_lengths.rows["length"])])
        lines = [
            Line(cell.name, bool(cell.is_implicit), points_of(cell), groups=[cell], width=2.6, short=cell.label)
            for cell in groups(longest.rows, ("name", "data", "mode"))
        ]
        charts.append(Chart(title_of(longest, by), lines, partial(decorate, test=longest), **look))
    return charts


def _accuracies(cell: Group) -> Points:
    return _binned(cell.curves("accuracy_per_position"))


def _binned(curves: Sequence[Sequence[float]]) -> Points:
    """Return each seed's mean over equal bins of positions if there are too many positions to see."""
    if not curves:
        return []
    table = np.column_stack((np.arange(1, len(curves[0]) + 1), np.transpose(curves)))
    parts = np.array_split(table, min(len(table), MAX_POSITIONS))
    return [(x, Spread(tuple(values))) for x, *values in (part.mean(axis=0).tolist() for part in parts)]


def _decorate_accuracy(axis: Axes, test: Group) -> None:
    length, chances = test.length, test.curves("chance_per_position")
    mark_training(axis, test.rows, 1, length)
    draw_chance(axis, [(x, spread.mean) for x, spread in _binned(chances[:1])])
    axis.set(xlim=(1, max(2, length)), xlabel="position in the sequence (token)")


def _perplexities(cell: Group) -> Points:
    """Return the perplexity of each bin with enough tokens; seeds with other bins than the first one are left out."""
    curves = [curve for curve in cell.curves("loss_by_position") if None not in curve["loss"]]
    if not curves:
        return []
    starts, ends, counts = (curves[0][key] for key in ("start", "end", "num_tokens"))
    losses = zip(*(curve["loss"] for curve in curves if curve["start"] == starts), strict=True)
    bins = zip(starts, ends, counts, losses, strict=True)
    return [
        (math.sqrt(start * end), Spread(tuple(map(math.exp, seeds))))
        for start, end, count, seeds in bins
        if count >= LEAST_TOKENS
    ]


def _decorate_perplexity(axis: Axes, test: Group) -> None:
    length = test.length
    mark_training(axis, test.rows, 1, length)
    axis.set_xscale("log", base=2)
    ticks_at(axis, [length / 4**power for power in range(12) if 4**power <= length])
    axis.set(xlim=(0.9, length * 1.1), xlabel="tokens before the predicted one")
