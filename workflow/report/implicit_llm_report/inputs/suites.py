"""Downstream tasks that are reported together, downstream.yaml, and the averages over them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from implicit_llm_contracts.runs.fill import fill
from implicit_llm_report.config import ReportError, read_yaml
from implicit_llm_report.inputs.frame import AVERAGE, COSTS


@dataclass(frozen=True)
class Column:
    """One metric of one task; `chance` is what a model without knowledge scores."""

    label: str
    task: str
    metric: str
    chance: float | None = None


@dataclass(frozen=True)
class Average:
    """The mean of some columns, by label."""

    label: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """Tasks that are reported together. The first average stands for the suite in figures and claims."""

    name: str
    title: str
    columns: tuple[Column, ...]
    averages: tuple[Average, ...] = ()

    @property
    def all_columns(self) -> list[Column]:
        """With the averages at the end, each as if it were a task."""
        averages = (Column(one.label, f"{self.title}: {one.label}", AVERAGE) for one in self.averages)
        return [*self.columns, *averages]


@dataclass(frozen=True)
class _Suites:
    suites: tuple[Suite, ...]


SUITES = Path(__file__).with_name("downstream.yaml")


def load_suites(path: Path = SUITES) -> tuple[Suite, ...]:
    """Read the file. Raises: UserError naming file and key."""
    suites = fill(_Suites, read_yaml(path), str(path)).suites
    for suite in suites:
        labels = [column.label for column in suite.columns]
        unknown = [label for average in suite.averages for label in average.columns if label not in labels]
        if unknown:
            raise ReportError(
                f"{path}: {suite.name}: an average is of {unknown[0]!r}, which is no column of the suite; "
                f"its columns are {', '.join(labels)}"
            )
    return suites


def with_suites(frame: pd.DataFrame, suites: Iterable[Suite]) -> pd.DataFrame:
    """The rows of downstream tasks with their suite and column, and rows for the averages.

    An average of a model, mode and seed is NaN where one of its columns has no number. A task that no suite has gets a
    column of its own for each of its metrics.
    """
    is_downstream = (frame["kind"] == "lm_eval").to_numpy(bool)
    rows = frame[is_downstream & ~frame["metric"].isin(COSTS)]
    places = {(c.task, c.metric): (one.title, c.label) for one in suites for c in one.all_columns}
    found = [rows]
    for suite in suites:
        for average, column in zip(suite.averages, suite.all_columns[len(suite.columns) :], strict=True):
            columns = {(one.task, one.metric) for one in suite.columns if one.label in average.columns}
            is_meant = np.array([pair in columns for pair in zip(rows["task"], rows["metric"], strict=True)], bool)
            for _, one in rows[is_meant].groupby(["run", "phase", "mode", "seed"], sort=False, dropna=False):
                value = one["value"].mean(skipna=False) if len(one) == len(columns) else math.nan
                found.append(one.iloc[:1].assign(task=column.task, data=column.task, metric=AVERAGE, value=value))
    shown = pd.concat(found)
    suite_of = {task: title for (task, _), (title, _) in places.items()}
    pairs = list(zip(shown["task"], shown["metric"], strict=True))
    titles = [suite_of.get(task, "Other tasks") for task, _ in pairs]
    labels = [places[pair][1] if pair in places else None if pair[0] in suite_of else " ".join(pair) for pair in pairs]
    order = {place: index for index, place in enumerate(places.values())}
    places_shown = [(title, label or "") for title, label in zip(titles, labels, strict=True)]
    in_order = np.argsort([order.get(place, len(order)) for place in places_shown], kind="stable")
    shown = shown.assign(suite=titles, column=labels).iloc[in_order]
    return pd.concat([frame[~is_downstream], frame[is_downstream & frame["metric"].isin(COSTS)], shown])
