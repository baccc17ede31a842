"""What a section of the report is, and what it is built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from implicit_llm_report.babi import BabiResults
from implicit_llm_report.config import ReportConfig
from implicit_llm_report.downstream import DownstreamResults, Suite, with_averages
from implicit_llm_report.frame import Group, plain, roles_of, word_rows
from implicit_llm_report.inputs import ReportInputs
from implicit_llm_report.perplexity import PerplexityResults
from implicit_llm_report.published import Published
from implicit_llm_report.svg import Figure


@dataclass(frozen=True)
class Section:
    """One part of the report.

    `template` below workflow/report shows `tables`, which it finds as `section.tables`; None for figures alone.
    `files`: the written tables by name, each as "csv" and "tex". Figures without a number to draw are left out.
    """

    name: str
    template: str | None = None
    tables: Sequence[Any] = ()
    figures: Sequence[Figure | None] = ()
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Rows of one thing by the values of a column, such as the lengths of a test; `group` is all of them together."""

    title: str
    group: Group
    rows: Sequence[Group]
    columns: Sequence[Any]

    @property
    def roles(self) -> tuple[str, ...]:
        return roles_of(self.rows)


@dataclass(frozen=True)
class SectionInputs:
    """What every section is built from."""

    inputs: ReportInputs
    config: ReportConfig
    published: Published
    suites: tuple[Suite, ...] = ()

    @cached_property
    def words(self) -> pd.DataFrame:
        return word_rows(self.inputs.frame)

    @cached_property
    def perplexities(self) -> PerplexityResults:
        return PerplexityResults(plain(self.inputs.frame, "perplexity"), self.inputs.training)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """All numbers, and the averages of downstream tasks as further rows."""
        return with_averages(self.inputs.frame, self.suites)

    @cached_property
    def downstream(self) -> DownstreamResults:
        rows = self.frame[self.frame["kind"] == "lm_eval"]
        return DownstreamResults(rows, self.inputs.training, self.suites, self.published)

    @cached_property
    def babi(self) -> BabiResults:
        return BabiResults(plain(self.inputs.frame, "catbabi"))
