"""Which downstream tasks stand in a table, by which metric, and what is averaged: workflow/report/downstream.yaml."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_llm.report.config import ReportError
from implicit_llm.report.yaml_file import read_yaml
from implicit_llm_contracts.runs.fill import fill

LOW_IS_BETTER = "perplexity"


@dataclass(frozen=True)
class Column:
    """One metric of one task; `chance` is what a model without knowledge scores."""

    label: str
    task: str
    metric: str
    chance: float | None = None

    @property
    def is_low_better(self) -> bool:
        return self.metric == LOW_IS_BETTER


@dataclass(frozen=True)
class Average:
    """The mean of some columns, by label."""

    label: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """Tasks that are reported together. The first average speaks for the suite in the figure."""

    name: str
    title: str
    columns: tuple[Column, ...]
    averages: tuple[Average, ...] = ()

    @property
    def tasks(self) -> frozenset[str]:
        return frozenset(column.task for column in self.columns)


@dataclass(frozen=True)
class _Suites:
    suites: tuple[Suite, ...]


def load_suites(path: Path) -> tuple[Suite, ...]:
    """Read the file. Raises: UserError naming file and key."""
    content: Any = read_yaml(path)
    suites = fill(_Suites, content, str(path)).suites
    for suite in suites:
        labels = [column.label for column in suite.columns]
        unknown = [label for average in suite.averages for label in average.columns if label not in labels]
        if unknown:
            raise ReportError(
                f"{path}: {suite.name}: an average is of {unknown[0]!r}, which is no column of the suite; "
                f"its columns are {', '.join(labels)}"
            )
    return suites


def suites_shown(suites: Iterable[Suite], found: Sequence[tuple[str, str]]) -> list[Suite]:
    """Those of which there is a record, and one for tasks that none has; `found`: (task, metric) of the records."""
    tasks = {task for task, _ in found}
    known = [suite for suite in suites if suite.tasks & tasks]
    covered = {task for suite in known for task in suite.tasks}
    other = [(task, metric) for task, metric in dict.fromkeys(found) if task not in covered]
    return [*known, *_other(other)]


def _other(found: Collection[tuple[str, str]]) -> list[Suite]:
    if not found:
        return []
    columns = tuple(Column(f"{task} {metric}", task, metric) for task, metric in found)
    return [Suite("other", "Other tasks", columns)]
