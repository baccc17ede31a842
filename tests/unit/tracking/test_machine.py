import threading
from pathlib import Path

import pytest

from implicit_llm_contracts.runs.journal import read
from implicit_llm_jobs.tracking import machine
from implicit_llm_jobs.tracking.machine import MachineMonitor
from tests.unit.tracking.small_stages import deadline


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")


def measured(path: Path, num_points: int = 1) -> None:
    monitor = MachineMonitor(path)
    monitor.start()
    pause = deadline()
    while len(read(path)) < num_points:
        pause()
    monitor.stop()


def is_running() -> bool:
    return any(thread.name == "machine" for thread in threading.enumerate())


def test_it_measures_until_it_is_stopped_and_counts_on_in_the_next_attempt(tmp_path: Path) -> None:
    path = tmp_path / "machine.jsonl"
    measured(path, 3)
    assert not is_running()
    before = len(read(path))
    measured(path, before + 2)
    points = read(path)
    assert [point.step for point in points] == list(range(len(points)))
    for point in points:
        assert 0 < point.values["system/system_memory_usage_percentage"] < 100
        assert all(key.startswith("system/") for key in point.values)


def started_and_stopped(path: Path) -> None:
    monitor = MachineMonitor(path)
    monitor.start()
    monitor.stop()
    assert not is_running()


def test_a_run_that_ends_at_once_has_one_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "1000")
    started_and_stopped(tmp_path / "machine.jsonl")
    assert len(read(tmp_path / "machine.jsonl")) == 1


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "false")
    monitor = MachineMonitor(tmp_path / "machine.jsonl")
    monitor.start()
    assert not is_running()
    monitor.stop()
    assert not (tmp_path / "machine.jsonl").exists()


def test_what_it_cannot_measure_or_write_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    started_and_stopped(tmp_path / "file" / "machine.jsonl")

    def fail() -> list[object]:
        raise RuntimeError("no such driver")

    monkeypatch.setattr(machine, "_monitors", fail)
    started_and_stopped(tmp_path / "machine.jsonl")
    assert not (tmp_path / "machine.jsonl").exists()
