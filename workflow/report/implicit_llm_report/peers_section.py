"""The section of a report for peers: models that were trained elsewhere, beside ours on the same test sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from implicit_llm_report.babi import PROTOCOL_WORDS
from implicit_llm_report.frame import Spread, groups, headline_mode
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.table_text import files_of, rounded

# Kind of an evaluation -> the number that stands for it, what it is called and how it is shown.
MEASURES = {
    "word_problem": ("accuracy_last10", "accuracy on the last ten tokens", "accuracy"),
    "catbabi": ("accuracy", "accuracy at all questions", "accuracy"),
    "perplexity": ("perplexity", "perplexity", "perplexity"),
}


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
    found = [(f"{table.words}, {table.data}", list(_csv_rows(table))) for table in tables]
    files = {"peers": files_of(found, {"model": "Model", "mode": "Mode"}, {"": "value"}, by="length", form=".4g")}
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
    """What the models of a table share: the test set, and how CatbAbI was read."""
    measure, words, form = MEASURES[kind]
    frame = given.inputs.frame
    rows = frame[
        (frame["kind"] == kind) & (frame["metric"] == measure) & frame["sweep"].isna() & frame["length"].notna()
    ]
    for test in groups(rows, ("data", "protocol"), order=lambda test: (test.data, test.protocol or "")):
        if test.rows["source"].notna().any():
            lengths = tuple(sorted(test.rows["length"].unique()))
            name = f"{test.data}, {PROTOCOL_WORDS.get(test.protocol, test.protocol)}" if test.protocol else test.data
            rows_of_test = tuple(_rows(test.rows, lengths, measure, given.config.headline_mode))
            yield PeersTable(kind, name, words, form, lengths, rows_of_test)


def _rows(rows: pd.DataFrame, lengths: Sequence[int], measure: str, wanted: str | None) -> Iterator[Row]:
    """Peers in all their modes, then ours in the mode that speaks for each."""
    for model in groups(
        rows, ("run", "phase"), order=lambda model: (model.source is None, model.run, model.phase or "")
    ):
        modes = set(model.rows["mode"])
        shown = modes if model.source is not None else {headline_mode(modes, wanted)}
        for mode in groups(model.rows[model.rows["mode"].isin(shown)], ("mode",), order=lambda mode: mode.mode):
            at = {group.length: group.spread(measure) for group in groups(mode.rows, ("length",))}
            yield Row(
                model=model.run if model.source is not None else f"{model.run}/{model.phase}",
                mode=mode.mode,
                source=None if model.source is None else source_words(model.source),
                num_parameters=mode.num_parameters,
                numbers=tuple(at.get(length) for length in lengths),
                roles=mode.roles,
            )


def _csv_rows(table: PeersTable) -> Iterator[dict[str, object]]:
    for row in table.rows:
        about: dict[str, object] = {
            "kind": table.kind,
            "data": table.data,
            "model": row.model,
            "source": row.source,
            "mode": row.mode,
        }
        for length, spread in zip(table.lengths, row.numbers, strict=True):
            if spread is not None:
                num_seeds = str(len(spread.values)) if row.source is None else None
                numbers = {part: rounded(getattr(spread, part)) for part in ("mean", "low", "high")}
                yield about | {"length": length, "num_seeds": num_seeds} | numbers
