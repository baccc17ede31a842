"""Saves by the clock, with a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_llm.training.operations import save_schedule
from implicit_llm.training.operations.checkpoint import TrainingState
from implicit_llm.training.operations.checkpoint_store import CheckpointStore
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm.training.operations.save_schedule import SaveSchedule, save_interval_s
from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.runs.journal import Journal
from tests.unit.training.test_checkpoint import IDENTITY, state

CPU = torch.device("cpu")


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


def at_once(work: Callable[[], object]) -> Future[None]:
    """In place of a thread, so that only the clock decides."""
    work()
    done: Future[None] = Future()
    done.set_result(None)
    return done


def steps_saved(clock: Clock, work: Path, *, num_steps: int, **runtime: Any) -> list[int]:
    """Steps of one second each after which a state is saved."""
    journal, saved = Journal(None), []
    store = CheckpointStore(work, IDENTITY, journal)
    with StopRequest() as stop, SaveSchedule(Runtime(**runtime), stop, 10**6, store, CPU, journal) as schedule:
        for step in range(1, num_steps + 1):
            clock.now += 1.0
            should_save, _ = schedule.after_step(step)
            if should_save:
                saved.append(step)
                schedule.commit(state(step))
    return saved


@pytest.mark.parametrize(
    ("runtime", "saved"),
    [
        ({"save_every_s": 10.0}, [10, 20, 30]),
        ({"save_every_s": 1000.0, "save_steps": 10}, [10, 20, 30]),
        ({"save_every_s": 0.0, "save_steps": 10}, list(range(1, 32))),
    ],
)
def test_saves_are_made_at_every_interval_and_at_given_steps(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: dict[str, Any], saved: list[int]
) -> None:
    monkeypatch.setattr(save_schedule, "in_background", at_once)
    assert steps_saved(clock, tmp_path, num_steps=31, **runtime) == saved


@pytest.mark.parametrize(
    ("wanted_s", "stall_s", "write_s", "interval_s"),
    [(10, 0, 0, 10), (10, 2, 0, 100), (10, 0.1, 30, 150), (0, 2, 30, 0)],
)
def test_slow_saves_by_the_clock_stall_a_fiftieth_of_the_time_and_write_a_fifth(
    wanted_s: float, stall_s: float, write_s: float, interval_s: float
) -> None:
    assert save_interval_s(wanted_s, stall_s, write_s) == pytest.approx(interval_s)


class SlowDisk(CheckpointStore):
    """Writes a state only once it is allowed to; `writing` counts the writes at the same time."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, IDENTITY, Journal(None))
        self.may_write = threading.Event()
        self.written: list[tuple[int, float]] = []
        self.writing = 0

    def commit(self, state: TrainingState) -> None:
        self.writing += 1
        assert self.writing == 1
        assert self.may_write.wait(60)
        self.written.append((state.global_step, float(state.model["weight"][0])))
        self.writing -= 1
        super().commit(state)


@pytest.fixture
def disk(tmp_path: Path) -> SlowDisk:
    return SlowDisk(tmp_path)


def schedule_of(disk: SlowDisk, stop: StopRequest, end_step: int) -> SaveSchedule:
    return SaveSchedule(Runtime(save_every_s=0.0), stop, end_step, disk, CPU, Journal(None))


def test_training_goes_on_while_a_state_is_written_as_it_was(disk: SlowDisk) -> None:
    with StopRequest() as stop, schedule_of(disk, stop, end_step=9) as schedule:
        live = state(1)
        assert schedule.after_step(1) == (True, False)
        schedule.commit(live)
        live.model["weight"].fill_(99.0)  # the next update
        assert schedule.after_step(2) == (False, False)  # none is due while one is written
        assert disk.written == []
        disk.may_write.set()
        schedule.commit(state(2))
    assert disk.written[0] == (1, 1.0)


def test_the_last_state_is_on_disk_when_its_save_returns(disk: SlowDisk) -> None:
    disk.may_write.set()
    with StopRequest() as stop, schedule_of(disk, stop, end_step=2) as schedule:
        for step in (1, 2):
            schedule.after_step(step)
            schedule.commit(state(step))
        assert [step for step, _ in disk.written] == [1, 2]


@pytest.mark.parametrize(("error", "written"), [(ValueError, [(1, 1.0)]), (KeyboardInterrupt, [])])
def test_an_error_of_training_waits_for_the_write_and_a_second_ctrl_c_does_not(
    disk: SlowDisk, error: type[BaseException], written: list[tuple[int, float]]
) -> None:
    def fail_after_a_save() -> None:
        with StopRequest() as stop, schedule_of(disk, stop, end_step=9) as schedule:
            schedule.after_step(1)
            schedule.commit(state(1))
            if written:
                disk.may_write.set()
            raise error

    with pytest.raises(error):
        fail_after_a_save()
    assert disk.written == written
    disk.may_write.set()  # for the thread that is left
