"""The driver dies, or Slurm's commands fail: no job is lost, submitted twice or reported as done."""

import os
import signal

import pytest

from snakemake_executor_plugin_submitit import processes
from snakemake_executor_plugin_submitit.step import MAIN
from toy_project import ToyProject


def test_a_running_job_is_taken_over(on_slurm: ToyProject) -> None:
    on_slurm.start(steps=4)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 1)
    (on_slurm.path / "hold").touch()
    on_slurm.kill_driver()
    on_slurm.start(steps=4)
    on_slurm.wait_until(lambda: "taken over" in on_slurm.said())
    (on_slurm.path / "hold").unlink()
    said = on_slurm.finish()
    assert "%s" not in said
    assert on_slurm.steps() == [1, 2, 3, 4]
    assert on_slurm.submitted == 2  # train and result


@pytest.mark.slow
def test_a_pending_job_is_taken_over(on_slurm: ToyProject) -> None:
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
    on_slurm.finish()
    assert on_slurm.submitted == 3


@pytest.mark.slow
def test_a_job_that_finished_meanwhile_is_taken_over(on_slurm: ToyProject) -> None:
    on_slurm.start(steps=4)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 2)
    on_slurm.kill_driver()
    on_slurm.wait_until(lambda: list(on_slurm.job("train").glob("outcome-*.json")))
    on_slurm.run(steps=4)
    assert len(on_slurm.starts()) == 1
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_a_driver_killed_within_sbatch_leaves_one_job(on_slurm: ToyProject) -> None:
    on_slurm.shim("sbatch", '"$REAL" "$@" > accepted', "sleep 60")
    on_slurm.start(steps=8)
    on_slurm.wait_until(lambda: (on_slurm.path / "accepted").exists() and (on_slurm.path / "accepted").read_text())
    assert on_slurm.record("train")["job_id"] == ""
    os.killpg(on_slurm.drivers[-1].pid, signal.SIGKILL)
    (on_slurm.path / "shims" / "sbatch").unlink()
    said = on_slurm.run(steps=8)
    assert "taken over" in said
    assert "%s" not in said
    assert on_slurm.steps() == list(range(1, 9))
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_a_second_driver_waits_for_the_jobs_of_the_first(on_slurm: ToyProject) -> None:
    first = on_slurm.start(steps=16)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 1)
    on_slurm.run("trained.txt", steps=16)
    assert first.wait(timeout=60) == 0
    assert on_slurm.steps() == list(range(1, 17))
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_a_job_that_sbatch_accepted_although_it_failed_is_found(on_slurm: ToyProject) -> None:
    timed_out = "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2"
    on_slurm.shim("sbatch", '"$REAL" "$@" > /dev/null', timed_out, "exit 1")
    on_slurm.run()
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_a_partition_that_slurm_refuses_is_named_before_anything_is_submitted(on_slurm: ToyProject) -> None:
    said = on_slurm.run(resources={"mem_mb": 500, "runtime": 5, "slurm_partition": "moon"}, code=1)
    assert "Slurm refuses --partition=moon" in said
    assert "invalid partition specified: moon" in said
    assert "partitions: mi300x, v100, h100, low" in said
    assert on_slurm.submitted == 0


@pytest.mark.slow
def test_the_end_of_a_cancelled_job_is_noticed_though_the_accounting_says_unknown(on_slurm: ToyProject) -> None:
    on_slurm.shim("sacct", '"$REAL" "$@" | sed -E \'s/(PENDING|RUNNING|COMPLETED|CANCELLED[^|]*)/UNKNOWN/\'')
    on_slurm.start(steps=400)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 1)
    on_slurm.cluster.run("scancel", on_slurm.record("train")["job_id"])
    said = on_slurm.finish(code=1)
    assert "class user, Slurm state CANCELLED" in said


@pytest.mark.slow
def test_a_job_that_ends_without_an_outcome_is_lost_and_started_once_more(on_slurm: ToyProject) -> None:
    """Killed is the process that would have written how the job ended."""
    on_slurm.start(steps=400)
    for attempt in (1, 2):
        on_slurm.wait_until(lambda attempt=attempt: len(on_slurm.starts()) == attempt)
        found = processes.with_environment(SLURM_JOB_ID=on_slurm.record("train")["job_id"])
        processes.kill([process for process in found if MAIN in process.cmdline()])
    said = on_slurm.finish(code=1)
    assert said.count("class lost") == 2
    assert "ended without an outcome" in said


@pytest.mark.slow
def test_while_slurm_answers_nothing_at_all_the_driver_waits_for_the_job(on_slurm: ToyProject) -> None:
    for program in ("sacct", "squeue"):
        on_slurm.shim(program, "echo 'Unable to contact slurm controller' >&2", "exit 1")
    said = on_slurm.run(steps=20)
    assert "asked again in" in said
    assert on_slurm.steps() == list(range(1, 21))
    assert on_slurm.submitted == 2
