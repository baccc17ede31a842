"""The driver dies, in every state of its job; the next one submits nothing again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from toy_project import ToyProject, write_shim


def submitted(project: ToyProject) -> int:
    assert project.cluster
    return project.cluster.job_count()


def test_a_running_job_is_taken_over(on_slurm: ToyProject) -> None:
    before = submitted(on_slurm)
    on_slurm.start(steps=4)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 1)
    (on_slurm.path / "hold").touch()
    on_slurm.kill_driver()
    on_slurm.start(steps=4)
    on_slurm.wait_until(lambda: "taken over" in on_slurm.said())
    (on_slurm.path / "hold").unlink()
    said = on_slurm.finish()
    assert said.endswith("exit code 0"), said
    assert "%s" not in said
    assert on_slurm.steps() == [1, 2, 3, 4]
    assert submitted(on_slurm) == before + 2  # train and result


@pytest.mark.slow
def test_a_pending_job_is_taken_over(on_slurm: ToyProject) -> None:
    assert on_slurm.cluster
    before = submitted(on_slurm)
    blocker = ["sbatch", "--parsable", "--partition=h100", "--exclusive", "--mem=0", "--wrap=sleep 600"]
    blocking = on_slurm.cluster.run(*blocker, "--output=/dev/null").strip()
    config = {"resources": {"mem_mb": 500, "runtime": 5, "slurm_partition": "h100"}}
    on_slurm.start(**config)
    job_id = on_slurm.wait_until(lambda: on_slurm.has_record("train") and on_slurm.record("train")["job_id"])
    on_slurm.kill_driver()
    assert on_slurm.cluster.states()[job_id] == "PENDING"
    on_slurm.start(**config)
    on_slurm.wait_until(lambda: "taken over" in on_slurm.said())
    on_slurm.cluster.run("scancel", blocking)
    assert on_slurm.finish().endswith("exit code 0"), on_slurm.said()
    assert submitted(on_slurm) == before + 3


@pytest.mark.slow
def test_a_job_that_finished_meanwhile_is_taken_over(on_slurm: ToyProject) -> None:
    before = submitted(on_slurm)
    on_slurm.start(steps=4)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 2)
    on_slurm.kill_driver()
    on_slurm.wait_until(lambda: list(on_slurm.job("train").glob("outcome-*.json")))
    said = on_slurm.run(steps=4)
    assert said.endswith("exit code 0"), said
    assert len(on_slurm.starts()) == 1
    assert submitted(on_slurm) == before + 2


@pytest.mark.slow
def test_a_finished_job_without_its_outputs_is_submitted_again(on_slurm: ToyProject) -> None:
    before = submitted(on_slurm)
    on_slurm.start(steps=2)
    on_slurm.wait_until(lambda: on_slurm.has_record("train") and list(on_slurm.job("train").glob("outcome-*.json")))
    on_slurm.kill_driver()
    (on_slurm.path / "trained.txt").unlink(missing_ok=True)
    assert on_slurm.run(steps=2).endswith("exit code 0"), on_slurm.said()
    assert submitted(on_slurm) >= before + 3


@pytest.mark.slow
def test_a_driver_killed_within_sbatch_leaves_one_job(on_slurm: ToyProject, tmp_path: Path) -> None:
    on_slurm.shims = tmp_path / "shims"
    write_shim(on_slurm.shims, "sbatch", ['"$REAL" "$@" > accepted', "sleep 60"])
    before = submitted(on_slurm)
    on_slurm.start(steps=8)
    on_slurm.wait_until(lambda: (on_slurm.path / "accepted").exists() and (on_slurm.path / "accepted").read_text())
    assert on_slurm.record("train")["job_id"] == ""
    os.killpg(on_slurm.drivers[-1].pid, signal.SIGKILL)
    on_slurm.shims = None
    said = on_slurm.run(steps=8)
    assert said.endswith("exit code 0"), said
    assert "taken over" in said
    assert "%s" not in said
    assert on_slurm.steps() == list(range(1, 9))
    assert submitted(on_slurm) == before + 2


@pytest.mark.slow
def test_a_second_driver_waits_for_the_jobs_of_the_first(on_slurm: ToyProject) -> None:
    before = submitted(on_slurm)
    first = on_slurm.start(steps=16)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 1)
    assert on_slurm.run("trained.txt", steps=16).endswith("exit code 0"), on_slurm.said()
    assert first.wait(timeout=60) == 0
    assert on_slurm.steps() == list(range(1, 17))
    assert submitted(on_slurm) == before + 2


@pytest.mark.slow
def test_other_parameters_are_refused_while_the_old_job_runs(on_slurm: ToyProject) -> None:
    on_slurm.start(steps=100)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 1)
    on_slurm.kill_driver()
    said = on_slurm.run(steps=50)
    assert said.endswith("exit code 1")
    assert "still makes these outputs with other parameters" in said
    assert f"scancel {on_slurm.record('train')['job_id']}" in said
    assert len(on_slurm.starts()) == 1
