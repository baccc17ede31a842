"""When a job counts as ended, and how; and when somebody is told."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snakemake_executor_plugin_submitit import monitor, store
from snakemake_executor_plugin_submitit.monitor import SETTLE_S, Monitor, is_worth_another, message
from snakemake_executor_plugin_submitit.records import read_jobs
from snakemake_executor_plugin_submitit.request import Job
from snakemake_executor_plugin_submitit.slurm import NO_ANSWER, UNKNOWN, SlurmState
from snakemake_executor_plugin_submitit.store import CLASSES, End, JobFiles, Record, add_attempt, write_json


class Slurm:
    """The queue, with the state of job 7 that a test wants. None: it does not know the job; "": no answer."""

    interval_s = 60.0

    def __init__(self, state: str | None) -> None:
        self.state, self.now = state, 0.0

    def is_due(self) -> bool:
        return True

    def ask(self, job_ids: object) -> dict[str, SlurmState]:
        shown = SlurmState(self.state or "", "0:9", "node3")
        return {"7": {None: UNKNOWN, "": NO_ANSWER}.get(self.state, shown)}

    def end(self, job: Job, seconds: float = 0) -> End | None:
        """How the job has ended when it is looked at so many seconds later."""
        self.now += seconds
        watch = Monitor(self, lost_after_s=600, clock=lambda: self.now)  # type: ignore[arg-type]
        return watch.look([job])[0]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    files = JobFiles(tmp_path / "jobs" / "train-7")
    record = Record("key", "name", 1, "slurm", str(files.submission(1)), job_id="7")
    files.submission(1).mkdir(parents=True)
    add_attempt(files.attempts, "start", submission=1, nodes="node3", progress=None)
    step: Any = SimpleNamespace(files=files)
    return Job(SimpleNamespace(), step=step, record=record)  # type: ignore[arg-type]


def failed(job: Job, state: str) -> End:
    """How a job has failed whose Slurm says only this."""
    slurm = Slurm(state)
    assert slurm.end(job) is None  # its last file may not be visible yet
    assert slurm.end(job, SETTLE_S) is None  # it may be requeued
    end = slurm.end(job, 1.5 * slurm.interval_s)
    assert end is not None
    return end


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("COMPLETED", "lost"),  # as long as the job itself has not said that it ended well
        ("FAILED", "lost"),
        ("TIMEOUT", "timeout"),
        ("OUT_OF_MEMORY", "oom"),
        ("NODE_FAIL", "node_fail"),
        ("PREEMPTED", "preempted"),
        ("CANCELLED", "cancelled"),
    ],
)
def test_a_job_that_ended_without_a_word_is_never_a_success(job: Job, state: str, kind: str) -> None:
    failure = failed(job, state)
    assert (failure.failure_class, failure.nodes) == (kind, "node3")


def test_an_outcome_counts_that_nfs_shows_only_when_its_folder_is_listed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listdir(path: Path) -> list[str]:
        write_json(job.files.outcome(1), {"exit_code": 0, "failure_class": None})
        return os.listdir(path)

    monkeypatch.setattr(monitor, "os", SimpleNamespace(listdir=listdir))
    assert failed(job, "COMPLETED") == End(None, exit_code=0)


def test_how_a_killed_job_ended_is_known_after_its_driver(job: Job) -> None:
    failure = failed(job, "OUT_OF_MEMORY")
    assert job.files.end(1) == failure
    store.save(job.files, replace(job.record, is_open=False))
    (found,) = read_jobs(job.files.path.parents[1]).values()
    assert (found.state, found.failure_class) == ("ended", "oom")
    assert found.message == "killed for lack of memory (exit code 0:9)"


def test_a_job_killed_for_want_of_memory_is_known_by_what_slurm_wrote(job: Job) -> None:
    job.stderr.write_text("slurmstepd: error: StepId=7.0 exceeded memory limit (2 > 1)\n")
    assert failed(job, "FAILED").failure_class == "oom"


@pytest.mark.parametrize(
    ("exit_code", "said", "kind"),
    [(0, None, None), (1, "user", "user"), (1, "moon", "bug")],  # moon: a class of another version
)
def test_what_the_job_wrote_counts_whatever_slurm_says(
    job: Job, exit_code: int, said: str | None, kind: str | None
) -> None:
    write_json(job.files.outcome(1), {"exit_code": exit_code, "failure_class": said})
    end = Slurm("").end(job)
    assert end is not None
    assert (end.failure_class, end.exit_code) == (kind, exit_code)


def test_while_slurm_does_not_answer_nothing_is_decided(job: Job) -> None:
    slurm = Slurm("")
    assert [slurm.end(job, 600) for _ in range(100)] == [None] * 100


def test_an_end_is_not_believed_while_slurm_does_not_answer_any_more(job: Job) -> None:
    slurm = Slurm("PREEMPTED")
    for state in ("PREEMPTED", "", "PENDING"):
        slurm.state = state
        assert slurm.end(job, 1000) is None


def test_a_job_that_slurm_does_not_know_is_lost_after_a_while_unless_it_is_seen_again(job: Job) -> None:
    slurm = Slurm(None)
    assert slurm.end(job) is None
    slurm.state = "RUNNING"
    assert slurm.end(job, 599) is None
    slurm.state = None
    assert slurm.end(job, 1) is None
    assert slurm.end(job, 599) is None
    assert slurm.end(job, 1) == End("lost", "Slurm has not known job 7 for 600 s")


@pytest.mark.parametrize(
    ("exit_code", "said", "state", "kind"),
    [
        (75, "preempted", "CANCELLED", "cancelled"),
        (143, "preempted", "NODE_FAIL", "node_fail"),
        (75, "preempted", "TIMEOUT", "preempted"),  # it has a checkpoint and goes on
        (143, "timeout", "TIMEOUT", "timeout"),  # it has none
    ],
)
def test_of_a_job_that_stopped_on_sigterm_slurm_says_why(
    job: Job, exit_code: int, said: str, state: str, kind: str
) -> None:
    write_json(job.files.outcome(1), {"exit_code": exit_code, "failure_class": said, "asked": "SIGTERM"})
    assert Slurm("PENDING").end(job, 1000) is None  # requeued by Slurm
    failure = failed(job, state)
    assert (failure.failure_class, failure.exit_code, failure.nodes) == (kind, exit_code, "node3")
    assert job.files.end(1) == failure
    assert f"class {kind}, Slurm state {state}, exit code {exit_code}, on node3" in message(job, failure)


@pytest.mark.parametrize("kind", sorted(CLASSES.keys() - {"preempted"}))
def test_each_class_has_one_retry_rule(job: Job, kind: str) -> None:
    assert is_worth_another(job, kind, requeue_limit=50) is (kind in ("oom", "node_fail", "lost"))
    job.record = replace(job.record, retries={kind: 1})
    assert not is_worth_another(job, kind, requeue_limit=50)


def test_a_preempted_job_is_started_again_up_to_the_limit(job: Job) -> None:
    assert is_worth_another(job, "preempted", requeue_limit=1)
    assert not is_worth_another(job, "preempted", requeue_limit=0)


def test_the_message_has_all_that_helps(job: Job) -> None:
    job.files.output_log.write_text("first\nlast words\n")
    text = message(job, failed(job, "TIMEOUT"))
    assert "class timeout, Slurm state TIMEOUT, on node3: killed at its time limit (exit code 0:9)\n" in text
    assert f"\noutput: {job.files.output_log}\nsubmitit: {job.stderr}\n" in text
    assert text.endswith("    first\n    last words")
