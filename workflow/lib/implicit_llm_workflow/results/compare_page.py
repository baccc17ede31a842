"""The comparison of results as a page that needs nothing else, with the curves of their training.

Drawing needs matplotlib and the report's style, which are imported when a page is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_workflow.results.compare import Comparison
from implicit_llm_workflow.results.journals import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from implicit_llm_report.style import Series
    from implicit_llm_report.svg import Figure

TEMPLATE = "compare.html.j2"
MAX_POINTS = 300  # more of a line are averaged in equal bins
MARKERS = 7  # on a line, to tell it from others without colour
# Journal key, title of the panel, its vertical axis, and whether that is logarithmic.
CURVES = (
    ("loss", "Training loss", "loss (nats a token)", False),
    ("accuracy_last10", "Training accuracy", "accuracy, last 10 tokens", False),
    ("accuracy", "Training accuracy", "accuracy, answers", False),
    ("residual", "Residual", "relative, largest of the batch", True),
    ("num_iter", "Iterations", "solver iterations a token", False),
    ("unconverged_share", "Unconverged", "share of the tokens", False),
    ("spectral_radius", "Spectral radius", "of the map at the fixed point", False),
    ("grad_norm", "Gradient", "gradient norm", True),
    ("learning_rate", "Learning rate", "learning rate", False),
    ("tokens_per_s", "Speed", "tokens a second", False),
)
Line = tuple[list[float], list[float]]  # steps and values


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the page; one that is there is replaced."""
    import jinja2

    from implicit_llm_report.svg import panel_svg, swatch_svg, theme_css

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figure = curves_figure(comparison)
    text = environment.get_template(TEMPLATE).render(
        title=" against ".join(comparison.labels),
        comparison=comparison,
        light_css=theme_css(1),
        dark_css=theme_css(2),
        panels=[panel_svg(figure, index) for index in range(len(figure.panels))],
        legend=[(series.label, swatch_svg(figure, series)) for series in figure.legend],
    )
    write_atomic(path, text)


def curves_figure(comparison: Comparison) -> Figure:
    """A panel for each curve that any of the results has."""
    from implicit_llm_report.style import run_series
    from implicit_llm_report.svg import Figure, Panel

    phases = [
        [identity.config.get("phase") or {} for identity in column.first.chain()] for column in comparison.columns
    ]
    kinds = [any(phase.get("solver") is not None for phase in chain) for chain in phases]
    series = [
        run_series(label, kinds[:index].count(kinds[index]), is_implicit=kinds[index])
        for index, label in enumerate(comparison.labels)
    ]
    starts = sorted({start for chain in phases for phase in chain if (start := phase.get("start_step"))})
    curves = [[member.curve() for member in column.members] for column in comparison.columns]
    panels = []
    for key, title, label, is_log in CURVES:
        lines = [[thinned(points, key) for points in members] for members in curves]
        if any(steps for members in lines for steps, _ in members):
            pairs = list(zip(series, lines, strict=True))
            draw = partial(_draw, lines=pairs, starts=starts, label=label, is_log=is_log)
            panels.append(Panel(title, draw, f"{title}: {label} against training step"))
    return Figure("comparison", "Training", tuple(panels), tuple(series), ())


def _draw(
    axis: Axes, lines: Sequence[tuple[Series, list[Line]]], starts: Sequence[int], label: str, is_log: bool
) -> None:
    from matplotlib.ticker import MaxNLocator

    from implicit_llm_report.axes import nice_log_ticks
    from implicit_llm_report.style import MUTED

    values = [value for _, members in lines for _, found in members for value in found]
    if is_log and min(values) > 0:
        nice_log_ticks(axis, values)
    for start in starts:
        axis.axvline(start, color=MUTED, linewidth=0.6, zorder=0.5)
    for index, (series, members) in enumerate(lines):
        for steps, found in members:
            every = max(1, len(steps) // MARKERS)
            # Markers of different lines are set at different steps, so that they do not cover one another.
            style: dict[str, Any] = series.line() | {"linewidth": 1.4, "markevery": (min(index, every - 1), every)}
            axis.plot(steps, found, **style)
    axis.set(xlabel="training step", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.grid(visible=False, axis="x")


def thinned(points: Sequence[Point], key: str) -> Line:
    """Steps and values of a key, averaged where there are more than can be seen."""
    pairs = [(float(point.step), point.values[key]) for point in points if key in point.values]

    def means(numbers: Sequence[float]) -> Iterator[float]:
        size = -(-len(numbers) // MAX_POINTS) or 1
        for start in range(0, len(numbers), size):
            yield fmean(numbers[start : start + size])

    return [*means([step for step, _ in pairs])], [*means([value for _, value in pairs])]
