"""Read the suites in downstream.yaml. A suite is a set of tasks that are reported together, with averages."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from implicit_llm_report.config import FOLDER, ReportError, read_yaml

AVERAGE = "average"  # the metric of the averages


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
