"""Perplexities as tables: for the page, as CSV (everything) and as LaTeX with booktabs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from implicit_llm_report.model_groups import short_count
from implicit_llm_report.perplexity import (
    Comparison,
    EqualFlops,
    Line,
    PerplexityCell,
    PerplexityResults,
    at_equal_flops,
    flops_of,
    tokens_of,
)
from implicit_llm_report.published import Published, PublishedPerplexity
from implicit_llm_report.results import Spread
from implicit_llm_report.table_text import csv_text, escape, latex_spread, rounded, spread_columns, spread_values
from implicit_llm_report.training_runs import TrainingRun

CSV_METRICS = (
    "perplexity", "loss", "perplexity_within_documents", "f_evaluations_per_token", "residual", "unconverged_share",
)  # fmt: skip


@dataclass(frozen=True)
class PerplexityEntry:
    """One measured perplexity and the published one of the same thing.

    `first_tokens`: how many tokens it was measured on, where others at this length saw more; such a number is not to be
    compared with theirs.
    """

    cell: PerplexityCell
    published: PublishedPerplexity | None
    first_tokens: int | None = None

    @property
    def perplexity(self) -> Spread:
        return self.cell.spread("perplexity")

    @property
    def within_documents(self) -> Spread:
        """Without the tokens that start a document."""
        return self.cell.spread("perplexity_within_documents")

    @property
    def cost(self) -> Spread:
        return self.cell.spread("f_evaluations_per_token")


@dataclass(frozen=True)
class PerplexityRow:
    """One line of a comparison; `entries` in the order of the table's lengths, None where it was not evaluated.

    `relative_flops`: training FLOPs over those of the explicit run that took the fewest.
    """

    name: str
    line: Line
    is_headline: bool
    relative_flops: float | None
    entries: tuple[PerplexityEntry | None, ...]

    @property
    def seeds(self) -> Spread:
        """The length with the most numbers says how many seeds there are."""
        spreads = [entry.perplexity for entry in self.entries if entry is not None]
        return max(spreads, key=lambda spread: len(spread.values))

    @property
    def tokens(self) -> float | None:
        return tokens_of(self.line)

    @property
    def flops(self) -> float | None:
        return flops_of(self.line)


@dataclass(frozen=True)
class PerplexityTable:
    """Perplexity by length of one group of models on one test set, and the comparison at equal FLOPs."""

    comparison: Comparison
    lengths: tuple[int, ...]
    rows: tuple[PerplexityRow, ...]
    equal_flops: tuple[EqualFlops, ...]


def perplexity_tables(
    results: PerplexityResults, training: Sequence[TrainingRun], published: Published
) -> list[PerplexityTable]:
    """One table a family, size and test set."""
    tables = []
    for comparison in results.comparisons:
        rows = tuple(_row(comparison, line, published) for line in comparison.lines)
        equal = tuple(at_equal_flops(comparison, training))
        tables.append(PerplexityTable(comparison, comparison.lengths, rows, equal))
    return tables


def _row(comparison: Comparison, line: Line, published: Published) -> PerplexityRow:
    cells = {cell.first.length: cell for cell in line.cells}
    entries = tuple(
        _entry(comparison, cells[length], published) if length in cells else None for length in comparison.lengths
    )
    name, is_headline = comparison.name(line), comparison.is_headline(line)
    return PerplexityRow(name, line, is_headline, _relative_flops(comparison, line), entries)


def _entry(comparison: Comparison, cell: PerplexityCell, published: Published) -> PerplexityEntry:
    point = cell.first
    others = (other for line in comparison.lines for other in line.cells if other.first.length == point.length)
    most = max(other.first.num_tokens or 0 for other in others)
    num_tokens = point.num_tokens or None
    first_tokens = num_tokens if num_tokens is not None and num_tokens < most else None
    return PerplexityEntry(cell, published.perplexity_beside(point), first_tokens)


def _relative_flops(comparison: Comparison, line: Line) -> float | None:
    flops = flops_of(line)
    explicit = [flops_of(other) for other in comparison.headlines if not other.variant.is_implicit]
    least = min((other for other in explicit if other), default=None)
    return flops / least if flops and least else None


def perplexity_csv(tables: Sequence[PerplexityTable]) -> str:
    """One line a (run, phase, test set, mode, length) in the block "held-out", then the block "equal FLOPs"."""
    about = ["block", "data", "family", "run", "model", "phase", "solver", "compared_with", "mode", "length"]
    counts = ["num_seeds", "num_tokens", "num_parameters", "train_tokens", "train_flops", "relative_flops"]
    head = [*about, *counts, *spread_columns(CSV_METRICS), "published_perplexity", "published_mark"]
    return csv_text(head, (row for table in tables for row in _csv_rows(table)))


def _csv_rows(table: PerplexityTable) -> Iterator[list[object]]:
    for row in table.rows:
        for entry in row.entries:
            if entry is not None:
                yield _csv_row(table, row, entry)
    for equal in table.equal_flops:
        for mine, other, spread in (
            (equal.implicit, equal.explicit, equal.of_implicit),
            (equal.explicit, equal.implicit, equal.of_explicit),
        ):
            yield _equal_csv_row(table, equal, (mine, other), spread)


def _csv_row(table: PerplexityTable, row: PerplexityRow, entry: PerplexityEntry) -> list[object]:
    point, number = entry.cell.first, entry.published
    values = [value for metric in CSV_METRICS for value in spread_values(entry.cell.spread(metric))]
    return [
        *("held-out", point.data, table.comparison.group.family, *_about(row.line), None, point.mode, point.length),
        *(len(entry.perplexity.values), point.num_tokens, point.num_parameters),
        *(rounded(row.tokens), rounded(row.flops), rounded(row.relative_flops), *values),
        *((number.value, number.mark) if number else (None, None)),
    ]


def _equal_csv_row(table: PerplexityTable, equal: EqualFlops, lines: tuple[Line, Line], spread: Spread) -> list[object]:
    """The loss of such a row is the smoothed training loss; its perplexity, where there is one, is held out."""
    mine, other = lines
    point = mine.first
    nothing = Spread(())
    perplexity, loss = (spread, nothing) if equal.metric == "perplexity" else (nothing, spread)
    values = [*spread_values(perplexity), *spread_values(loss), *[None] * (3 * (len(CSV_METRICS) - 2))]
    compared = table.comparison.name(other)
    return [
        *("equal FLOPs", point.data, table.comparison.group.family, *_about(mine), compared, mine.mode, equal.length),
        *(len(spread.values), None, point.num_parameters, None, rounded(equal.flops), 1.0, *values, None, None),
    ]


def _about(line: Line) -> tuple[object, ...]:
    variant = line.variant
    kind = "implicit" if variant.is_implicit else "explicit"
    return variant.run, kind, variant.phase, variant.phase_label


def perplexity_latex(tables: Sequence[PerplexityTable]) -> str:
    """The tables for a paper; needs the package booktabs."""
    return "\n".join(_latex_table(table) for table in tables)


def _latex_table(table: PerplexityTable) -> str:
    heads = " & ".join(f"$L={length}$" for length in table.lengths)
    lines = [
        f"% {table.comparison.title}: held-out perplexity, mean over seeds (range); * on the first rows only",
        rf"\begin{{tabular}}{{ll{'r' * (4 + len(table.lengths))}}}",
        r"\toprule",
        rf"Model & Mode & Seeds & Parameters & Tokens & FLOPs & {heads} \\",
        r"\midrule",
        *(_latex_row(row) for row in table.rows),
        *_latex_published(table),
    ]
    if table.equal_flops:
        columns = 6 + len(table.lengths)
        lines += [r"\midrule", rf"\multicolumn{{{columns}}}{{l}}{{At equal training FLOPs}} \\"]
        lines += [_latex_equal(table, equal, columns) for equal in table.equal_flops]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_row(row: PerplexityRow) -> str:
    first = row.line.first
    numbers = [
        str(len(row.seeds.values)),
        "--" if first.num_parameters is None else short_count(first.num_parameters),
        "--" if row.tokens is None else short_count(row.tokens),
        "--" if row.relative_flops is None else rf"{row.relative_flops:.3g}$\times$",
    ]
    entries = ["" if entry is None else _latex_entry(entry) for entry in row.entries]
    return " & ".join([escape(row.name), escape(row.line.mode), *numbers, *entries]) + r" \\"


def _latex_entry(entry: PerplexityEntry) -> str:
    return latex_spread(entry.perplexity, ".2f") + ("$^*$" if entry.first_tokens else "")


def _latex_published(table: PerplexityTable) -> Iterator[str]:
    """A line below for each row that has a published number."""
    for row in table.rows:
        numbers = [entry.published if entry else None for entry in row.entries]
        if any(numbers):
            values = " & ".join("" if number is None else f"{number.value:.2f}" for number in numbers)
            yield rf"{escape(row.name)} & published & & & & & {values} \\"


def _latex_equal(table: PerplexityTable, equal: EqualFlops, columns: int) -> str:
    names = [escape(table.comparison.name(line)) for line in (equal.implicit, equal.explicit)]
    what = equal.metric if equal.length is None else f"{equal.metric} at $L={equal.length}$"
    form = ".3f" if equal.length is None else ".2f"
    values = [latex_spread(spread, form) for spread in (equal.of_implicit, equal.of_explicit)]
    text = f"{what}, {equal.flops:.3g} FLOPs: {names[0]} {values[0]}, {names[1]} {values[1]}"
    return rf"\multicolumn{{{columns}}}{{l}}{{{text}}} \\"
