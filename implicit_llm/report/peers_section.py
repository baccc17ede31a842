"""The section of a report for peers: models that were trained elsewhere, beside ours on the same test sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from implicit_llm.report.babi_results import PROTOCOL_WORDS
from implicit_llm.report.inputs import is_peer
from implicit_llm.report.results import Spread, headline_mode
from implicit_llm.report.section import Section, SectionInputs
from implicit_llm.report.table_text import csv_text, escape, latex_spread, rounded

# Kind of an evaluation -> the number that stands for it, what it is called and how it is shown.
MEASURES = {
    "word_problem": ("accuracy_last10", "accuracy on the last ten tokens", "accuracy"),
    "catbabi": ("accuracy", "accuracy at all questions", "accuracy"),
    "perplexity": ("perplexity", "perplexity", "perplexity"),
}
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One model in one mode: its number at each length, None where it was not evaluated.

    `source`: where a peer comes from, in words; None for a model of ours, whose `seeds` are several.
    """

    model: str
    mode: str
    source: str | None
    num_parameters: int | None
    numbers: tuple[Spread | None, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class PeersTable:
    """`form`: how a number is shown."""

    kind: str
    data: str
    words: str
    form: str
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for row in self.rows for role in row.roles))


def peers_section(given: SectionInputs) -> Section | None:
    """A table for each test set that a peer was evaluated on; None without peers."""
    tables = [table for kind in MEASURES for table in _tables(given, kind)]
    if not tables:
        return None
    files = {"peers": {"csv": _csv(tables), "tex": _latex(tables)}}
    return Section("peers", "sections/peers.html.j2", tables, files=files)


def source_words(source: Mapping[str, Any]) -> str:
    """ "EleutherAI/pythia-70m at a39f36b1..., sha256 ..." and whether a revision was named."""
    if not source:
        return "unknown"
    name = str(source.get("hub") or source.get("path"))
    if "hub" in source:
        commit = source.get("commit")
        name += f" at {commit[:12]}" if commit else ""
        name += "" if source.get("revision") else ", not pinned"
    weights = [digest for file, digest in sorted((source.get("sha256") or {}).items()) if file != "config.json"]
    return f"{name}, sha256 {weights[0][:12]}{' and others' if len(weights) > 1 else ''}" if weights else name


def _tables(given: SectionInputs, kind: str) -> Iterator[PeersTable]:
    measure, words, form = MEASURES[kind]
    records = [record for record in given.inputs.records.get(kind, ()) if not record.get("sweep")]
    for data, protocol in sorted({_test(record) for record in records if is_peer(record)}):
        mine = [record for record in records if _test(record) == (data, protocol)]
        lengths = tuple(sorted({record["length"] for record in mine if record["length"] is not None}))
        rows = tuple(_rows(mine, lengths, measure, given.config.headline_mode))
        name = f"{data}, {PROTOCOL_WORDS.get(protocol, protocol)}" if protocol else data
        yield PeersTable(kind, name, words, form, lengths, rows)


def _test(record: Record) -> tuple[str, str]:
    """What the models of a table share: the test set, and how CatbAbI was read."""
    return record["data"], record.get("protocol") or ""


def _rows(records: Sequence[Record], lengths: Sequence[int], measure: str, wanted: str | None) -> Iterator[Row]:
    """Peers in all their modes, then ours in the mode that speaks for each."""
    groups: dict[tuple[bool, str, str, str], list[Record]] = {}
    for record in records:
        key = (not is_peer(record), record["run"], record.get("phase") or "", record["mode"])
        groups.setdefault(key, []).append(record)
    for (is_ours, run, phase, mode), mine in sorted(groups.items()):
        modes = {other for (_, name, its_phase, other) in groups if (name, its_phase) == (run, phase)}
        if is_ours and mode != headline_mode(modes, wanted):
            continue
        yield Row(
            model=f"{run}/{phase}" if is_ours else run,
            mode=mode,
            source=None if is_ours else source_words(mine[0]["source"]),
            num_parameters=mine[0].get("num_parameters"),
            numbers=tuple(_at(mine, length, measure) for length in lengths),
            roles=tuple(dict.fromkeys(record["role"] for record in mine)),
        )


def _at(records: Sequence[Record], length: int, measure: str) -> Spread | None:
    values = [record.get(measure) for record in records if record["length"] == length]
    return Spread.of(values) if values else None


def _csv(tables: Sequence[PeersTable]) -> str:
    head = ("kind", "data", "model", "source", "mode", "length", "num_seeds", "mean", "low", "high")
    return csv_text(head, (line for table in tables for line in _csv_lines(table)))


def _csv_lines(table: PeersTable) -> Iterator[list[object]]:
    for row in table.rows:
        for length, spread in zip(table.lengths, row.numbers, strict=True):
            if spread is not None:
                seeds = len(spread.values) if row.source is None else None
                numbers = [rounded(value) for value in (spread.mean, spread.low, spread.high)]
                yield [table.kind, table.data, row.model, row.source, row.mode, length, seeds, *numbers]


def _latex(tables: Sequence[PeersTable]) -> str:
    return "\n".join(_latex_table(table) for table in tables)


def _latex_table(table: PeersTable) -> str:
    form = ".2f" if table.form == "perplexity" else ".3f"
    lines = [f"% {escape(table.words)}, {escape(table.data)}", rf"\begin{{tabular}}{{ll{'r' * len(table.lengths)}}}"]
    lines += [r"\toprule", " & ".join(["model", "mode", *map(str, table.lengths)]) + r" \\", r"\midrule"]
    for row in table.rows:
        cells = ["not run" if spread is None else latex_spread(spread, form) for spread in row.numbers]
        lines.append(" & ".join([escape(row.model), escape(row.mode), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
