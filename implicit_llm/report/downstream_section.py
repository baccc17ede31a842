"""Downstream tasks: the table in the paper's columns, and the figure against iterations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from implicit_llm.report.downstream_figure import downstream_by_iterations
from implicit_llm.report.downstream_results import DownstreamTable, Row, downstream_tables, groups_of, points_of
from implicit_llm.report.downstream_suites import Column
from implicit_llm.report.results import Spread
from implicit_llm.report.section import Section, SectionInputs
from implicit_llm.report.table_text import csv_text, escape, latex_spread, rounded, spread_columns, spread_values

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
