"""When a job counts as ended, and how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snakemake_executor_plugin_submitit import attempts
from snakemake_executor_plugin_submitit.attempts import CLASSES, Failure
from snakemake_executor_plugin_submitit.monitor import SETTLE_S, Monitor, Tracked, Verdict, is_worth_another, message
from snakemake_executor_plugin_submitit.slurm import NoAnswer, SlurmState
from snakemake_executor_plugin_submitit.store import JobFiles, Record, write_json


class Slurm:
    """The queue, with the answer that a test wants; None: no answer."""

    interval_s = 60.0

    def __init__(self) -> None:
        self.states: dict[str, SlurmState] | None = {}
        self.now = 0.0

    def is_due(self) -> bool:
        return True

    def ask(self, job_ids: object) -> dict[str, SlurmState]:
        if self.states is None:
            raise NoAnswer("sacct failed")
        return self.states


@pytest.fixture
def job(tmp_path: Path) -> Tracked:
    files = JobFiles(tmp_path / "job")
    record = Record("key", "name", 1, "slurm", str(tmp_path / "job" / "1"), "submitted", "7")
    (tmp_path / "job" / "1").mkdir(parents=True)
    attempts.add(files.attempts, "start", submission=1, nodes="node3", progress=None)
    prepared: Any = SimpleNamespace(files=files)
    return Tracked(SimpleNamespace(), prepared, record)  # type: ignore[arg-type]


def look(slurm: Slurm, job: Tracked, seconds: float = 0) -> Verdict:
    monitor = Monitor(slurm, lost_after_s=600, clock=lambda: slurm.now)  # type: ignore[arg-type]
    slurm.now += seconds
    return monitor.look([job])[0]


def failed(job: Tracked, state: str) -> Failure:
    """How a job has failed whose Slurm says only this."""
    slurm = Slurm()
    slurm.states = {"7": SlurmState(state, "0:9", "node3")}
    assert not look(slurm, job).is_over  # its last file may not be visible yet
    assert not look(slurm, job, SETTLE_S).is_over  # it may be requeued
    verdict = look(slurm, job, 1.5 * slurm.interval_s)
    assert verdict.failure is not None
    return verdict.failure


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("COMPLETED", "lost"),  # as long as the job itself has not said that it ended well
        ("FAILED", "lost"),
        ("TIMEOUT", "timeout"),
        ("OUT_OF_MEMORY", "oom"),
        ("NODE_FAIL", "node_fail"),
        ("PREEMPTED", "preempted"),
        ("CANCELLED", "user"),
    ],
)
def test_a_job_that_ended_without_a_word_is_never_a_success(job: Tracked, state: str, kind: str) -> None:
    failure = failed(job, state)
    assert (failure.kind, failure.nodes) == (kind, "node3")


def test_a_job_killed_for_want_of_memory_is_known_by_what_slurm_wrote(job: Tracked) -> None:
    Path(job.record.folder, "7_0_log.err").write_text("slurmstepd: error: StepId=7.0 exceeded memory limit (2 > 1)\n")
    assert failed(job, "FAILED").kind == "oom"


def test_what_the_job_wrote_counts_whatever_slurm_says(job: Tracked) -> None:
    slurm = Slurm()
    slurm.states = None
    write_json(job.files.outcome(1), {"exit_code": 0, "failure_class": None})
    assert look(slurm, job) == Verdict(True)


def test_an_outcome_with_a_class_of_another_version_is_a_bug(job: Tracked) -> None:
    write_json(job.files.outcome(1), {"exit_code": 1, "failure_class": "moon"})
    verdict = look(Slurm(), job)
    assert verdict.failure is not None
    assert "class bug" in message(job, verdict.failure)


def test_while_slurm_does_not_answer_nothing_is_decided(job: Tracked) -> None:
    slurm = Slurm()
    slurm.states = None
    for _ in range(100):
        assert not look(slurm, job, 600).is_over


def test_an_end_is_not_believed_while_slurm_does_not_answer_any_more(job: Tracked) -> None:
    slurm = Slurm()
    slurm.states = {"7": SlurmState("PREEMPTED")}
    look(slurm, job)
    slurm.states = None
    assert not look(slurm, job, 1000).is_over
    slurm.states = {"7": SlurmState("PENDING")}
    assert not look(slurm, job, 1000).is_over


def test_a_job_that_slurm_does_not_know_is_lost_after_a_while(job: Tracked) -> None:
    slurm = Slurm()
    assert not look(slurm, job).is_over
    assert not look(slurm, job, 599).is_over
    verdict = look(slurm, job, 1)
    assert verdict.failure is not None
    assert verdict.failure.kind == "lost"
    assert "Slurm has not known job 7 for 600 s" in verdict.failure.message


def test_a_job_that_is_seen_again_was_not_lost(job: Tracked) -> None:
    slurm = Slurm()
    look(slurm, job)
    slurm.states = {"7": SlurmState("RUNNING")}
    look(slurm, job, 599)
    slurm.states = {}
    assert not look(slurm, job, 1).is_over
    assert not look(slurm, job, 599).is_over


def test_a_job_stopped_by_sigterm_may_still_be_requeued_by_slurm(job: Tracked) -> None:
    write_json(job.files.outcome(1), {"exit_code": 75, "failure_class": "preempted", "asked": "SIGTERM"})
    slurm = Slurm()
    slurm.states = {"7": SlurmState("PENDING")}
    assert not look(slurm, job, 1000).is_over
    assert failed(job, "CANCELLED").kind == "user"


@pytest.mark.parametrize(
    ("exit_code", "said", "state", "kind"),
    [
        (143, "preempted", "NODE_FAIL", "node_fail"),
        (75, "preempted", "TIMEOUT", "preempted"),  # it has a checkpoint and goes on
        (143, "timeout", "TIMEOUT", "timeout"),  # it has none
    ],
)
def test_of_a_job_that_stopped_on_sigterm_slurm_says_why(
    job: Tracked, exit_code: int, said: str, state: str, kind: str
) -> None:
    write_json(job.files.outcome(1), {"exit_code": exit_code, "failure_class": said, "asked": "SIGTERM"})
    failure = failed(job, state)
    assert (failure.kind, failure.state, failure.exit_code, failure.nodes) == (kind, state, exit_code, "node3")


@pytest.mark.parametrize("kind", sorted(CLASSES.keys() - {"preempted"}))
def test_each_class_has_one_retry_rule(job: Tracked, kind: str) -> None:
    failure: Any = SimpleNamespace(kind=kind)
    assert is_worth_another(job, failure, requeue_limit=50) is (kind in ("oom", "node_fail", "lost"))
    job.record = replace(job.record, retries={kind: 1})
    assert not is_worth_another(job, failure, requeue_limit=50)


def test_a_preempted_job_is_started_again_up_to_the_limit(job: Tracked) -> None:
    failure: Any = SimpleNamespace(kind="preempted")
    assert is_worth_another(job, failure, requeue_limit=1)
    assert not is_worth_another(job, failure, requeue_limit=0)


def test_the_message_has_all_that_helps(job: Tracked) -> None:
    job.files.output_log.write_text("first\nlast words\n")
    text = message(job, failed(job, "TIMEOUT"))
    assert "class timeout, Slurm state TIMEOUT, on node3" in text
    assert "exit code 0:9" in text
    assert str(job.files.output_log) in text
    assert "7_0_log.err" in text
    assert text.endswith("    last words")
