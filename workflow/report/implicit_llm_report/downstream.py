"""Downstream tasks: which stand in a table (downstream.yaml), and what was measured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.fill import fill
from implicit_llm_report.config import FOLDER, ReportError, read_yaml
from implicit_llm_report.model_groups import Model, ModelGroup, ModelPoint, Variant, group_models
from implicit_llm_report.published import Published, PublishedDownstream
from implicit_llm_report.results import Spread, headline_mode, mode_rank
from implicit_llm_report.training_runs import LANGUAGE_MODEL, TrainingRun

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


COST = "f_evaluations_per_token"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class DownstreamPoint(ModelPoint):
    """One record: one task for one seed in one mode; a metric of None is a missing number."""

    train_tokens: float | None
    source: Mapping[str, Any] | None
    task: str
    mode: str
    sweep: Mapping[str, Any] | None
    metrics: Mapping[str, float | None]
    stderr: Mapping[str, float | None]
    num_documents: int | None
    num_fewshot: int | None
    task_version: Any
    task_hash: str | None
    harness_version: str | None

    @property
    def key(self) -> tuple[Variant, str]:
        """What makes a row: mode names of sweeps differ by value."""
        return (self.variant, self.mode)


@dataclass(frozen=True)
class Row:
    """A model in a mode on the tasks of a suite, over seeds."""

    name: str
    points: tuple[DownstreamPoint, ...]
    is_headline: bool = False
    published: PublishedDownstream | None = None

    @property
    def first(self) -> DownstreamPoint:
        return self.points[0]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(point.role for point in self.points))

    @property
    def seeds(self) -> Spread:
        """As many values as there are seeds."""
        return Spread(tuple(float(seed or 0) for seed in self._seeds))

    @property
    def cost(self) -> Spread:
        return Spread.of(point.f_evaluations_per_token for point in self.points)

    def spread(self, column: Column) -> Spread | None:
        """The metric over seeds; None where the task was not asked."""
        mine = [point for point in self.points if point.task == column.task]
        return Spread.of(point.metrics.get(column.metric) for point in mine) if mine else None

    def stderr(self, column: Column) -> float | None:
        """The harness's standard error, of the only seed."""
        mine = [point for point in self.points if point.task == column.task]
        return mine[0].stderr.get(column.metric) if len(mine) == 1 else None

    def average(self, average: Average, suite: Suite) -> Spread | None:
        """The mean of the columns seed by seed; a seed that lacks one of them has none. None if no task was asked."""
        columns = [column for column in suite.columns if column.label in average.columns]
        if all(self.spread(column) is None for column in columns):
            return None
        return Spread.of(self._average(seed, columns) for seed in self._seeds)

    def num_documents(self, column: Column) -> int | None:
        return min((p.num_documents for p in self.points if p.task == column.task and p.num_documents), default=None)

    @property
    def _seeds(self) -> list[int | None]:
        return sorted({point.seed for point in self.points}, key=lambda seed: seed or 0)

    def _average(self, seed: int | None, columns: Sequence[Column]) -> float | None:
        values = {(point.task, metric): v for point in self.points if point.seed == seed for metric, v in _known(point)}
        found = [values.get((column.task, column.metric)) for column in columns]
        present = [value for value in found if value is not None]
        return sum(present) / len(present) if len(present) == len(columns) else None


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
        return tuple(dict.fromkeys(role for row in self.rows for role in row.roles))

    @property
    def harness_versions(self) -> tuple[str, ...]:
        return tuple(sorted({point.harness_version or "unknown" for row in self.rows for point in row.points}))

    def is_part(self, row: Row, column: Column) -> bool:
        """Whether the row saw fewer documents of the task than another one: it is not to be compared with that."""
        mine = row.num_documents(column)
        return mine is not None and mine < max(other.num_documents(column) or 0 for other in self.rows)

    def shots(self) -> tuple[int, ...]:
        return tuple(sorted({point.num_fewshot or 0 for row in self.rows for point in row.points}))


