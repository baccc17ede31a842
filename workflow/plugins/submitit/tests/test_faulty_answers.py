"""Slurm's commands fail, are silent or say nonsense; a job is neither lost nor submitted twice, nor called done."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from snakemake_executor_plugin_submitit import processes
from snakemake_executor_plugin_submitit.step import MAIN
from toy_project import ToyProject, write_shim


@pytest.fixture
def shimmed(on_slurm: ToyProject, tmp_path: Path) -> ToyProject:
    on_slurm.shims = tmp_path / "shims"
    return on_slurm


@pytest.mark.parametrize(
    "answer",
    ["echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1", "echo mumble; exit 0"],
    ids=["error", "nonsense"],
)
@pytest.mark.slow
def test_a_job_that_sbatch_accepted_although_it_failed_is_found(shimmed: ToyProject, answer: str) -> None:
    assert shimmed.cluster
    assert shimmed.shims
    write_shim(shimmed.shims, "sbatch", ['"$REAL" "$@" > /dev/null', answer])
    before = shimmed.cluster.job_count()
    assert shimmed.run().endswith("exit code 0"), shimmed.said()
    assert shimmed.cluster.job_count() == before + 2


@pytest.mark.slow
def test_an_sbatch_that_fails_in_passing_is_called_again(shimmed: ToyProject) -> None:
    assert shimmed.cluster
    assert shimmed.shims
    lines = ['[ -e failed ] && exec "$REAL" "$@"', "touch failed", "echo 'Unable to contact slurm controller' >&2"]
    write_shim(shimmed.shims, "sbatch", [*lines, "exit 1"])
    before = shimmed.cluster.job_count()
    assert shimmed.run().endswith("exit code 0"), shimmed.said()
    assert shimmed.cluster.job_count() == before + 2


@pytest.mark.slow
def test_a_refused_submission_says_why(on_slurm: ToyProject) -> None:
    said = on_slurm.run(resources={"mem_mb": 500, "runtime": 5, "slurm_partition": "moon"})
    assert said.endswith("exit code 1")
    assert "not submitted: sbatch failed with exit code 1" in said
    assert "invalid partition specified: moon" in said


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'sacct: error: Problem talking to the database' >&2; exit 1",
        "echo 'Slurm accounting storage is disabled' >&2; exit 1",
        "exit 0",
        '"$REAL" "$@" | sed -E \'s/(PENDING|RUNNING|COMPLETED|CANCELLED[^|]*)/UNKNOWN/\'',
    ],
    ids=["error", "disabled", "silent", "unknown"],
)
@pytest.mark.slow
def test_the_end_of_a_job_is_noticed_without_accounting(shimmed: ToyProject, answer: str) -> None:
    """Of a job that was cancelled, so that only squeue can tell."""
    assert shimmed.cluster
    assert shimmed.shims
    write_shim(shimmed.shims, "sacct", [answer])
    shimmed.start(steps=400)
    shimmed.wait_until(lambda: len(shimmed.steps()) > 1)
    shimmed.cluster.run("scancel", shimmed.record("train")["job_id"])
    said = shimmed.finish()
    assert said.endswith("exit code 1")
    assert "class user, Slurm state CANCELLED" in said


@pytest.mark.slow
def test_a_job_that_ends_without_a_word_is_lost_and_started_once_more(on_slurm: ToyProject) -> None:
    """Killed is the process that would have written how the job ended."""
    on_slurm.start(steps=400)
    for attempt in (1, 2):
        on_slurm.wait_until(lambda attempt=attempt: len(on_slurm.starts()) == attempt)
        pids = processes.with_environment(SLURM_JOB_ID=on_slurm.record("train")["job_id"])
        (wrapper,) = [pid for pid in pids if MAIN in processes.command_of(pid)]
        os.kill(wrapper, signal.SIGKILL)
    said = on_slurm.finish()
    assert said.endswith("exit code 1")
    assert said.count("class lost") == 2
    assert "ended without an outcome" in said


@pytest.mark.slow
def test_while_slurm_answers_nothing_at_all_the_driver_waits_for_the_job(shimmed: ToyProject) -> None:
    assert shimmed.cluster
    assert shimmed.shims
    for program in ("sacct", "squeue"):
        write_shim(shimmed.shims, program, ["echo 'Unable to contact slurm controller' >&2", "exit 1"])
    before = shimmed.cluster.job_count()
    said = shimmed.run(steps=20)
    assert said.endswith("exit code 0"), said
    assert "asked again in" in said
    assert shimmed.steps() == list(range(1, 21))
    assert shimmed.cluster.job_count() == before + 2
