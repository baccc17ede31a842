"""Downstream tasks: which stand in a table (downstream.yaml), and what was measured."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from implicit_llm_contracts.runs.fill import fill
from implicit_llm_report.config import FOLDER, ReportError, read_yaml
from implicit_llm_report.frame import COST, COSTS, Group, Spread, groups, mode_rank, roles_of
from implicit_llm_report.model_groups import ModelGroup, group_models
from implicit_llm_report.perplexity import measured_models, trained_models
from implicit_llm_report.published import Published, PublishedDownstream
from implicit_llm_report.table_text import fields, files_of, rounded, spread_fields
from implicit_llm_report.training_runs import TrainingRun

LOW_IS_BETTER, AVERAGE = "perplexity", "average"  # metrics


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

    def column_of(self, average: Average) -> Column:
        """The column that shows an average, as if it were a task."""
        return Column(average.label, f"{self.title}: {average.label}", AVERAGE)

    @property
    def all_columns(self) -> list[Column]:
        """With the averages at the end."""
        return [*self.columns, *map(self.column_of, self.averages)]


@dataclass(frozen=True)
class _Suites:
    suites: tuple[Suite, ...]


def load_suites(path: Path = FOLDER / "downstream.yaml") -> tuple[Suite, ...]:
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


def with_averages(frame: pd.DataFrame, suites: Iterable[Suite]) -> pd.DataFrame:
    """The frame with a row for each average of a model, mode and seed: NaN where one of its columns has no number."""
    rows, found = frame[frame["kind"] == "lm_eval"], []
    for suite, average in [(one, average) for one in suites for average in one.averages]:
        columns = {(column.task, column.metric) for column in suite.columns if column.label in average.columns}
        mine = rows if average == suite.averages[0] else rows[rows["sweep"].isna()]  # sweeps show the first average
        is_meant = np.array([pair in columns for pair in zip(mine["task"], mine["metric"], strict=True)], bool)
        for _, one in mine[is_meant].groupby(["run", "phase", "mode", "seed"], sort=False, dropna=False):
            value = one["value"].mean(skipna=False) if len(one) == len(columns) else math.nan
            task = suite.column_of(average).task
            found.append(one.iloc[:1].assign(task=task, data=task, metric=AVERAGE, value=value))
    return pd.concat([frame, *found])


def suites_of(suites: Iterable[Suite], rows: pd.DataFrame) -> list[Suite]:
    """The suites of the tasks and metrics that the rows are of."""
    numbers = rows[~rows["metric"].isin((*COSTS, AVERAGE))]
    return suites_shown(suites, list(zip(numbers["task"], numbers["metric"], strict=True)))


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


@dataclass(frozen=True, eq=False)
class Row:
    """A model in a mode on the tasks of a suite, over seeds."""

    name: str
    group: Group
    published: PublishedDownstream | None = None

    @property
    def seeds(self) -> Spread:
        """As many values as there are seeds."""
        return Spread(tuple(float(seed or 0) for seed in self.group.seeds))

    @property
    def cost(self) -> Spread:
        return self.group.spread(COST, over="record")

    def asked(self, column: Column) -> Group | None:
        """The model on the column's task; None where it was not asked."""
        return self.group.cells("task").get(column.task)

    def spread(self, column: Column) -> Spread | None:
        """The metric over seeds; None where the task was not asked."""
        asked = self.asked(column)
        if asked is None:
            return None
        values = asked.spread(column.metric).values
        return Spread(values, asked.num_records - len(values))

    def stderr(self, column: Column) -> float | None:
        """The harness's standard error, of the only seed."""
        found = () if (asked := self.asked(column)) is None else asked.curves("stderr")
        return found[0].get(column.metric) if len(found) == 1 else None

    def num_documents(self, column: Column) -> int | None:
        asked = self.asked(column)
        return None if asked is None else min(filter(None, asked.rows["num_documents"]), default=None)


@dataclass(frozen=True)
class Block:
    """The rows of one group of models."""

    group: ModelGroup
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class DownstreamTable:
    """A suite with the blocks of models that were asked."""

    suite: Suite
    blocks: tuple[Block, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for block in self.blocks for row in block.rows)

    @property
    def roles(self) -> tuple[str, ...]:
        return roles_of(row.group for row in self.rows)

    @property
    def harness_versions(self) -> list[str]:
        return sorted({version or "unknown" for row in self.rows for version in row.group.rows["harness_version"]})

    def is_part(self, row: Row, column: Column) -> bool:
        """Whether the row saw fewer documents of the task than another one: it is not to be compared with that."""
        mine = row.num_documents(column)
        return mine is not None and mine < max(other.num_documents(column) or 0 for other in self.rows)

    def shots(self) -> list[int]:
        return sorted({shots or 0 for row in self.rows for shots in row.group.rows["num_fewshot"]})


