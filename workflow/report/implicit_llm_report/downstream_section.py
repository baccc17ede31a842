"""Downstream tasks: the table in the paper's columns, and the figure against iterations (paper, Fig. 1 centre)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from implicit_llm_report.axes import tell_if_empty, tell_missing
from implicit_llm_report.downstream import (
    Column,
    DownstreamPoint,
    DownstreamTable,
    Row,
    Suite,
    downstream_tables,
    groups_of,
    points_of,
    rows_of,
    suites_shown,
)
from implicit_llm_report.model_groups import ModelGroup
from implicit_llm_report.results import Spread, headline_mode
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.style import Series, series_of_names
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import csv_text, escape, latex_spread, rounded, spread_columns, spread_values

BY_ITERATIONS = "downstream-by-iterations"
KEY = "eval_max_iter"


@dataclass(frozen=True)
class Line:
    """An implicit model in one mode: the suite's average at each number of iterations."""

    name: str
    base: str
    rows: tuple[tuple[int, Row], ...]


@dataclass(frozen=True)
class SweptPanel:
    """One suite for one group of models, with the explicit models as they are."""

    suite: Suite
    group: ModelGroup
    lines: tuple[Line, ...]
    references: tuple[Row, ...]

    @property
    def title(self) -> str:
        return f"{self.group.title}, {self.suite.title.lower()}"

    @property
    def rows(self) -> list[Row]:
        return [*(row for line in self.lines for _, row in line.rows), *self.references]

    def average(self, row: Row) -> Spread:
        """The suite's first average; of a suite without one, the first column that is an accuracy."""
        if self.suite.averages:
            found = row.average(self.suite.averages[0], self.suite)
        else:
            found = next((row.spread(column) for column in self.suite.columns if not column.is_low_better), None)
        return Spread(()) if found is None else found


def downstream_by_iterations(
    points: Sequence[DownstreamPoint], groups: Sequence[ModelGroup], suites: Sequence[Suite], wanted_mode: str | None
) -> Figure | None:
    """A panel for each suite and group of models with a swept number of iterations; None without any."""
    panels = swept_downstream(points, groups, suites, wanted_mode)
    if not panels:
        return None
    names = [(line.name, True) for panel in panels for line in panel.lines]
    names += [(row.name, False) for panel in panels for row in panel.references]
    series = series_of_names(names)
    drawn = tuple(
        Panel(panel.title, partial(_draw, panel=panel, series=series), f"{panel.title}: accuracy against iterations")
        for panel in panels
    )
    roles = tuple(dict.fromkeys(role for panel in panels for row in panel.rows for role in row.roles))
    return Figure(BY_ITERATIONS, "Downstream accuracy by iterations at test time", drawn, tuple(series.values()), roles)


def swept_downstream(
    points: Sequence[DownstreamPoint], groups: Sequence[ModelGroup], suites: Sequence[Suite], wanted_mode: str | None
) -> list[SweptPanel]:
    """What was swept, by suite and group of models."""
    swept = [point for point in points if point.sweep is not None and point.sweep["key"] == KEY and point.is_implicit]
    asked = suites_shown(suites, [(point.task, metric) for point in swept for metric in point.metrics])
    found = [_panel(suite, group, swept, points, wanted_mode) for suite in asked for group in groups]
    return [panel for panel in found if panel.lines]


def _panel(
    suite: Suite,
    group: ModelGroup,
    swept: Sequence[DownstreamPoint],
    points: Sequence[DownstreamPoint],
    wanted_mode: str | None,
) -> SweptPanel:
    mine = rows_of(group, [point for point in swept if point.task in suite.tasks])
    modes = {row.first.sweep["base"] for row in mine if row.first.sweep is not None}
    shown = headline_mode(modes, wanted_mode)
    by_name: dict[str, list[tuple[int, Row]]] = {}
    for row in mine:
        sweep = row.first.sweep
        if sweep is not None and sweep["base"] == shown:
            by_name.setdefault(row.name, []).append((sweep["value"], row))
    lines = tuple(Line(name, shown or "", tuple(sorted(rows, key=_value))) for name, rows in sorted(by_name.items()))
    trained_here = [p for p in points if p.task in suite.tasks and p.sweep is None and p.source is None]
    explicit = [p for p in trained_here if not p.is_implicit]
    references = tuple(sorted(rows_of(group, explicit), key=lambda row: row.name)) if lines else ()
    return SweptPanel(suite, group, lines, references)


def _value(item: tuple[int, Row]) -> int:
    return item[0]


