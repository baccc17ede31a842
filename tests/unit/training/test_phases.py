"""Phases that follow one another are one training: in their states, their steps and their learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from implicit_llm.training.stage import TrainInputError
from implicit_llm_contracts.runs.faults import FaultInjected
from implicit_llm_contracts.runs.stage_context import InputMissing
from tests.unit.training.small_runs import (
    FREE,
    STEPS,
    UNROLLED,
    Inject,
    Undisturbed,
    artifacts,
    logged,
    outcome,
    train,
    train_config,
)


def phase(index: int, start: int, end: int, solver: dict[str, Any] = FREE) -> dict[str, Any]:
    return train_config(
        phase={"name": f"p{index}", "index": index, "start_step": start, "end_step": end, "solver": solver}
    )


def test_two_phases_with_one_solver_equal_one_phase_bit_for_bit(
    tmp_path: Path, data: Path, undisturbed: Undisturbed
) -> None:
    whole, points = undisturbed.of(train_config())
    first, second = tmp_path / "a" / "p0", tmp_path / "a" / "p1"
    train(first, phase(0, 0, 3), data, log_every_steps=2)
    train(second, phase(1, 3, STEPS), data, start=first)
    tensors = [name for name in whole if name.endswith(".safetensors")]
    assert len(tensors) == 4  # weights twice, optimizer, random states
    assert {name: artifacts(second)[name] for name in tensors} == {name: whole[name] for name in tensors}
    assert logged(second) == [point for point in points if point[0] > 3]


def test_the_next_phase_can_start_again_from_the_one_before(tmp_path: Path, data: Path, inject: Inject) -> None:
    first = tmp_path / "a" / "p0"
    train(first, phase(0, 0, 4, UNROLLED), data)
    before = artifacts(first)
    with inject("train.after_step:raise@1"), pytest.raises(FaultInjected):
        train(tmp_path / "y" / "p1", phase(1, 4, STEPS), data, start=first)
    for name in ("x", "y"):
        train(tmp_path / name / "p1", phase(1, 4, STEPS), data, start=first)
    assert outcome(tmp_path / "x" / "p1") == outcome(tmp_path / "y" / "p1")
    assert artifacts(first) == before
    assert [step for step, _ in logged(tmp_path / "x" / "p1")] == [5, 6, 7, 8]


def test_a_phase_that_does_not_follow_its_start_is_refused(tmp_path: Path, data: Path) -> None:
    first = tmp_path / "a" / "p0"
    train(first, phase(0, 0, 4), data)
    with pytest.raises(TrainInputError, match="only the state after 4, but phase p1 starts at step 5; add 5 to `keep`"):
        train(tmp_path / "a" / "p1", phase(1, 5, STEPS), data, start=first)
    with pytest.raises(InputMissing, match="no input `start`"):
        train(tmp_path / "b" / "p1", phase(1, 4, STEPS), data)


def test_the_learning_rate_is_one_function_over_both_phases(
    tmp_path: Path, data: Path, undisturbed: Undisturbed
) -> None:
    first, second = tmp_path / "a" / "p0", tmp_path / "a" / "p1"
    train(first, phase(0, 0, 4, UNROLLED), data)
    train(second, phase(1, 4, STEPS), data, start=first)
    rates = [values["learning_rate"] for _, values in logged(first) + logged(second)]
    assert rates == [values["learning_rate"] for _, values in undisturbed.of(train_config())[1]]
