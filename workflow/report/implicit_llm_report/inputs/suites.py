"""Read the suites in downstream.yaml and compute their averages. A suite is a set of tasks reported together."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from implicit_llm_report.config import FOLDER, ReportError, read_yaml
from implicit_llm_report.inputs.frame import AVERAGE, COSTS, groups


@dataclass(frozen=True)
class Column:
    """A column of a downstream table: one metric of one task."""

    label: str
    task: str
    metric: str


@dataclass(frozen=True)
class Average:
    """The mean of several columns, which are given by label."""

    label: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """Tasks that are reported together. The first average represents the suite in figures and claims."""

    name: str
    title: str
    columns: tuple[Column, ...]
    averages: tuple[Average, ...] = ()

    @property
    def average_columns(self) -> tuple[Column, ...]:
        """The averages as columns, as if each average were a task."""
        return tuple(Column(one.label, f"{self.title}: {one.label}", AVERAGE) for one in self.averages)

    @property
    def all_columns(self) -> tuple[Column, ...]:
        return self.columns + self.average_columns


@dataclass(frozen=True)
class _Suites:
    suites: tuple[Suite, ...]


@cache
def load_suites(path: Path = FOLDER / "inputs/downstream.yaml") -> tuple[Suite, ...]:
    """Read the suites of a file. Raises: UserError, which names file and key."""
    suites = read_yaml(path, _Suites).suites
    for suite in suites:
        labels = [column.label for column in suite.columns]
        unknown = [label for average in suite.averages for label in average.columns if label not in labels]
        if unknown:
            raise ReportError(
                f"{path}: {suite.name}: an average is of {unknown[0]!r}, which is no column of the suite; "
                f"its columns are {', '.join(labels)}"
            )
    return suites


def with_suites(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with `suite` and `column` filled for downstream tasks, and with rows for the averages.

    An average of a model, mode and seed is NaN if any of its columns has no number, and has no row if none of them has
    a row. A task outside all suites gets a column for each of its metrics. For a task in a suite, metrics that no
    column of the suite shows are left out.
    """
    is_downstream = (frame["kind"] == "lm_eval") & ~frame["metric"].isin(COSTS)
    rows = frame[is_downstream].drop(columns=["suite", "column"])
    places = [
        (one.title, column.label, column.task, column.metric) for one in load_suites() for column in one.all_columns
    ]
    table = pd.DataFrame(places, columns=["suite", "column", "task", "metric"], dtype=object).reset_index(names="order")
    found, keys = [rows], list(zip(rows["task"], rows["metric"], strict=True))
    for suite in load_suites():
        for average, column in zip(suite.averages, suite.average_columns, strict=True):
            wanted = {(one.task, one.metric) for one in suite.columns if one.label in average.columns}
            mine = rows.loc[[key in wanted for key in keys]]
            for one in groups(mine, ("run", "phase", "mode", "seed")):
                value = one.rows["value"].astype(float).mean(skipna=False) if len(one.rows) == len(wanted) else math.nan
                found.append(one.rows[:1].assign(task=column.task, data=column.task, metric=AVERAGE, value=value))
    shown = pd.concat(found).merge(table, how="left", on=["task", "metric"]).sort_values("order", kind="stable")
    shown = shown[shown["column"].notna() | ~shown["task"].isin(table["task"])]
    own = {"suite": "Other tasks", "column": shown["task"] + " " + shown["metric"]}
    # The copy is contiguous in memory, so later filters are faster.
    return pd.concat([frame[~is_downstream], shown.fillna(own).drop(columns="order")]).copy()
