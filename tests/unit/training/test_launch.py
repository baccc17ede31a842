"""The launcher and its processes: one signal for all, one reason for the end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.training.distributed_run import MANY_STEPS
from tests.unit.training.small_runs import artifacts, logged, saved, work_of

ROOT = Path(__file__).parents[3]
DEADLINE_S = 400
pytestmark = pytest.mark.slow


class Launched:
    """Two processes behind a launcher, with a status file as the executor gives it."""

    def __init__(
        self, run_dir: Path, data: Path, poison: dict[str, Any] | None = None, config: str = "explicit", **runtime: Any
    ) -> None:
        self.run_dir, self.status_file = run_dir, run_dir.with_name(f"{run_dir.name}-status.json")
        order = json.dumps({"config": config, "runtime": runtime, "poison": poison})
        command = [sys.executable, "-m", "tests.unit.training.launched_run", "2", str(run_dir), str(data), order]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "SUBMITIT_JOB_STATUS": str(self.status_file)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    @property
    def status(self) -> dict[str, Any]:
        return json.loads(self.status_file.read_text())

    def steps_reported(self) -> int:
        """The committed step that the executor knows of."""
        try:
            return int(self.status["progress"])
        except (FileNotFoundError, KeyError):
            return 0


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def descendants(job: Launched) -> list[psutil.Process]:
    return psutil.Process(job.process.pid).children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_stop_signal_to_the_launcher_reaches_all_once_and_what_was_committed_goes_on_bit_for_bit(
    tmp_path: Path, data: Path, number: signal.Signals
) -> None:
    stopped, undisturbed = tmp_path / "stopped" / "only", tmp_path / "undisturbed" / "only"
    first = Launched(stopped, data, config="long", save_steps=1)  # it would not end before the signal comes
    wait_until(lambda: first.steps_reported() >= 1)
    first.process.send_signal(number)
    first.process.send_signal(signal.SIGTERM)  # as Slurm does after the preemption notice
    code, errors = first.end()
    assert code == 75, errors
    assert errors.count("SIGUSR2 received") == 2
    assert first.status["failure_class"] == "preempted"
    assert 1 <= first.steps_reported() < MANY_STEPS
    assert saved(stopped)
    assert Launched(stopped, data, config="long").end()[0] == 0
    assert Launched(undisturbed, data, config="long").end()[0] == 0
    assert artifacts(stopped) == artifacts(undisturbed)
    assert logged(stopped) == logged(undisturbed)


def test_a_signal_before_the_processes_are_ready_waits_for_them(tmp_path: Path, data: Path) -> None:
    job = Launched(tmp_path / "a" / "only", data, config="long")  # it would not end before the signal comes
    wait_until(lambda: len(descendants(job)) == 3)  # torchrun and its processes, which import torch now
    job.process.send_signal(signal.SIGUSR2)
    code, errors = job.end()
    assert code == 75, errors
    assert "SIGUSR2 received" in errors


@pytest.mark.parametrize(
    ("what", "code", "failure", "message", "runtime"),
    [
        ("kill", 128 + signal.SIGKILL, "node_fail", "rank 1 on ", {}),
        ("hang", 1, "hang", "stacks-rank1.txt", {"hang_s": 8}),
        ("loss", 2, "non_finite", "the gradient norm nan at step 4 ", {}),  # not what the other one loses by it
    ],
)
def test_one_process_that_goes_wrong_ends_all_and_the_executor_is_told_why(
    tmp_path: Path, data: Path, what: str, code: int, failure: str, message: str, runtime: dict[str, Any]
) -> None:
    job = Launched(tmp_path / "a" / "only", data, {"rank": 1, "step": 4, "what": what}, save_steps=2, **runtime)
    ended, errors = job.end()
    assert ended == code, errors
    assert (job.status["failure_class"], job.status["progress"]) == (failure, 2)
    assert message in job.status["message"]
    if what == "hang":
        stacks = (work_of(job.run_dir) / "stacks-rank1.txt").read_text()
        assert "in goes_wrong" in stacks
        assert "in train_step" not in stacks


def test_no_process_outlives_a_killed_launcher(tmp_path: Path, data: Path) -> None:
    job = Launched(tmp_path / "a" / "only", data, {"rank": 1, "step": 4, "what": "hang"}, save_steps=2)
    wait_until(lambda: len(descendants(job)) == 3 and any(job.run_dir.rglob("journal.jsonl")))
    processes = descendants(job)
    job.process.kill()
    wait_until(lambda: not any(map(is_alive, processes)))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
