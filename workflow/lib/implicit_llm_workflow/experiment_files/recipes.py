"""Tasks: training recipes, from their files with an experiment's changes laid over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.config.tasks import TASKS
from implicit_llm_contracts.config.training import OptimizerConfig, ScheduleConfig
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fill import fill


@dataclass(frozen=True)
class Task:
    """A training recipe. `batch_size` is in sequences, over all devices."""

    kind: str
    labels: str
    total_steps: int
    batch_size: int
    precision: str
    optimizer: OptimizerConfig
    schedule: ScheduleConfig


def build_task(values: Mapping[str, Any], where: str) -> Task:
    """A task from validated values. Raises: ConfigError for a combination that makes no sense."""
    labels = TASKS[values["kind"]].labels
    if labels not in (None, values["labels"]):
        raise ConfigError(f"{where}.labels: kind {values['kind']} has labels {labels!r}; give that")
    return Task(
        kind=values["kind"],
        labels=values["labels"],
        total_steps=int(values["total_steps"]),
        batch_size=int(values["batch_size"]),
        precision=values["precision"],
        optimizer=fill(OptimizerConfig, values["optimizer"], f"{where}.optimizer"),
        schedule=fill(ScheduleConfig, values["schedule"], f"{where}.schedule"),
    )
