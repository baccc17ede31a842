"""Downstream tasks: the table in the paper's columns, and the figure against iterations (paper, Fig. 1 centre)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_report.axes import tell_if_empty, tell_missing, ticks_at
from implicit_llm_report.charts import Line, draw_line
from implicit_llm_report.downstream import (
    Block,
    Column,
    DownstreamResults,
    DownstreamTable,
    Row,
    Suite,
    rows_of,
    suites_of,
)
from implicit_llm_report.frame import Group, roles_of
from implicit_llm_report.model_groups import ModelGroup
from implicit_llm_report.results import COST, Spread, headline_mode
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.style import Series, series_of_names
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import csv_of, escape, fields, latex_spread, rounded, spread_fields

BY_ITERATIONS, NAME = "downstream-by-iterations", "downstream"
KEY = "eval_max_iter"


@dataclass(frozen=True)
class SweptPanel:
    """One suite for one group of models in the mode `base`, with the explicit models as they are.

    `lines` has each implicit model by name and number of iterations.
    """

    suite: Suite
    group: ModelGroup
    base: str | None
    lines: Mapping[str, Mapping[float, Row]]
    references: Sequence[Row]

    @property
    def title(self) -> str:
        return f"{self.group.title}, {self.suite.title.lower()}"

    def average(self, row: Row) -> Spread:
        """The suite's first average; of a suite without one, the first column that is an accuracy."""
        if self.suite.averages:
            found = row.average(self.suite.averages[0], self.suite)
        else:
            found = next((row.spread(column) for column in self.suite.columns if not column.is_low_better), None)
        return Spread(()) if found is None else found

    @property
    def drawn(self) -> list[Line]:
        implicit = [
            Line(name, True, [(at, self.average(row)) for at, row in rows.items()], groups=_groups(rows.values()))
            for name, rows in self.lines.items()
        ]
        explicit = (Line(r.name, False, level=self.average(r), groups=[r.group]) for r in self.references)
        return [*implicit, *explicit]


def _groups(rows: Iterable[Row]) -> list[Group]:
    return [row.group for row in rows]


def downstream_by_iterations(panels: Sequence[SweptPanel]) -> Figure | None:
    """A panel for each suite and group of models with a swept number of iterations; None without any."""
    if not panels:
        return None
    lines = [line for panel in panels for line in panel.drawn]
    series = series_of_names((line.label, line.is_implicit) for line in lines)
    drawn = tuple(
        Panel(panel.title, partial(_draw, panel=panel, series=series), f"{panel.title}: accuracy against iterations")
        for panel in panels
    )
    roles = roles_of(group for line in lines for group in line.groups)
    return Figure(BY_ITERATIONS, "Downstream accuracy by iterations at test time", drawn, tuple(series.values()), roles)


def swept_downstream(found: DownstreamResults, wanted_mode: str | None) -> list[SweptPanel]:
    """What was swept, by suite and group of models."""
    is_implicit = found.rows["is_implicit"].astype(bool)
    swept = found.rows[(found.rows["swept"] == KEY) & is_implicit]
    explicit = found.rows[~is_implicit & found.rows["sweep"].isna() & found.rows["source"].isna()]
    panels = []
    for suite in suites_of(found.suites, swept):
        for group in found.groups:
            mine, beside = (rows[rows["task"].isin(suite.tasks)] for rows in (swept, explicit))
            panels.append(_panel(suite, group, mine, beside, wanted_mode))
    return [panel for panel in panels if panel.lines]


def _panel(
    suite: Suite, group: ModelGroup, swept: pd.DataFrame, explicit: pd.DataFrame, wanted_mode: str | None
) -> SweptPanel:
    mine = rows_of(group, swept)
    shown = headline_mode({row.group.base for row in mine}, wanted_mode)
    lines: dict[str, dict[float, Row]] = {}
    for row in sorted(mine, key=lambda row: (row.name, row.group.at)):
        if row.group.base == shown:
            lines.setdefault(row.name, {})[row.group.at] = row
    references = sorted(rows_of(group, explicit), key=lambda row: row.name)
    return SweptPanel(suite, group, shown, lines, references)


def _draw(axis: Axes, panel: SweptPanel, series: Mapping[str, Series]) -> None:
    lines = panel.drawn
    for line in lines:
        draw_line(axis, line, series[line.label])
    values = sorted({at for rows in panel.lines.values() for at in rows})
    axis.set_xscale("log", base=2)
    ticks_at(axis, values)
    axis.set(xlim=(values[0] / 1.25, values[-1] * 1.25), xlabel="iterations allowed for a block")
    axis.set_ylabel(panel.suite.averages[0].label + " accuracy" if panel.suite.averages else "accuracy")
    axis.grid(visible=False, axis="x")
    shown = [value for line in lines for spread in line.spreads for value in spread.values]
    tell_if_empty(axis, shown)
    tell_missing(axis, [words for line in lines for words in line.missing] if shown else [])


def downstream_section(given: SectionInputs) -> Section | None:
    """Language models on tasks of the lm-eval harness."""
    found = given.downstream
    if found.rows.empty:
        return None
    files = {NAME: {"csv": _csv(found.tables), "tex": _latex(found.tables)}} if found.tables else {}
    figures = [downstream_by_iterations(swept_downstream(found, given.config.headline_mode))]
    return Section(NAME, "sections/downstream.html.j2", found.tables, figures, files)


def _csv(tables: Sequence[DownstreamTable]) -> str:
    """One line a (model, mode, column); averages have no task. Empty where there is no number."""
    return csv_of(
        line
        for table in tables
        for block in table.blocks
        for row in block.rows
        for line in _csv_lines(table, block, row)
    )


def _csv_lines(table: DownstreamTable, block: Block, row: Row) -> Iterator[dict[str, object]]:
    about = {
        **{"suite": table.suite.name, **fields(row.group, "run", "model"), "family": block.group.family},
        **fields(row.group, "num_parameters", "train_tokens", "phase", "solver", "mode"),
    }
    for column in table.suite.columns:
        asked, spread = row.asked(column), row.spread(column)
        if asked is not None and spread is not None:
            yield {
                **{**about, "column": column.label, "task": column.task, "metric": column.metric},
                **{"chance": column.chance, **_numbers(spread), "stderr": rounded(row.stderr(column))},
                **{"num_documents": row.num_documents(column), **fields(asked, "num_fewshot")},
                COST: rounded(asked.spread(COST).mean),
                **fields(asked, "task_version", "task_hash", "harness_version"),
                **_published(row, column.label),
            }
    for average in table.suite.averages:
        spread = row.average(average, table.suite)
        if spread is not None:
            yield {**about, "column": average.label, **_numbers(spread), **_published(row, average.label)}


def _numbers(spread: Spread) -> dict[str, object]:
    counts = {"num_seeds": len(spread.values), "num_missing": spread.num_missing}
    return {**spread_fields(["value"], lambda _: spread), **counts}


def _published(row: Row, label: str) -> dict[str, object]:
    known = row.published if row.published is not None and label in row.published.values else None
    return {"published": known and known.values[label], "published_mark": known and known.mark}


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
    return " & ".join([escape(row.name), escape(row.group.mode), *cells]) + r" \\"


def _latex_cell(spread: Spread | None, form: str) -> str:
    return "--" if spread is None else latex_spread(spread, form)


def _form(column: Column) -> str:
    return ".2f" if column.is_low_better else ".4f"


def _shots(table: DownstreamTable) -> str:
    return " and ".join("zero-shot" if shots == 0 else f"{shots}-shot" for shots in table.shots())
