"""The comparison of results as tables for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from implicit_llm_workflow.results.compared_numbers import NumberRow, facts, number_rows
from implicit_llm_workflow.results.compared_runs import Compared
from implicit_llm_workflow.results.identity_diff import DifferentSetting, differences, equal_settings


@dataclass(frozen=True)
class Comparison:
    """Of one column or more: what differs, what the numbers are, how each was made."""

    columns: tuple[Compared, ...]
    differences: tuple[DifferentSetting, ...]
    num_equal: int
    numbers: tuple[NumberRow, ...]
    facts: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def labels(self) -> list[str]:
        """Of several seeds with their number."""
        return [
            column.label if len(column.members) == 1 else f"{column.label} ({len(column.members)} seeds)"
            for column in self.columns
        ]

    @property
    def has_change(self) -> bool:
        return len(self.columns) == 2


def make_comparison(columns: Sequence[Compared]) -> Comparison:
    return Comparison(
        tuple(columns),
        tuple(differences(columns)),
        equal_settings(columns),
        tuple(number_rows(columns)),
        tuple(facts(columns)),
    )


def view(comparison: Comparison) -> Iterator[RenderableType]:
    """Tables one after the other."""
    yield _table("result", comparison, [(name, *values) for name, values in comparison.facts])
    yield Text()
    if comparison.differences:
        rows = [(row.shown, *row.values) for row in comparison.differences]
        yield _table("what differs", comparison, rows)
        for row in comparison.differences:
            if row.detail:
                yield Text(f"  {row.shown}: {row.detail}", style="dim")
        yield Text(f"{comparison.num_equal} settings are equal", style="dim")
    else:
        yield Text("nothing differs: config, code and inputs are equal")
    for section in dict.fromkeys(row.section for row in comparison.numbers if not row.is_swept):
        yield Text()
        yield _number_table(section, comparison)
    if swept := sum(row.is_swept for row in comparison.numbers):
        yield Text()
        yield Text(f"{swept} numbers of sweeps are in the page (--html) and in --json", style="dim")


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Each column, what differs, and all numbers of all seeds."""
    return {
        "columns": [
            {
                "label": column.label,
                "members": [
                    {
                        "job": member.key,
                        "run_dir": member.run_dir.as_posix(),
                        "fingerprint": member.identity.fingerprint,
                        "seed": member.seed,
                        "is_finished": member.recorded is not None,
                    }
                    for member in column.members
                ],
            }
            for column in comparison.columns
        ],
        "differences": [asdict(row) for row in comparison.differences],
        "equal_settings": comparison.num_equal,
        "numbers": [asdict(row) for row in comparison.numbers],
        "facts": {name: list(values) for name, values in comparison.facts},
    }


def _number_table(section: str, comparison: Comparison) -> Table:
    rows = [row for row in comparison.numbers if row.section == section and not row.is_swept]
    cells = [(row.name, *row.cells(), *([row.change()] if comparison.has_change else [])) for row in rows]
    return _table(section, comparison, cells, is_number=True)


def _table(title: str, comparison: Comparison, rows: Sequence[tuple[str, ...]], *, is_number: bool = False) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title, overflow="fold", min_width=14)
    for label in comparison.labels:
        table.add_column(escape(label), overflow="fold", justify="right" if is_number else "left")
    if is_number and comparison.has_change:
        table.add_column("change", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table
