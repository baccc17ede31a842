"""The comparison of results as a page that needs nothing else, with the curves of their training.

Drawing needs matplotlib and the report's style, which are imported when a page is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_workflow.results.compare_table import Comparison
from implicit_llm_workflow.results.compared_numbers import NumberRow
from implicit_llm_workflow.results.compared_runs import Compared
from implicit_llm_workflow.results.journals import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from implicit_llm_report.style import Series
    from implicit_llm_report.svg import Figure, Panel

TEMPLATE = "compare.html.j2"
MAX_POINTS = 300  # more of a line are averaged in equal bins
MARKERS = 7  # on a line, so that it is told from others without colour
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


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the page; one that is there is replaced."""
    import jinja2

    from implicit_llm_report.svg import panel_svg, swatch_svg, theme_css

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figure = curves_figure(comparison)
    sections: dict[str, list[NumberRow]] = {}
    for row in comparison.numbers:
        sections.setdefault(row.section, []).append(row)
    text = environment.get_template(TEMPLATE).render(
        title=" against ".join(comparison.labels),
        comparison=comparison,
        sections=sections,
        light_css=theme_css(1),
        dark_css=theme_css(2),
        panels=[panel_svg(figure, index) for index in range(len(figure.panels))],
        legend=[(series.label, swatch_svg(figure, series)) for series in figure.legend],
    )
    write_atomic(path, text)


def curves_figure(comparison: Comparison) -> Figure:
    """A panel for each curve that any of the results has."""
    from implicit_llm_report.style import run_series
    from implicit_llm_report.svg import Figure

    curves = [[member.curve() for member in column.members] for column in comparison.columns]
    counts = {True: 0, False: 0}
    series = []
    for column, label in zip(comparison.columns, comparison.labels, strict=True):
        is_implicit = _is_implicit(column)
        series.append(run_series(label, counts[is_implicit], is_implicit=is_implicit))
        counts[is_implicit] += 1
    starts = sorted({start for column in comparison.columns for start in _phase_starts(column)})
    lines = list(zip(series, curves, strict=True))
    panels = tuple(filter(None, (_panel(curve, lines, starts) for curve in CURVES)))
    return Figure("comparison", "Training", panels, tuple(series), ())


def _panel(
    curve: tuple[str, str, str, bool], lines: Sequence[tuple[Series, list[list[Point]]]], starts: Sequence[int]
) -> Panel | None:
    from implicit_llm_report.svg import Panel

    key, title, label, is_log = curve
    shown = [(series, [thinned(points, key) for points in members]) for series, members in lines]
    if not any(steps for _, members in shown for steps, _ in members):
        return None
    draw = partial(_draw, lines=shown, starts=starts, label=label, is_log=is_log)
    return Panel(title, draw, f"{title}: {label} against training step")


def _draw(
    axis: Axes,
    lines: Sequence[tuple[Series, list[tuple[list[float], list[float]]]]],
    starts: Sequence[int],
    label: str,
    is_log: bool,
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
            # not all at the same steps: markers that lie on one another are none
            style: dict[str, Any] = series.line() | {"linewidth": 1.4, "markevery": (min(index, every - 1), every)}
            axis.plot(steps, found, **style)
    axis.set(xlabel="training step", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.grid(visible=False, axis="x")


def thinned(points: Sequence[Point], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of a key, averaged where there are more than can be seen."""
    pairs = [(point.step, point.values[key]) for point in points if key in point.values]
    size = -(-len(pairs) // MAX_POINTS) or 1
    bins = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    return (
        [sum(step for step, _ in group) / len(group) for group in bins],
        [sum(value for _, value in group) / len(group) for group in bins],
    )


def _is_implicit(column: Compared) -> bool:
    return any(_phase(identity.config).get("solver") is not None for identity in column.first.chain())


def _phase_starts(column: Compared) -> list[int]:
    """Steps at which a phase goes on from another one."""
    starts = [_phase(identity.config).get("start_step") for identity in column.first.chain()]
    return [start for start in starts if start]


def _phase(config: Any) -> dict[str, Any]:
    return config.get("phase") or {}