def points_of(records: Iterable[Record]) -> tuple[DownstreamPoint, ...]:
    """All of them, those of sweeps and of models trained elsewhere too."""
    return tuple(_point(record) for record in records)


def groups_of(points: Iterable[DownstreamPoint], training: Iterable[TrainingRun]) -> tuple[ModelGroup, ...]:
    """The groups of the models asked and of the language models trained; those trained elsewhere come last."""
    measured = [Model(p.run, p.is_implicit, p.model_type, p.num_parameters) for p in points]
    trained = [
        Model(run.run, run.is_implicit, run.model_type, run.num_parameters, run.data)
        for run in training
        if run.task == LANGUAGE_MODEL
    ]
    groups = group_models([*measured, *trained])
    return tuple(sorted(groups, key=lambda group: all(model.data is None for model in group.models)))


def downstream_tables(
    points: Sequence[DownstreamPoint],
    groups: Sequence[ModelGroup],
    suites: Sequence[Suite],
    published: Published,
    wanted_mode: str | None,
) -> list[DownstreamTable]:
    """A table for each suite of which a model was asked something; sweeps are left out."""
    points = [point for point in points if point.sweep is None]
    found = [(point.task, metric) for point in points for metric in point.metrics]
    tables = []
    for suite in suites_shown(suites, found):
        mine = [point for point in points if point.task in suite.tasks]
        modes = {point.run: {other.mode for other in mine if other.run == point.run} for point in mine}
        headlines = {run: headline_mode(names, wanted_mode) for run, names in modes.items()}
        blocks = [Block(group, _ordered(rows_of(group, mine), headlines)) for group in groups]
        known = [entry for entry in published.downstream if entry.suite == suite.name]
        blocks = [_with_published(block, known) for block in blocks if block.rows]
        tables.append(DownstreamTable(suite, tuple(blocks)))
    return tables


def rows_of(group: ModelGroup, points: Iterable[DownstreamPoint]) -> list[Row]:
    """The points of a group by model and mode."""
    by_key: dict[tuple[Variant, str], list[DownstreamPoint]] = {}
    for point in points:
        if point.run in group.runs:
            by_key.setdefault(point.key, []).append(point)
    variants = list(dict.fromkeys(variant for variant, _ in by_key))
    return [
        Row(name_of(group, mine[0], variants), tuple(sorted(mine, key=lambda point: point.seed or 0)))
        for mine in by_key.values()
    ]


def name_of(group: ModelGroup, point: DownstreamPoint, siblings: Iterable[Variant]) -> str:
    """A model that was trained elsewhere keeps its own name."""
    return point.run if point.source is not None else group.name(point.variant, siblings)


def _ordered(rows: Iterable[Row], headlines: Mapping[str, str | None]) -> tuple[Row, ...]:
    marked = (replace(row, is_headline=row.first.mode == headlines[row.first.run]) for row in rows)
    return tuple(sorted(marked, key=_order))


def _with_published(block: Block, known: Sequence[PublishedDownstream]) -> Block:
    """Each row with the published results of the same model."""
    beside = [next((entry for entry in known if entry.is_beside(row.first)), None) for row in block.rows]
    rows = (replace(row, published=entry) for row, entry in zip(block.rows, beside, strict=True))
    return replace(block, rows=tuple(rows))


def _order(row: Row) -> tuple:
    """Explicit models first, as in the paper's tables, then by training tokens; the headline mode before others."""
    point = row.first
    return (
        point.is_implicit,
        point.run,
        point.train_tokens or 0.0,
        point.phase or "",
        not row.is_headline,
        mode_rank(point.mode),
    )


def _point(record: Record) -> DownstreamPoint:
    point = DownstreamPoint.from_record(record, record["role"])
    return replace(point, metrics=point.metrics or {}, stderr=point.stderr or {})


def _known(point: DownstreamPoint) -> list[tuple[str, float]]:
    return [(metric, value) for metric, value in point.metrics.items() if value is not None]
