"""Reading Slurm's answers, with programs that give them instead of a Slurm."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from snakemake_executor_plugin_submitit.slurm import NoAnswer, SlurmQueue, find_by_name

LOG = logging.getLogger("test")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH; `asked` in it lists the calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for program in ("sacct", "squeue"):
        answer(folder, program)
    return folder


def answer(folder: Path, program: str, *lines: str, code: int = 0, error: str = "") -> None:
    text = [f'#!/bin/bash\necho {program} "$@" >> {folder}/asked', "cat <<'END'", *lines, "END"]
    (folder / program).write_text("\n".join([*text, f"echo '{error}' >&2", f"exit {code}", ""]))
    (folder / program).chmod(0o755)


def asked(folder: Path) -> list[str]:
    path = folder / "asked"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_running_jobs_and_arrays_take_one_question(programs: Path) -> None:
    answer(programs, "squeue", "7|RUNNING||n1|None", "8_[0-1,3%2]|PENDING|||Priority", "8_2|RUNNING||n2|None")
    states = SlurmQueue(1, LOG).ask(["7", "8_0", "8_1", "8_2", "8_3"])
    assert {job: state.state for job, state in states.items()} == {
        "7": "RUNNING",
        "8_0": "PENDING",
        "8_1": "PENDING",
        "8_2": "RUNNING",
        "8_3": "PENDING",
    }
    assert asked(programs) == ["squeue"]


def test_the_accounting_is_asked_about_jobs_that_squeue_has_forgotten(programs: Path) -> None:
    answer(programs, "squeue", "7|PENDING|||BeginTime")
    answer(programs, "sacct", "7|PREEMPTED|0:0|n1", "8|CANCELLED by 1000|0:15|n2")
    states = SlurmQueue(1, LOG).ask(["7", "8"])
    assert states["7"].state == "PENDING"  # between its end and its requeue, sacct shows the end
    assert states["8"].state == "CANCELLED"
    assert states["8"].is_ended


def test_no_end_is_believed_while_squeue_does_not_answer(programs: Path) -> None:
    answer(programs, "sacct", "7|PREEMPTED|0:0|n1", "8|RUNNING|0:0|n2")
    answer(programs, "squeue", code=1, error="Unable to contact slurm controller")
    assert set(SlurmQueue(1, LOG).ask(["7", "8"])) == {"8"}


@pytest.mark.parametrize("state", ["UNKNOWN", "", "?", "COMPLETEDISH"])
def test_an_unknown_state_is_no_state(programs: Path, state: str) -> None:
    answer(programs, "sacct", f"7|{state}|0:0|n1")
    assert SlurmQueue(1, LOG).ask(["7"]) == {}


def test_a_cluster_without_accounting_is_asked_for_it_once(programs: Path) -> None:
    answer(programs, "sacct", code=1, error="Slurm accounting storage is disabled")
    answer(programs, "squeue", "7|FAILED||n1|NonZeroExitCode")
    queue = SlurmQueue(1, LOG)
    assert queue.ask(["7", "8"])["7"].state == "FAILED"
    queue.ask(["7", "8"])
    assert asked(programs) == ["squeue", "sacct", "squeue"]


def test_a_job_that_slurm_has_forgotten_is_just_not_there(programs: Path) -> None:
    answer(programs, "squeue", code=1, error="slurm_load_jobs error: Invalid job id specified")
    assert SlurmQueue(1, LOG).ask(["7"]) == {}


def test_questions_become_rare_while_nobody_answers(programs: Path) -> None:
    for program in ("sacct", "squeue"):
        answer(programs, program, code=1, error="Unable to contact slurm controller")
    clock = Clock()
    queue = SlurmQueue(10, LOG, clock)
    pauses = []
    for _ in range(8):
        with pytest.raises(NoAnswer):
            queue.ask(["7"])
        since = clock.now
        while not queue.is_due():
            clock.now += 10
        pauses.append(clock.now - since)
    assert pauses == [20, 40, 80, 160, 320, 600, 600, 600]
    answer(programs, "sacct", "7|RUNNING|0:0|n1")
    queue.ask(["7"])
    clock.now += 10
    assert queue.is_due()


def test_a_job_is_found_by_its_name_in_the_queue_or_in_the_accounting(programs: Path) -> None:
    answer(programs, "squeue", "12|train-abc-1-00000000")
    assert find_by_name("train-abc-1-00000000", 0) == "12"
    answer(programs, "squeue")
    answer(programs, "sacct", "13_0|train-abc-1-00000000", "13_1|train-abc-1-00000000")
    assert find_by_name("train-abc-1-00000000", 0) == "13"
    assert find_by_name("train-abc-2-00000000", 0, tries=1) is None
