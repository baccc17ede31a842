"""Test-time compute: figures against the iteration budget and the tolerance, the table and the part of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from implicit_llm.report.axes import nice_log_ticks, tell_if_empty, tell_missing
from implicit_llm.report.config import Hole
from implicit_llm.report.perplexity_figures import series_of_names
from implicit_llm.report.section import Section, SectionInputs
from implicit_llm.report.style import INK, PAPER, Series
from implicit_llm.report.svg import Figure, Panel
from implicit_llm.report.swept_results import (
    ACCURACY,
    COST,
    ITERATIONS,
    MEASURES,
    TOLERANCE,
    SweptCell,
    SweptLine,
    SweptPanel,
    swept_panels,
)
from implicit_llm.report.table_text import csv_text, escape, latex_spread, spread_columns, spread_values

FIGURES = {
    ITERATIONS: ("test-time-iterations", "Accuracy and perplexity by iterations at test time", "iterations allowed"),
    TOLERANCE: ("test-time-tolerance", "Accuracy and perplexity by tolerance at test time", "tolerance"),
}
LABELS = {ACCURACY: "accuracy, last 10 tokens", "perplexity": "perplexity"}
OWN = Series("unswept: stops by its tolerance", INK, "o", has_line=False)


def test_time_section(given: SectionInputs) -> Section | None:
    """What trained models do with fewer or more iterations than they were trained with."""
    panels = swept_panels(given.inputs.records, given.perplexities.groups)
    lost = {key for hole in given.config.holes if hole.config.get("kind") in MEASURES for key in _swept(hole)}
    keys = [key for key in FIGURES if key in lost or any(panel.key == key for panel in panels)]
    if not keys:
        return None
    figures = [_figure(key, [panel for panel in panels if panel.key == key]) for key in keys]
    files = {"test-time": {"csv": _csv(panels), "tex": _latex(panels)}}
    return Section("test-time", "sections/test-time.html.j2", panels, figures, files)


def _swept(hole: Hole) -> set[str]:
    """The settings that a result that is missing would have swept."""
    return set(hole.config.get("sweep") or ()) if hole.is_implicit else set()


def _figure(key: str, panels: Sequence[SweptPanel]) -> Figure:
    name, title, label = FIGURES[key]
    if not panels:
        return Figure(name, title, (Panel(title, partial(tell_if_empty, shown=())),), (), ())
    names = [(line.name, True) for panel in panels for line in panel.lines]
    names += [(reference.name, False) for panel in panels for reference in panel.references]
    series = series_of_names(names)
    drawn = tuple(
        Panel(panel.title, partial(_draw, panel=panel, series=series), f"{panel.title}: against {label}")
        for panel in panels
    )
    roles = tuple(dict.fromkeys(role for panel in panels for role in panel.roles))
    return Figure(name, title, drawn, (*series.values(), OWN), roles)


def _draw(axis: Axes, panel: SweptPanel, series: Mapping[str, Series]) -> None:
    shown: list[float] = []
    for reference in panel.references:
        mean = panel.spread(reference.cell).mean
        if mean is not None:
            style = series[reference.name]
            axis.axhline(mean, color=style.color, linestyle=(0, style.dashes or (3, 1.6)), linewidth=1.3)
            shown.append(mean)
    for line in panel.lines:
        shown += _draw_line(axis, panel, line, series[line.name])
    _sweep_axis(axis, panel)
    if panel.measure == ACCURACY:
        axis.set(ylim=(-0.03, 1.05))
        axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    else:
        nice_log_ticks(axis, shown)
    axis.set_ylabel(LABELS[panel.measure])
    axis.grid(visible=False, axis="x")
    tell_if_empty(axis, shown)
    tell_missing(axis, _missing(panel) if shown else [])


def _draw_line(axis: Axes, panel: SweptPanel, line: SweptLine, style: Series) -> list[float]:
    """The mean over seeds as a line, every seed as a thin one, the model as it is as a dot; returns the values."""
    present = [(value, panel.spread(cell)) for value, cell in line.cells if panel.spread(cell).values]
    for seed in sorted({point.seed or 0 for _, cell in line.cells for point in cell.points}):
        if all(len(cell.points) < 2 for _, cell in line.cells):
            break
        own = [(v, getattr(p, panel.measure)) for v, cell in line.cells for p in cell.points if (p.seed or 0) == seed]
        known = [(value, number) for value, number in own if number is not None]
        axis.plot([v for v, _ in known], [n for _, n in known], color=style.color, linewidth=0.6, alpha=0.55)
    means = [spread.mean for _, spread in present]
    axis.plot([value for value, _ in present], means, **style.line(), zorder=4)  # type: ignore[arg-type]
    found = [number for _, spread in present for number in spread.values]
    where = line.own_value(panel.key)
    mean = None if line.own is None else panel.spread(line.own).mean
    if where is not None and mean is not None:
        axis.plot(where, mean, "o", color=style.color, markersize=8, markeredgecolor=PAPER, zorder=6, clip_on=False)
        found.append(mean)
    return found


def _sweep_axis(axis: Axes, panel: SweptPanel) -> None:
    """Each swept value with its tick, the work growing to the right."""
    axis.set_xscale("log")
    axis.xaxis.set(major_locator=FixedLocator(list(panel.values)), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if panel.key == TOLERANCE:
        axis.invert_xaxis()
        axis.set_xlabel("tolerance (relative residual; stricter to the right)")
    else:
        axis.set_xlabel("iterations allowed for a block")


def _missing(panel: SweptPanel) -> list[str]:
    return [
        f"{line.name} at {value:g}"
        for line in panel.lines
        for value, cell in line.cells
        if not panel.spread(cell).values
    ]


def _rows(panel: SweptPanel) -> Iterator[tuple[str, str, float | None, SweptCell]]:
    """Name, what was swept, its value and the cell: swept lines, each followed by the model as it is, then explicit."""
    for line in panel.lines:
        for value, cell in line.cells:
            yield line.name, panel.key, value, cell
        if line.own is not None:
            yield line.name, "unswept", None, line.own
    for reference in panel.references:
        yield reference.name, "explicit", None, reference.cell


def _csv(panels: Sequence[SweptPanel]) -> str:
    """One line a model, field and value; empty where there is no number."""
    head = ["test", "data", "length", "run", "phase", "mode", "swept", "value", "eval_max_iter", "eval_tol", "measure"]
    head += [*spread_columns(["value"]), "best_seed", "num_seeds", "num_missing", *spread_columns([COST])]
    return csv_text(head, (row for panel in panels for row in _csv_rows(panel)))


def _csv_rows(panel: SweptPanel) -> Iterator[list[object]]:
    for _, swept, value, cell in _rows(panel):
        point, spread, best = cell.first, panel.spread(cell), panel.best(cell)
        about = [panel.title, point.data, point.length, point.run, point.phase, point.mode, swept, value]
        about += [point.eval_max_iter, point.eval_tol, panel.measure]
        seeds = [best and best.seed, len(spread.values), spread.num_missing]
        yield [*about, *spread_values(spread), *seeds, *spread_values(cell.spread(COST))]


def _latex(panels: Sequence[SweptPanel]) -> str:
    """A table a panel: mean over seeds (range), and f-evaluations per token; needs the package booktabs."""
    return "\n".join(_latex_table(panel) for panel in panels)


def _latex_table(panel: SweptPanel) -> str:
    title = panel.title.replace("×", "x")
    lines = [
        f"% {title}: {LABELS[panel.measure]} by {FIGURES[panel.key][2]}, mean over seeds (range)",
        r"\begin{tabular}{llrr}",
        r"\toprule",
        rf"Model & {FIGURES[panel.key][2].capitalize()} & {LABELS[panel.measure].capitalize()} & $f$ per token \\",
        r"\midrule",
    ]
    form = ".3f" if panel.measure == ACCURACY else ".4g"
    for name, swept, value, cell in _rows(panel):
        shown = swept if value is None else f"{value:g}"
        cost = cell.spread(COST).mean
        numbers = f"{latex_spread(panel.spread(cell), form)} & {'--' if cost is None else f'{cost:.3g}'}"
        lines.append(rf"{escape(name)} & {shown} & {numbers} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
