"""Answers to CatbAbI's questions as tables: tasks down, models across."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from implicit_llm.report.babi_choice import chosen_variants, marked_name
from implicit_llm.report.babi_results import (
    PROTOCOL_WORDS,
    BabiCell,
    BabiResults,
    task_spread,
    tasks_asked,
    word_spread,
)
from implicit_llm.report.published import Published
from implicit_llm.report.results import Spread
from implicit_llm.report.table_text import (
    csv_text,
    escape,
    in_percent,
    latex_spread,
    rounded,
    spread_columns,
    spread_values,
)

# Weston et al. 2015, Table 1.
TASK_NAMES = {
    1: "single supporting fact", 2: "two supporting facts", 3: "three supporting facts", 4: "two argument relations",
    5: "three argument relations", 6: "yes/no questions", 7: "counting", 8: "lists/sets", 9: "simple negation",
    10: "indefinite knowledge", 11: "basic coreference", 12: "conjunction", 13: "compound coreference",
    14: "time reasoning", 15: "basic deduction", 16: "basic induction", 17: "positional reasoning",
    18: "size reasoning", 19: "path finding", 20: "agent's motivations",
}  # fmt: skip


@dataclass(frozen=True)
class BabiRow:
    """One task, or all of them (None): a spread for each model of the table; of the validation set only all of them."""

    task: int | None
    spreads: tuple[Spread, ...]
    validation_set: str | None = None

    @property
    def is_validation(self) -> bool:
        return self.validation_set is not None

    @property
    def name(self) -> str:
        if self.is_validation:
            return "all questions of the validation set"
        return "all questions" if self.task is None else f"{self.task}. {TASK_NAMES.get(self.task, 'task')}"


@dataclass(frozen=True)
class BabiTable:
    """The models on one test set in one protocol; each in every mode, the one that speaks for it marked.

    is_headline: this protocol speaks for the models in the figure and the claims. chosen: the runs that the validation
    set chose of several; its numbers are one row, the last.
    """

    data: str
    protocol: str | None
    is_headline: bool
    cells: tuple[BabiCell, ...]
    names: tuple[str, ...]
    headlines: tuple[bool, ...]
    chosen: tuple[bool, ...]
    rows: tuple[BabiRow, ...]

    @property
    def protocol_words(self) -> str:
        return PROTOCOL_WORDS.get(self.protocol or "", self.protocol or "protocol not recorded")

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for cell in self.cells for role in cell.roles))


def babi_tables(results: BabiResults) -> list[BabiTable]:
    """One table a test set and protocol."""
    return [_table(results, data, protocol) for data in results.test_sets for protocol in results.protocols(data)]


def _table(results: BabiResults, data: str, protocol: str | None) -> BabiTable:
    cells = results.of(data, protocol)
    rows = [BabiRow(None, tuple(cell.spread("accuracy") for cell in cells))]
    rows += [BabiRow(task, tuple(task_spread(cell, task) for cell in cells)) for task in tasks_asked(cells)]
    validation = tuple(results.validation(cell) for cell in cells)
    if any(spread.values for spread in validation):
        validation_set = next(name for cell in cells if (name := results.validation_set(cell)))
        rows.append(BabiRow(None, validation, validation_set))
    variants = chosen_variants(results, data)
    chosen = tuple(cell.first.variant in variants for cell in cells)
    names = tuple(marked_name(results, cell) for cell in cells)
    headlines = tuple(results.is_headline(cell) for cell in cells)
    speaks = protocol == results.headline_protocol(data)
    return BabiTable(data, protocol, speaks, tuple(cells), names, headlines, chosen, tuple(rows))


def babi_csv(tables: Sequence[BabiTable], published: Published) -> str:
    """One line a (model, mode, task), task 0 for all questions; then the yardsticks of other papers.

    Column `split` tells the lines of the validation set from those of the test set.
    """
    about = ["run", "model", "family", "num_layers", "num_parameters", "phase", "solver", "data"]
    about += ["protocol", "mode", "split", "is_chosen"]
    counts = ["num_seeds", "task", "num_questions"]
    words = spread_columns(["lm_accuracy", "lm_perplexity"])
    head = [*about, *counts, *spread_columns(["accuracy"]), *words, "f_evaluations_per_token_mean", "source", "mark"]
    return csv_text(head, _csv_rows(tables, published))


def _csv_rows(tables: Sequence[BabiTable], published: Published) -> Iterator[list[object]]:
    for table in tables:
        for index, cell in enumerate(table.cells):
            for row in table.rows:
                yield _csv_row(cell, row, row.spreads[index], is_chosen=table.chosen[index])
    for number in published.babi:
        about = [
            number.model,
            None,
            None,
            number.num_layers,
            None,
            None,
            None,
            None,
            None,
            number.training,
            "test",
            None,
        ]
        accuracy = rounded(number.value / 100)
        yield [*about, None, 0, None, accuracy, *[None] * 9, number.source, number.mark]


def _csv_row(cell: BabiCell, row: BabiRow, spread: Spread, *, is_chosen: bool) -> list[object]:
    point = cell.first
    kind = "implicit" if point.is_implicit else "explicit"
    questions = point.num_questions if row.task is None else (point.num_questions_by_task or {}).get(str(row.task))
    words: list[object] = [None] * 6
    cost = rounded(cell.spread("f_evaluations_per_token").mean)
    data, split = point.data, "test"
    if row.validation_set is not None:
        data, split, questions, cost = row.validation_set, "validation", None, None
    else:
        spreads = [word_spread(cell, row.task, is_perplexity=is_perplexity) for is_perplexity in (False, True)]
        words = [value for spread in spreads for value in spread_values(spread)]
    return [
        *(point.run, kind, point.family, point.num_layers, point.num_parameters, point.phase, point.phase_label),
        *(data, point.protocol, point.mode, split, int(is_chosen), len(spread.values), row.task or 0, questions),
        *(*spread_values(spread), *words, cost, None, None),
    ]


def babi_latex(tables: Sequence[BabiTable], published: Published) -> str:
    """The tables for a paper, models in the mode that speaks for them; needs the package booktabs."""
    return "\n".join(_latex_table(table, published) for table in tables)


def _latex_table(table: BabiTable, published: Published) -> str:
    shown = [index for index, is_headline in enumerate(table.headlines) if is_headline]
    heads = " & ".join(escape(table.names[index]) for index in shown)
    lines = [
        f"% CatbAbI, {table.data}, {table.protocol_words}: accuracy at questions in percent, mean over seeds (range)",
        rf"\begin{{tabular}}{{l{'r' * len(shown)}}}",
        r"\toprule",
        rf"Task & {heads} \\",
        r"\midrule",
    ]
    for row in table.rows:
        values = " & ".join(latex_spread(in_percent(row.spreads[index]), ".1f") for index in shown)
        lines.append(rf"{escape(row.name)} & {values} \\")
    lines.append(r"\midrule")
    for number in published.babi:
        name = number.model if number.num_layers is None else f"{number.model}, {number.num_layers} layer(s)"
        text = f"{escape(name)} ({number.training}): {number.value:.2f}"
        lines.append(rf"\multicolumn{{{1 + len(shown)}}}{{l}}{{{text}}} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