def _draw(axis: Axes, panel: SweptPanel, series: Mapping[str, Series]) -> None:
    shown: list[float] = []
    for row in panel.references:
        mean = panel.average(row).mean
        if mean is not None:
            style = series[row.name]
            axis.axhline(mean, color=style.color, linestyle=(0, style.dashes or (3, 1.6)), linewidth=1.3)
            shown.append(mean)
    for line in panel.lines:
        shown += _draw_line(axis, panel, line, series[line.name])
    values = sorted({value for line in panel.lines for value, _ in line.rows})
    axis.set_xscale("log", base=2)
    axis.xaxis.set(major_locator=FixedLocator(values), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set(xlim=(values[0] / 1.25, values[-1] * 1.25), xlabel="iterations allowed for a block")
    axis.set_ylabel(panel.suite.averages[0].label + " accuracy" if panel.suite.averages else "accuracy")
    axis.grid(visible=False, axis="x")
    tell_if_empty(axis, shown)
    rows = [(line.name, value, row) for line in panel.lines for value, row in line.rows]
    lost = [f"{name} at {value}" for name, value, row in rows if not panel.average(row).values]
    tell_missing(axis, lost if shown else [])


def _draw_line(axis: Axes, panel: SweptPanel, line: Line, style: Series) -> list[float]:
    """The mean over seeds as a line, their range as a band, every seed as a point; returns the values."""
    present = [(value, panel.average(row)) for value, row in line.rows if panel.average(row).values]
    at = [value for value, _ in present]
    if any(len(spread.values) > 1 for _, spread in present):
        lows, highs = [spread.low for _, spread in present], [spread.high for _, spread in present]
        axis.fill_between(at, lows, highs, color=style.color, alpha=0.16, linewidth=0)  # type: ignore[arg-type]
        for value, spread in present:
            axis.plot([value] * len(spread.values), spread.values, ".", color=style.color, markersize=3, alpha=0.8)
    axis.plot(at, [spread.mean for _, spread in present], **style.line(), zorder=4)  # type: ignore[arg-type]
    return [number for _, spread in present for number in spread.values]


KIND, NAME = "lm_eval", "downstream"


def downstream_section(given: SectionInputs) -> Section | None:
    """Language models on tasks of the lm-eval harness."""
    points = points_of(given.inputs.records.get(KIND, ()))
    if not points:
        return None
    wanted = given.config.headline_mode
    groups = groups_of(points, given.inputs.training)
    tables = downstream_tables(points, groups, given.suites, given.published, wanted)
    files = {NAME: {"csv": _csv(tables), "tex": _latex(tables)}} if tables else {}
    figures = [downstream_by_iterations(points, groups, given.suites, wanted)]
    return Section(NAME, "sections/downstream.html.j2", tables, figures, files)


def _csv(tables: Sequence[DownstreamTable]) -> str:
    """One line a (model, mode, column); averages have no task. Empty where there is no number."""
    head = ["suite", "run", "model", "family", "num_parameters", "train_tokens", "phase", "solver", "mode", "column"]
    head += ["task", "metric", "chance", *spread_columns(["value"]), "num_seeds", "num_missing", "stderr"]
    head += ["num_documents", "num_fewshot", "f_evaluations_per_token", "task_version", "task_hash", "harness_version"]
    head += ["published", "published_mark"]
    return csv_text(head, (line for table in tables for row in table.rows for line in _csv_lines(table, row)))


def _csv_lines(table: DownstreamTable, row: Row) -> Iterator[list[object]]:
    point, group = row.first, next(block.group for block in table.blocks if row in block.rows)
    about: list[object] = [table.suite.name, point.run, "implicit" if point.is_implicit else "explicit", group.family]
    about += [point.num_parameters, point.train_tokens, point.phase, point.phase_label, point.mode]
    for column in table.suite.columns:
        spread = row.spread(column)
        if spread is not None:
            asked = next(point for point in row.points if point.task == column.task)
            named: list[object] = [column.label, column.task, column.metric, column.chance, *_numbers(spread)]
            tail: list[object] = [row.num_documents(column), asked.num_fewshot, rounded(asked.f_evaluations_per_token)]
            tail += [asked.task_version, asked.task_hash, asked.harness_version]
            yield [*about, *named, rounded(row.stderr(column)), *tail, *_published(row, column.label)]
    for average in table.suite.averages:
        spread = row.average(average, table.suite)
        if spread is not None:
            named = [average.label, None, None, None, *_numbers(spread)]
            yield [*about, *named, *[None] * 7, *_published(row, average.label)]


def _numbers(spread: Spread) -> list[object]:
    return [*spread_values(spread), len(spread.values), spread.num_missing]


def _published(row: Row, label: str) -> list[object]:
    known = row.published
    return [None, None] if known is None or label not in known.values else [known.values[label], known.mark]


def _latex(tables: Sequence[DownstreamTable]) -> str:
    """A table a suite: mean over seeds (range); needs the package booktabs."""
    return "\n".join(_latex_table(table) for table in tables)


def _latex_table(table: DownstreamTable) -> str:
    labels = [column.label for column in table.suite.columns] + [average.label for average in table.suite.averages]
    lines = [
        f"% {table.suite.title}, {_shots(table)}: mean over seeds (range)",
        rf"\begin{{tabular}}{{ll{'r' * len(labels)}}}",
        r"\toprule",
        " & ".join(["Model", "Mode", *map(escape, labels)]) + r" \\",
    ]
    for block in table.blocks:
        lines += [r"\midrule", rf"\multicolumn{{{len(labels) + 2}}}{{l}}{{{escape(block.group.title)}}} \\"]
        lines += [_latex_row(table, row) for row in block.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_row(table: DownstreamTable, row: Row) -> str:
    cells = [_latex_cell(row.spread(column), _form(column)) for column in table.suite.columns]
    cells += [_latex_cell(row.average(average, table.suite), ".4f") for average in table.suite.averages]
    return " & ".join([escape(row.name), escape(row.first.mode), *cells]) + r" \\"


def _latex_cell(spread: Spread | None, form: str) -> str:
    return "--" if spread is None else latex_spread(spread, form)


def _form(column: Column) -> str:
    return ".2f" if column.is_low_better else ".4f"


def _shots(table: DownstreamTable) -> str:
    return " and ".join("zero-shot" if shots == 0 else f"{shots}-shot" for shots in table.shots())
