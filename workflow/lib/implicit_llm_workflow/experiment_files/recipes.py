"""Tasks: training recipes, from their files with an experiment's changes laid over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.config.evaluation_kinds import CATBABI, LANGUAGE_MODEL
from implicit_llm_contracts.runs.errors import ConfigError

# How the labels of a kind of data are stored decides what training may do with them. A word problem allows both: the
# published script shifts its aligned labels.
_LABELS = {CATBABI: "aligned", LANGUAGE_MODEL: "next_token"}


@dataclass(frozen=True)
class Optimizer:
    """AdamW."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float


@dataclass(frozen=True)
class Schedule:
    """Learning rate over the global step; fractions are shares of the task's total_steps."""

    kind: str
    peak_learning_rate: float
    final_learning_rate: float
    warmup_fraction: float
    decay_fraction: float | None = None


@dataclass(frozen=True)
class Task:
    """A training recipe. `batch_size` is in sequences, over all devices."""

    kind: str
    labels: str
    total_steps: int
    batch_size: int
    precision: str
    optimizer: Optimizer
    schedule: Schedule


def build_task(values: Mapping[str, Any], where: str) -> Task:
    """A task from validated values. Raises: ConfigError for a combination that makes no sense."""
    optimizer = Optimizer(**{key: float(value) for key, value in values["optimizer"].items()})
    rates = {key: float(value) for key, value in values["schedule"].items() if key != "kind"}
    schedule = Schedule(kind=values["schedule"]["kind"], **rates)
    if (schedule.kind == "warmup_stable_decay") != (schedule.decay_fraction is not None):
        raise ConfigError(f"{where}.schedule.decay_fraction: goes with kind warmup_stable_decay only; add or remove it")
    if schedule.final_learning_rate > schedule.peak_learning_rate:
        raise ConfigError(f"{where}.schedule.final_learning_rate: is above peak_learning_rate; lower it")
    if schedule.warmup_fraction + (schedule.decay_fraction or 0.0) > 1.0:
        raise ConfigError(
            f"{where}.schedule: warm-up and decay take more than all steps; lower warmup_fraction or decay_fraction"
        )
    labels = _LABELS.get(values["kind"], values["labels"])
    if values["labels"] != labels:
        raise ConfigError(f"{where}.labels: kind {values['kind']} has labels {labels!r}; give that")
    return Task(
        kind=values["kind"],
        labels=values["labels"],
        total_steps=int(values["total_steps"]),
        batch_size=int(values["batch_size"]),
        precision=values["precision"],
        optimizer=optimizer,
        schedule=schedule,
    )
