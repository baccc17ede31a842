"""What figures, tables and claims are made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from implicit_llm_report.config import ReportConfig
from implicit_llm_report.inputs.frame import plain
from implicit_llm_report.inputs.layers import depths, fewest_layers
from implicit_llm_report.inputs.published import Published
from implicit_llm_report.inputs.sources import ReportInputs
from implicit_llm_report.inputs.suites import with_suites


@dataclass(frozen=True)
class Given:
    """`inputs.frame` is what was measured, `frame` has the averages of downstream tasks and the fewest layers too."""

    inputs: ReportInputs
    config: ReportConfig
    published: Published

    @cached_property
    def frame(self) -> pd.DataFrame:
        found, config = with_suites(self.inputs.frame), self.config.minimum_layers
        layers = [] if config is None else [fewest_layers(self.depths, config)]
        return pd.concat([found, *(rows for rows in layers if len(rows))], ignore_index=True)

    @cached_property
    def depths(self) -> pd.DataFrame:
        """Accuracies by depth; empty where the report's configuration names no group."""
        config = self.config.minimum_layers
        return self.inputs.frame[:0] if config is None else depths(self.inputs.frame, config)

    @cached_property
    def words(self) -> pd.DataFrame:
        return plain(self.inputs.frame, "word_problem")

    @cached_property
    def perplexities(self) -> pd.DataFrame:
        return plain(self.inputs.frame, "perplexity")
