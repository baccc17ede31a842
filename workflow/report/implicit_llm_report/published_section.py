"""Every published number, with its source and its mark, and beside it ours where it is of the same thing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from implicit_llm_report.downstream import DownstreamTable, Row
from implicit_llm_report.duality import duality_tables
from implicit_llm_report.frame import groups, roles_of
from implicit_llm_report.measures import METRIC_WORDS
from implicit_llm_report.model_groups import short_count
from implicit_llm_report.published import PublishedDownstream, PublishedNumber, PublishedPerplexity
from implicit_llm_report.results import Spread
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.table_text import csv_of, escape, latex_spread, spread_fields

NAME = "published"


@dataclass(frozen=True)
class PublishedRow:
    """One number or statement; `ours` None where there is no measurement of the same thing, `form` how it is shown."""

    id: str
    part: str
    what: str
    value: float | str | None
    mark: str
    source: str
    note: str | None = None
    ours: Spread | None = None
    roles: tuple[str, ...] = ()
    form: str = ".3f"

    @property
    def text(self) -> str:
        """The published value; empty where it is not known."""
        if self.value is None or isinstance(self.value, str):
            return self.value or ""
        return f"{self.value:{self.form}}"


def published_section(given: SectionInputs) -> Section:
    """A row a number; those with one of ours beside them come first."""
    rows = list(published_rows(given))
    rows.sort(key=lambda row: row.ours is None)
    return Section(
        NAME,
        "sections/published.html.j2",
        rows,
        files={NAME: {"csv": csv_of(map(_csv_row, rows)), "tex": _latex(rows)}},
    )


def published_rows(given: SectionInputs) -> Iterator[PublishedRow]:
    """In the order of the file."""
    published = given.published
    yield from (_word_problem(entry, given) for entry in published.numbers)
    yield from (_perplexity(entry, given) for entry in published.perplexities)
    yield from _downstream(given)
    for yard in published.babi:
        layers = f", {yard.num_layers} layer{'s' if yard.num_layers != 1 else ''}" if yard.num_layers else ""
        trained = "answers only" if yard.training == "qa" else "all words"
        what = f"{yard.model}{layers}, trained on {trained}: accuracy at all questions in percent"
        yield PublishedRow(yard.id, "CatbAbI", what, yard.value, yard.mark, yard.source, form=".2f")
    tables = duality_tables(given.inputs.frame, published)
    for entry in published.duality:
        beside = [row for table in tables for row in table.rows if row.published == entry]
        model = f"{entry.family} {short_count(entry.num_parameters)}"
        what = f"{model}: share of tokens alike in simultaneous and sequential mode"
        ours = _together(row.group.spread("token_agreement") for row in beside) if beside else None
        roles = tuple(role for row in beside for role in row.group.roles)
        yield PublishedRow(entry.id, "duality", what, entry.value, entry.mark, entry.source, None, ours, roles)
    for fact in published.facts:
        yield PublishedRow(fact.id, fact.part, fact.what, fact.value, fact.mark, fact.source)


def _together(spreads: Iterable[Spread]) -> Spread:
    spreads = list(spreads)
    return Spread(tuple(v for spread in spreads for v in spread.values), sum(s.num_missing for s in spreads))


def _word_problem(entry: PublishedNumber, given: SectionInputs) -> PublishedRow:
    task = entry.group if entry.monoid == "none" else f"{entry.group} × {entry.monoid}"
    what = (
        f"{task}, {entry.num_layers}-layer {entry.model}, trained at {entry.train.length} with "
        f"{100 * entry.train.hard_fraction:g} % hard, tested at {entry.test.length} with "
        f"{100 * entry.test.hard_fraction:g} % hard, {entry.mode}: {METRIC_WORDS.get(entry.metric, entry.metric)}"
    )
    beside = [cell for cell in groups(given.words, ("run", "phase", "data", "mode")) if entry.is_beside(cell)]
    ours = _together(cell.spread(entry.metric) for cell in beside) if beside else None
    roles = roles_of(beside)
    return PublishedRow(entry.id, "word problems", what, entry.value, entry.mark, entry.source, entry.note, ours, roles)


def _perplexity(entry: PublishedPerplexity, given: SectionInputs) -> PublishedRow:
    what = (
        f"{entry.family} {entry.solver.label if entry.solver else 'explicit'}, {short_count(entry.num_parameters)}, "
        f"{short_count(entry.train_tokens)} tokens of {entry.train_data}: perplexity on {entry.test_data}, "
        f"rows of {entry.length}"
    )
    lines = [line for comparison in given.perplexities.comparisons for line in comparison.headlines]
    beside = [cell for line in lines for cell in line.cells("length").values() if entry.is_beside(cell)]
    ours = _together(cell.spread("perplexity") for cell in beside) if beside else None
    roles = roles_of(beside)
    return PublishedRow(
        entry.id, "perplexity", what, entry.value, entry.mark, entry.source, entry.note, ours, roles, ".2f"
    )


def _downstream(given: SectionInputs) -> Iterator[PublishedRow]:
    for entry in given.published.downstream:
        beside = [
            (table, row)
            for table in given.downstream.tables
            for row in table.rows
            if table.suite.name == entry.suite and row.group.is_headline and row.published == entry
        ]
        for label, value in entry.values.items():
            yield _downstream_row(entry, label, value, beside)


def _downstream_row(
    entry: PublishedDownstream, label: str, value: float, beside: Iterable[tuple[DownstreamTable, Row]]
) -> PublishedRow:
    model = f"{entry.family} {entry.solver.label if entry.solver else 'explicit'}, {short_count(entry.num_parameters)}"
    what = f"{model}, {short_count(entry.train_tokens)} tokens of {entry.train_data}: {label}"
    found = [(row, spread) for table, row in beside if (spread := _of_label(table, row, label)) is not None]
    ours = _together(spread for _, spread in found) if found else None
    roles = roles_of(row.group for row, _ in found)
    form = ".2f" if label.endswith("ppl") else ".4f"
    name = f"{entry.id}-{label.lower().replace(' ', '-')}"
    return PublishedRow(name, "downstream", what, value, entry.mark, entry.source, entry.note, ours, roles, form)


def _of_label(table: DownstreamTable, row: Row, label: str) -> Spread | None:
    for column in table.suite.columns:
        if column.label == label:
            return row.spread(column)
    average = next((average for average in table.suite.averages if average.label == label), None)
    return None if average is None else row.average(average, table.suite)


def _csv_row(row: PublishedRow) -> dict[str, object]:
    ours = row.ours if row.ours is not None else Spread(())
    return {
        **{"id": row.id, "part": row.part, "what": row.what, "published": row.value},
        **spread_fields(["ours"], lambda _: ours),
        **{"num_seeds": None if row.ours is None else len(ours.values)},
        **{"mark": row.mark, "source": row.source, "note": row.note},
    }


def _latex(rows: Iterable[PublishedRow]) -> str:
    """Those with a value, for a paper; needs the packages booktabs and longtable."""
    lines = [
        "% Published numbers, and ours where they are of the same thing: mean over seeds (range)",
        r"\begin{longtable}{p{.5\linewidth}rrl}",
        r"\toprule",
        r"What & Published & Ours & Mark \\",
        r"\midrule",
        r"\endhead",
    ]
    for row in rows:
        if isinstance(row.value, float | int):
            ours = "" if row.ours is None else latex_spread(row.ours, row.form)
            what = escape(row.what.replace("×", "x"))
            lines.append(rf"{what} & {row.text} & {ours} & {escape(row.mark.replace('_', ' '))} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{longtable}", ""])
