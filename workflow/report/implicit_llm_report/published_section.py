"""Every published number, with its source and its mark, and beside it ours where it is of the same thing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from implicit_llm_report.downstream import DownstreamTable, Row
from implicit_llm_report.frame import Group, Spread, groups, headlines, plain, roles_of
from implicit_llm_report.published import Entry, PublishedDownstream
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.table_text import files_of, spread_fields

NAME = "published"


@dataclass(frozen=True)
class PublishedRow:
    """One number or statement; `ours` None where there is no measurement of the same thing, `form` how it is shown."""

    id: str
    entry: Entry
    what: str
    value: float | str | None
    form: str
    ours: Spread | None
    roles: tuple[str, ...]

    @property
    def text(self) -> str:
        """The published value; empty where it is not known."""
        return f"{self.value:{self.form}}" if isinstance(self.value, float | int) else self.value or ""


def published_section(given: SectionInputs) -> Section:
    """A row a number; those with one of ours beside them come first."""
    rows = list(published_rows(given))
    rows.sort(key=lambda row: row.ours is None)
    names = {"what": "What", "published": "Published", "ours_mean": "Ours", "mark": "Mark"}
    files = {NAME: files_of([("Published numbers, and ours", list(map(_csv_row, rows)))], names, {})}
    return Section(NAME, "sections/published.html.j2", rows, files=files)


def published_rows(given: SectionInputs) -> Iterator[PublishedRow]:
    """In the order of the file."""
    measured = {
        "word_problem": groups(given.words, ("run", "phase", "data", "mode")),
        "perplexity": _cells(given, "perplexity", "mode"),
        "duality": _cells(given, "duality", "mode", "against"),
    }
    for entry in given.published.entries:
        if isinstance(entry, PublishedDownstream):
            yield from (_downstream(entry, label, given) for label in entry.values)
        else:
            beside = [cell for cell in measured.get(entry.kind or "", ()) if entry.is_beside(cell)]
            ours = [(cell, cell.spread(entry.metric)) for cell in beside]
            yield _row(entry, entry.id, entry.words, entry.value, entry.form, ours)


def _cells(given: SectionInputs, kind: str, *more: str) -> list[Group]:
    """Of duality pairs of modes, which all stand for themselves."""
    rows = plain(given.inputs.frame, kind)
    rows = rows[rows["measure"] == "pair"] if kind == "duality" else headlines(rows)
    return groups(rows, ("run", "phase", "data", "length", *more))


def _row(
    entry: Entry, name: str, what: str, value: float | str | None, form: str, ours: Iterable[tuple[Group, Spread]]
) -> PublishedRow:
    beside, spreads = [*zip(*ours, strict=True)] or [(), ()]
    together = Spread.of(value for spread in spreads for value in (*spread.values, *[None] * spread.num_missing))
    return PublishedRow(name, entry, what, value, form, together if beside else None, roles_of(beside))


def _downstream(entry: PublishedDownstream, label: str, given: SectionInputs) -> PublishedRow:
    found = [
        (row.group, spread)
        for table in given.downstream.tables
        for row in table.rows
        if table.suite.name == entry.suite and row.group.is_headline and row.published == entry
        if (spread := _of_label(table, row, label)) is not None
    ]
    name, form = f"{entry.id}-{label.lower().replace(' ', '-')}", ".2f" if label.endswith("ppl") else ".4f"
    return _row(entry, name, entry.model_words + label, entry.values[label], form, found)


def _of_label(table: DownstreamTable, row: Row, label: str) -> Spread | None:
    return next((row.spread(column) for column in table.suite.all_columns if column.label == label), None)


def _csv_row(row: PublishedRow) -> dict[str, object]:
    ours = row.ours if row.ours is not None else Spread(())
    return {
        **{"id": row.id, "part": row.entry.part, "what": row.what, "published": row.value},
        **spread_fields(["ours"], lambda _: ours),
        **{"num_seeds": None if row.ours is None else len(ours.values)},
        **{"mark": row.entry.mark, "source": row.entry.source, "note": row.entry.note},
    }
