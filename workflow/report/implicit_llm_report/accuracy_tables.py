"""The accuracies as tables: for the page, as CSV (everything) and as LaTeX with booktabs (what a paper prints)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from implicit_llm_contracts.runs.natural_order import natural
from implicit_llm_report.accuracy_figures import Setting, settings_of
from implicit_llm_report.published import Published, PublishedNumber
from implicit_llm_report.results import COST, LAST_TEN, BestSeed, Cell, Results, Spread, mode_rank
from implicit_llm_report.table_text import csv_text, escape, spread_columns, spread_values

CSV_METRICS = (
    "accuracy_last10", "accuracy_sequence", "accuracy_token", "f_evaluations_per_token", "iterations_per_token",
    "residual", "unconverged_share", "token_match_sequential",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One measured number with its cost and the published number of the same thing."""

    cell: Cell
    published: PublishedNumber | None

    @property
    def accuracy(self) -> Spread:
        return self.cell.spread(LAST_TEN)

    @property
    def best(self) -> BestSeed | None:
        return self.cell.best(LAST_TEN)

    @property
    def cost(self) -> Spread:
        return self.cell.spread(COST)


@dataclass(frozen=True)
class Row:
    """A run in one mode; `entries` are in the order of the table's lengths, None where it was not evaluated."""

    run: str
    mode: str
    is_headline: bool
    entries: tuple[Entry | None, ...]

    @property
    def present(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry is not None)

    @property
    def first(self) -> Cell:
        return self.present[0].cell

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for entry in self.present for role in entry.cell.roles))


@dataclass(frozen=True)
class Table:
    """Accuracy by length for one task and share of hard tokens."""

    setting: Setting
    lengths: tuple[int, ...]
    train_lengths: tuple[int, ...]
    chance: tuple[float | None, ...]
    rows: tuple[Row, ...]


def accuracy_tables(results: Results, published: Published) -> list[Table]:
    """One table a setting, in the order of the figures; implicit runs first, each with its headline mode first."""
    tables = []
    for setting in settings_of(results.cells, results):
        cells = [
            c for c in results.cells if (c.first.task, c.first.hard_fractions) == (setting.task, setting.hard_fractions)
        ]
        lengths = tuple(sorted({cell.first.length for cell in cells}))
        chance = {cell.first.length: cell.first.chance_last10 for cell in cells}
        keys = sorted({(c.first.run, c.first.mode) for c in cells}, key=lambda key: _row_order(key, cells, results))
        rows = tuple(_row(key, cells, lengths, results, published) for key in keys)
        train_lengths = tuple(sorted({cell.first.train_length for cell in cells if cell.first.train_length}))
        tables.append(Table(setting, lengths, train_lengths, tuple(chance[length] for length in lengths), rows))
    return tables


def _row_order(key: tuple[str, str], cells: list[Cell], results: Results) -> tuple:
    run, mode = key
    is_implicit = next(cell.first.is_implicit for cell in cells if cell.first.run == run)
    return (not is_implicit, natural(run), mode != results.headline_of(run), mode_rank(mode))


def _row(
    key: tuple[str, str], cells: list[Cell], lengths: tuple[int, ...], results: Results, published: Published
) -> Row:
    by_length = {
        c.first.length: Entry(c, published.beside(c.first, LAST_TEN))
        for c in cells
        if (c.first.run, c.first.mode) == key
    }
    return Row(
        key[0], key[1], key[1] == results.headline_of(key[0]), tuple(by_length.get(length) for length in lengths)
    )


def to_csv(results: Results, published: Published) -> str:
    """Every number, one line a (run, data set, mode); empty where there is none."""
    about = [
        "run",
        "model",
        "num_layers",
        "num_parameters",
        "group",
        "monoid",
        "hard_fraction",
        "length",
        "train_length",
        "mode",
    ]
    counts = ["num_seeds", "num_samples", "chance_last10"]
    best = ["best_seed", "accuracy_last10_by_seed"]
    head = [*about, *counts, *spread_columns(CSV_METRICS), *best, "published_accuracy_last10", "published_mark"]
    return csv_text(head, (_csv_values(cell, published) for cell in results.cells))


def _csv_values(cell: Cell, published: Published) -> Iterator[object]:
    point = cell.first
    yield from (point.run, "implicit" if point.is_implicit else "explicit", point.num_layers, point.num_parameters)
    yield from (
        point.group,
        point.monoid,
        " ".join(f"{f:g}" for f in point.hard_fractions),
        point.length,
        point.train_length,
        point.mode,
    )
    yield from (len(cell.spread(LAST_TEN).values), point.num_samples, point.chance_last10)
    for metric in CSV_METRICS:
        yield from spread_values(cell.spread(metric))
    best = cell.best(LAST_TEN)
    yield from (None if best is None else best.seed, _by_seed(cell))
    number = published.beside(point, LAST_TEN)
    yield from (number.value, number.mark) if number else (None, None)


def _by_seed(cell: Cell) -> str | None:
    """ "0: 0.991; 1: missing": every seed, none left out."""
    if len(cell.points) < 2:
        return None
    values = ((point.seed, point.accuracy_last10) for point in cell.points)
    return "; ".join(f"{seed}: {'missing' if value is None else f'{value:.6g}'}" for seed, value in values)


def to_latex(tables: list[Table]) -> str:
    """The tables for a paper; needs the package booktabs."""
    return "\n".join(_latex_table(table) for table in tables)


def _latex_table(table: Table) -> str:
    heads = " & ".join(f"$L={length}$" for length in table.lengths)
    lines = [
        f"% {table.setting.title.replace('×', 'x')}: accuracy on the last ten tokens, mean over seeds (range, "
        "best seed); f-evaluations per token",
        rf"\begin{{tabular}}{{ll{'r' * len(table.lengths)}}}",
        r"\toprule",
        rf"Model & Mode & {heads} \\",
        r"\midrule",
    ]
    for row in table.rows:
        cells = " & ".join(_latex_entry(entry) for entry in row.entries)
        lines.append(rf"{escape(row.run)} & {escape(row.mode)} & {cells} \\")
    chance = " & ".join("--" if value is None else f"{value:.3f}" for value in table.chance)
    lines += [
        r"\midrule",
        rf"\multicolumn{{2}}{{l}}{{best constant answer}} & {chance} \\",
        r"\bottomrule",
        r"\end{tabular}",
        "",
    ]
    return "\n".join(lines)


def _latex_entry(entry: Entry | None) -> str:
    if entry is None:
        return ""
    mean, cost = entry.accuracy.mean, entry.cost.mean
    if mean is None:
        return "missing"
    low, high = entry.accuracy.low, entry.accuracy.high
    spread = f" ({low:.3f}--{high:.3f}, seed {entry.best.seed})" if entry.best else ""
    return f"{mean:.3f}{spread}" + (f"; {cost:.3g}" if cost is not None else "")
