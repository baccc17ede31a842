"""Duality: do a model's ways of reading agree, as a table, and how fast it converges, as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from implicit_llm.report.convergence_figure import convergence_by_iteration
from implicit_llm.report.duality_results import DualityRow, DualityTable, duality_tables
from implicit_llm.report.section import Section, SectionInputs
from implicit_llm.report.table_text import (
    csv_text,
    escape,
    in_percent,
    latex_spread,
    rounded,
    spread_columns,
    spread_values,
)

NAME = "duality"
MEASURES = ("token_agreement", "logit_distance_mean", "logit_distance_max", "logit_std", "kl")
COSTS = ("f_evaluations_per_token", "against_f_evaluations_per_token", "unconverged_share")


def duality_section(given: SectionInputs) -> Section | None:
    """Agreement of every two modes, beside the published number."""
    records = given.inputs.records.get(NAME, ())
    tables = duality_tables(records, given.published)
    if not tables:
        return None
    files = {NAME: {"csv": _csv(tables), "tex": _latex(tables)}}
    return Section(NAME, "sections/duality.html.j2", tables, [convergence_by_iteration(records)], files)


def _csv(tables: Sequence[DualityTable]) -> str:
    """One line a (model, data, length, pair of modes)."""
    head = ["run", "model", "family", "num_parameters", "phase", "solver", "data", "length", "mode", "against"]
    head += ["num_seeds", "num_tokens", *spread_columns((*MEASURES, *COSTS)), "published_agreement", "published_mark"]
    return csv_text(head, (_csv_row(row) for table in tables for row in table.rows))


def _csv_row(row: DualityRow) -> Iterator[object]:
    point = row.first
    kind = "implicit" if point.is_implicit else "explicit"
    yield from (point.run, kind, point.family, point.num_parameters, point.phase, point.phase_label)
    yield from (point.data, point.length, point.mode, point.against, len(row.agreement.values), point.num_tokens)
    for measure in (*MEASURES, *COSTS):
        yield from spread_values(row.cell.spread(measure))
    yield from (None, None) if row.published is None else (row.published.value, row.published.mark)


def _latex(tables: Sequence[DualityTable]) -> str:
    """The tables for a paper; needs the package booktabs."""
    return "\n".join(_latex_table(table) for table in tables)


def _latex_table(table: DualityTable) -> str:
    lines = [
        f"% {table.data}, rows of {table.length} tokens: agreement of modes in percent, mean over seeds (range)",
        r"\begin{tabular}{lllrrrr}",
        r"\toprule",
        r"Model & Mode & Against & Same token & Logit distance & KL & Published \\",
        r"\midrule",
        *(_latex_row(row) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        "",
    ]
    return "\n".join(lines)


def _latex_row(row: DualityRow) -> str:
    distance, divergence = (rounded(row.cell.spread(measure).mean) for measure in ("logit_distance_mean", "kl"))
    shown = ["missing" if value is None else f"{value:.2g}" for value in (distance, divergence)]
    published = "" if row.published is None else f"{100 * row.published.value:.1f}"
    names = [escape(row.name), escape(row.first.mode), escape(row.first.against or "")]
    return " & ".join([*names, latex_spread(in_percent(row.agreement), ".2f"), *shown, published]) + r" \\"
