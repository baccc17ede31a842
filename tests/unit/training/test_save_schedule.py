"""Saves by the clock, with a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_llm.training.operations import save_schedule
from implicit_llm.training.operations.checkpoint_store import CheckpointStore
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm.training.operations.save_schedule import SaveSchedule
from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.runs.journal import Journal


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(save_schedule, "time", clock)
    return clock


def steps_saved(clock: Clock, work: Path, *, save_s: float, num_steps: int, **runtime: Any) -> list[int]:
    """Steps of one second each after which a state is saved, when a save takes `save_s`."""
    saved = []
    with StopRequest() as stop:
        schedule = SaveSchedule(
            Runtime(**runtime), stop, 10**6, CheckpointStore(work, {}, Journal(None)), torch.device("cpu")
        )
        for step in range(1, num_steps + 1):
            clock.now += 1.0
            should_save, _ = schedule.after_step(step)
            if should_save:
                saved.append(step)
                clock.now += save_s
                schedule.after_save(step)
    return saved


@pytest.mark.parametrize(
    ("save_s", "num_steps", "runtime", "saved"),
    [
        (0.0, 31, {"save_every_s": 10.0}, [10, 20, 30]),
        (2.0, 250, {"save_every_s": 10.0}, [10, 110, 210]),  # slow saves by the clock take a fiftieth of the time
        (60.0, 30, {"save_every_s": 1000.0, "save_steps": 10}, [10, 20, 30]),
    ],
)
def test_saves_are_made_at_every_interval_unless_they_are_slow_and_at_given_steps(
    clock: Clock, tmp_path: Path, save_s: float, num_steps: int, runtime: dict[str, Any], saved: list[int]
) -> None:
    assert steps_saved(clock, tmp_path, save_s=save_s, num_steps=num_steps, **runtime) == saved
