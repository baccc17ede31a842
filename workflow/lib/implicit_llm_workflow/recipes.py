"""Tasks (training recipes) and curricula (phases), from their files with an experiment's changes laid over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from implicit_llm_workflow.errors import ConfigError


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


@dataclass(frozen=True)
class Phase:
    """One training job: global steps start_step (inclusive) to end_step (exclusive) with one solver.

    `solver` is None for explicit models.
    """

    name: str
    index: int
    start_step: int
    end_step: int
    solver: Mapping[str, Any] | None


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
    return Task(
        kind=values["kind"],
        labels=values["labels"],
        total_steps=int(values["total_steps"]),
        batch_size=int(values["batch_size"]),
        precision=values["precision"],
        optimizer=optimizer,
        schedule=schedule,
    )


def build_phases(phases: Sequence[Mapping[str, Any]], total_steps: int, where: str) -> tuple[Phase, ...]:
    """Phases with their places on the global step axis. Raises: ConfigError unless they fill total_steps exactly."""
    names = [phase["name"] for phase in phases]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(f"{where}: two phases are called {repeated!r}; rename one")
    lengths = _phase_lengths(phases, total_steps, where)
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    if ends[-1] != total_steps:
        raise ConfigError(
            f"{where}: the phases have {ends[-1]} steps, the task has total_steps {total_steps}; "
            "make them equal or give one phase 'rest'"
        )
    return tuple(
        Phase(phase["name"], index, end - length, end, _solver(phase["solver"]))
        for index, (phase, length, end) in enumerate(zip(phases, lengths, ends, strict=True))
    )


def _solver(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The settings as they are hashed: `tol: 1` and `tol: 1.0` are one identity."""
    if values is None:
        return None
    return {key: float(value) if key in ("tol", "tau") else value for key, value in values.items()}


def _phase_lengths(phases: Sequence[Mapping[str, Any]], total_steps: int, where: str) -> list[int]:
    given = {phase["name"]: _given_steps(phase["steps"], total_steps) for phase in phases}
    open_names = [name for name, steps in given.items() if steps is None]
    if len(open_names) > 1:
        raise ConfigError(
            f"{where}: phases {' and '.join(open_names)} both have steps 'rest'; give all but one a number"
        )
    rest = total_steps - sum(steps for steps in given.values() if steps is not None)
    if open_names and rest < 1:
        raise ConfigError(
            f"{where}: no step of the {total_steps} is left for phase {open_names[0]!r}; "
            "shorten the other phases or raise total_steps"
        )
    return [rest if steps is None else steps for steps in given.values()]


def _given_steps(steps: int | float | str, total_steps: int) -> int | None:
    if isinstance(steps, str):
        return None
    return max(1, round(steps * total_steps)) if steps < 1 else int(steps)