@dataclass(frozen=True)
class DownstreamResults:
    """What models were asked, those trained elsewhere too; `rows` are those of the harness, with sweeps."""

    rows: pd.DataFrame
    training: Sequence[TrainingRun]
    suites: Sequence[Suite]
    published: Published

    @cached_property
    def groups(self) -> list[ModelGroup]:
        """Of the models asked and of the language models trained; those trained elsewhere come last."""
        found = group_models([*measured_models(self.rows), *trained_models(self.training)])
        return sorted(found, key=lambda group: all(model.data is None for model in group.models))

    @cached_property
    def tables(self) -> list[DownstreamTable]:
        """A table for each suite of which a model was asked something; sweeps are left out."""
        plain = self.rows[self.rows["sweep"].isna()]
        return [self._table(suite, plain) for suite in suites_of(self.suites, plain)]

    def _table(self, suite: Suite, plain: pd.DataFrame) -> DownstreamTable:
        known = [entry for entry in self.published.downstream if entry.suite == suite.name]
        mine = plain[plain["task"].isin([column.task for column in suite.all_columns])]
        blocks = (Block(group, tuple(rows_of(group, mine, known))) for group in self.groups)
        return DownstreamTable(suite, tuple(block for block in blocks if block.rows))


def rows_of(group: ModelGroup, rows: pd.DataFrame, known: Sequence[PublishedDownstream] = ()) -> list[Row]:
    """The models of a group by mode, with their published results; one trained elsewhere keeps its own name."""
    found = groups(rows[rows["run"].isin(group.runs)], ("run", "phase", "mode"), order=_order)
    names = (model.run if model.source is not None else group.name_of(model, found) for model in found)
    beside = (next((entry for entry in known if entry.is_beside(model)), None) for model in found)
    return [Row(*row) for row in zip(names, found, beside, strict=True)]


def _order(row: Group) -> tuple:
    """Explicit models first, as in the paper's tables, then by training tokens; the headline mode before others."""
    training = (row.train_tokens or 0.0, row.phase or "")
    return (row.is_implicit, row.run, *training, not row.is_headline, mode_rank(row.mode))


def downstream_files(tables: Sequence[DownstreamTable]) -> dict[str, str]:
    """One line a (model, mode, column)."""
    rows = [(table.suite.title, list(_csv_lines(table))) for table in tables]
    names = {"family": "Family", "run": "Model", "solver": "Solver", "mode": "Mode"}
    return files_of(rows, names, {"value": "value"}, by="column", form=".4g")


def _csv_lines(table: DownstreamTable) -> Iterator[dict[str, object]]:
    """One line a (model, mode, column); averages have no task. Empty where there is no number."""
    for block, row in ((one, row) for one in table.blocks for row in one.rows):
        about = {
            **{"suite": table.suite.name, **fields(row.group, "run", "model"), "family": block.group.family},
            **fields(row.group, "num_parameters", "train_tokens", "phase", "solver", "mode"),
        }
        for column in table.suite.all_columns:
            asked, spread = row.asked(column), row.spread(column)
            if asked is not None and spread is not None:
                numbers = {**_numbers(spread), **_published(row, column.label)}
                if column.metric == AVERAGE:
                    yield {**about, "column": column.label, **numbers}
                    continue
                yield {
                    **{**about, "column": column.label, "task": column.task, "metric": column.metric},
                    **{"chance": column.chance, **_numbers(spread), "stderr": rounded(row.stderr(column))},
                    **{"num_documents": row.num_documents(column), **fields(asked, "num_fewshot")},
                    COST: rounded(asked.spread(COST).mean),
                    **fields(asked, "task_version", "task_hash", "harness_version"),
                    **numbers,
                }


def _numbers(spread: Spread) -> dict[str, object]:
    counts = {"num_seeds": len(spread.values), "num_missing": spread.num_missing}
    return {**spread_fields(["value"], lambda _: spread), **counts}


def _published(row: Row, label: str) -> dict[str, object]:
    known = row.published if row.published is not None and label in row.published.values else None
    return {"published": known and known.values[label], "published_mark": known and known.mark}
