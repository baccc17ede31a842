"""The numbers of compared results side by side: their summaries, the end of their journals, and their evaluations."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from implicit_llm_contracts.hints import natural
from implicit_llm_contracts.runs.run_directory import PROVENANCE
from implicit_llm_workflow.estimates.cost import recorded_cost
from implicit_llm_workflow.planning.recorded import MLFLOW, read_object
from implicit_llm_workflow.results.compared_runs import Compared, Subject
from implicit_llm_workflow.results.explain_table import cost_text
from implicit_llm_workflow.results.shown_numbers import MISSING, number_text

SUMMARY, LAST = "at the end (means over the last 50 steps)", "last values in the journal"
FIRST = ("step", "loss", "accuracy_last10", "accuracy", "residual", "num_iter", "f_evaluations", "unconverged_share")
SWEPT = "@"  # in the mode of a number that a sweep gave
_DATA = "data"  # of a summary: settings, not numbers
COMMIT_DIGITS = 10


@dataclass(frozen=True)
class NumberRow:
    """`values`: for each column the numbers of those of its members that have one."""

    section: str
    name: str
    values: tuple[tuple[float, ...], ...]

    @property
    def is_swept(self) -> bool:
        return SWEPT in self.name

    def cells(self) -> list[str]:
        """The mean of each column, of several seeds also the lowest and the highest."""
        return [_spread_text(values) for values in self.values]

    def change(self) -> str:
        """Of two columns, from the mean of the first to that of the second."""
        if len(self.values) != 2 or not all(self.values):
            return MISSING
        difference = statistics.fmean(self.values[1]) - statistics.fmean(self.values[0])
        return "=" if difference == 0 else f"{'+' if difference > 0 else ''}{number_text(difference, 3)}"


def number_rows(columns: Sequence[Compared]) -> list[NumberRow]:
    """All numbers that any of the results has, section by section."""
    tables: list[list[dict[tuple[str, str], float]]] = [
        [dict(_numbers(member)) for member in column.members] for column in columns
    ]
    names = list(dict.fromkeys(name for column in tables for numbers in column for name in numbers))
    sections = sorted(dict.fromkeys(section for section, _ in names), key=lambda section: section == LAST)
    rows = []
    for section, name in sorted(names, key=lambda item: (sections.index(item[0]), _order(*item))):
        values = [tuple(found[section, name] for found in column if (section, name) in found) for column in tables]
        rows.append(NumberRow(section, name, tuple(values)))
    return rows


def facts(columns: Sequence[Compared]) -> list[tuple[str, tuple[str, ...]]]:
    """When, where and at what cost each result was made: a name and a text for each column."""
    rows: dict[str, list[str]] = {}
    for column in columns:
        found = [_facts_of(member) for member in column.members]
        for name in found[0]:
            rows.setdefault(name, []).append("\n".join(dict.fromkeys(item[name] for item in found)))
    return [(name, tuple(values)) for name, values in rows.items()]


def _facts_of(member: Subject) -> dict[str, str]:
    provenance = read_object(member.work / PROVENANCE)
    git = provenance.get("git") or {}
    cost = recorded_cost(member.run_dir, member.identity.fingerprint)
    state = "finished" if member.recorded is not None else "not finished"
    return {
        "seed": MISSING if member.seed is None else str(member.seed),
        "fingerprint": f"{member.identity.fingerprint[:16]}",
        "state": f"{state} {_time_text(provenance.get('finished'))}".strip(),
        "took": MISSING if cost is None else cost_text(cost),
        "device": str(provenance.get("device") or MISSING),
        "commit": f"{git['commit'][:COMMIT_DIGITS]}{' (edited)' if git.get('is_dirty') else ''}"
        if git.get("commit")
        else MISSING,
        "MLflow run": str(read_object(member.work / MLFLOW).get("run_id") or MISSING),
    }


def _numbers(member: Subject) -> Iterator[tuple[tuple[str, str], float]]:
    """Section, name and value."""
    if member.recorded is not None:
        for name, value in _flat({key: item for key, item in member.recorded.summary.items() if key != _DATA}):
            yield (SUMMARY, name.removeprefix("metrics ")), value
    for evaluation, recorded in member.evaluations():
        for name, value in _flat(recorded.summary):
            yield (f"evaluation {evaluation}", name), value
    curve = member.points
    if curve:
        yield (LAST, "step"), float(curve[-1].step)
        for name, value in curve[-1].values.items():
            yield (LAST, name), value


def _order(section: str, name: str) -> tuple[Any, ...]:
    """What is looked at first comes first; of evaluations as a person counts, L8 before L16."""
    if section in (SUMMARY, LAST):
        return (FIRST.index(name) if name in FIRST else len(FIRST), name)
    return tuple(natural(name))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name} {key}".strip())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def _spread_text(values: Sequence[float]) -> str:
    if not values:
        return MISSING
    mean = number_text(statistics.fmean(values))
    if min(values) == max(values):
        return mean
    return f"{mean} ({number_text(min(values))} to {number_text(max(values))})"


def _time_text(value: Any) -> str:
    """ "2026-11-22 02:14 UTC"."""
    try:
        return f"{datetime.fromisoformat(value):%Y-%m-%d %H:%M} UTC"
    except (TypeError, ValueError):
        return ""
