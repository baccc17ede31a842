"""The state of each job, from what lies in its run directory, and who holds a lock, seen from outside."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results import job_states
from implicit_llm_workflow.results.job_states import Holder, ObservedJob, driver_of, holder_of, observe
from implicit_llm_workflow.rules.snakemake_driver import DriverRunning, hold_lock
from tests.unit.workflow.experiments import TEST_SETS, ExperimentFile, finish
from tests.unit.workflow.run_dirs import (
    DRIVER,
    JOB,
    START_S,
    event,
    finish_with,
    held,
    log,
    metrics,
    work_of,
    write_journal,
)

FREE, UNROLLED = "train/implicit-s0/free", "train/implicit-s0/unrolled"
STARTED = event("stage_started", host="here", pid=1)


def look(plan: Plan, key: str = FREE) -> ObservedJob:
    return observe(plan)[key]


def lock_of(plan: Plan, key: str = FREE) -> Path:
    return plan.run_dir(plan.nodes[key]) / "work" / ".lock"


def test_a_finished_job_shows_the_end_of_its_phase(plan: Plan) -> None:
    finish_with(plan, FREE, {"global_step": 10, "metrics": {"loss": 0.25, "residual": 0.01}})
    (work_of(plan, FREE) / "mlflow.json").write_text('{"run_id": "abc"}')
    found = look(plan)
    assert (found.state, found.progress.step, found.progress.end_step) == ("done", 10, 10)
    assert found.metrics == {"loss": 0.25, "residual": 0.01}
    assert found.mlflow_run_id == "abc"
    assert found.unix_s > START_S
    (work_of(plan, FREE) / "provenance.json").write_text('{"finished": "2023-11-14T22:13:20+00:00"}')
    assert look(plan).unix_s == START_S


def test_a_job_that_holds_its_lock_runs(plan: Plan) -> None:
    write_journal(plan, FREE, STARTED, metrics(5, 1, loss=2.0), metrics(6, 3, loss=1.5, residual=0.1), torn='{"kind')
    log(plan, FREE, "INFO implicit_llm.train: free: step 6/10, loss 1.5")
    with held(lock_of(plan)):
        found = look(plan)
    assert (found.state, found.progress.step, found.metrics["loss"]) == ("running", 6, 1.5)
    assert (found.progress.steps_per_s, found.progress.remaining_s) == (0.5, 8.0)
    assert found.progress.share == pytest.approx(1 / 3)  # of the steps 4 to 10
    assert found.doing == "free: step 6/10, loss 1.5"
    assert found.unix_s == START_S + 3
    assert look(plan).state == "stopped"  # it was killed


def test_a_job_of_former_settings_still_runs(tiny: ExperimentFile) -> None:
    before = tiny.plan()
    write_journal(before, FREE, STARTED, metrics(5, 1, loss=2.0))
    with held(lock_of(before)):
        found = look(tiny.edit("tol: 0.1", "tol: 0.2").plan())
        assert (found.state, found.why) == ("running", "with former settings or code")
        assert found.progress.step == 5
    assert look(tiny.plan()).state == "waiting"


@pytest.mark.parametrize(
    ("last", "state", "why", "failure_class"),
    [
        (event("stage_failed", error="OSError: full", failure_class="quota"), "failed", "OSError: full", "quota"),
        (event("stage_failed", error="ValueError:  a\nb"), "failed", "ValueError: a b", None),
        (event("stage_preempted", error="Preempted: after step 6"), "stopped", "Preempted: after step 6", None),
        (event("stage_stopped", error="SystemExit: 143"), "stopped", "SystemExit: 143", None),
        (event("checkpoint_committed", step=6), "stopped", "ended without a message", None),
    ],
)
def test_the_journal_tells_how_a_job_ended(
    plan: Plan, last: dict[str, object], state: str, why: str, failure_class: str | None
) -> None:
    write_journal(plan, FREE, STARTED, metrics(6, 2, loss=1.0), last)
    found = look(plan)
    assert (found.state, found.why, found.failure_class) == (state, why, failure_class)
    assert (found.progress.step, found.progress.steps_per_s) == (6, None)


def test_a_job_that_failed_before_its_journal_is_told_by_its_log(plan: Plan) -> None:
    plan.write_job_files()
    log(plan, FREE, "INFO implicit_llm_jobs.stage: x", "ERROR implicit_llm_jobs.stage: no such input")
    found = look(plan)
    assert (found.state, found.why) == ("failed", "no such input")


def test_a_failure_of_former_settings_is_none_of_these(tiny: ExperimentFile) -> None:
    before = tiny.plan()
    before.write_job_files()
    old = log(before, FREE, "ERROR implicit_llm_jobs.stage: no such input")
    os.utime(old, (START_S, START_S))
    write_journal(before, UNROLLED, STARTED, event("stage_failed", error="ValueError: no"))
    plan = tiny.edit("hidden_size: 16", "hidden_size: 32").plan()
    plan.write_job_files()
    assert (look(plan).state, look(plan, UNROLLED).state) == ("waiting", "waiting")


def test_a_failure_outranks_a_result_of_before_and_a_fresh_one_outranks_a_failure(tiny: ExperimentFile) -> None:
    finish(tiny.plan())
    plan = tiny.edit("tol: 0.1", "tol: 0.2").plan()
    assert look(plan).state == "stale"
    assert look(plan).why == "config: phase.solver.tol 0.1 -> 0.2"
    write_journal(plan, FREE, STARTED, event("stage_failed", error="ValueError: no"))
    assert look(plan).state == "failed"
    finish_with(plan, FREE, {})
    assert look(plan).state == "done"


def test_what_is_next_in_turn_of_a_driver_is_queued(plan: Plan) -> None:
    finish_with(plan, "data/s3-train", {})
    with held(plan.root / ".driver.lock", DRIVER) as pid:
        states = {key: job.state for key, job in observe(plan).items()}
        driver = driver_of(plan)
    assert (driver.pid, driver.is_alive) == (pid, True)
    training = {"train/implicit-s1/unrolled", UNROLLED, "train/explicit-s0/explicit"}
    assert {key for key, state in states.items() if state == "queued"} == {*training, *TEST_SETS}
    assert look(plan, UNROLLED).state == "waiting"


def test_a_result_that_is_only_not_published_waits_for_the_next_driver(plan: Plan) -> None:
    write_journal(plan, FREE, STARTED, event("stage_finished"))
    assert look(plan).state == "stopped"
    finish_with(plan, FREE, {})
    (plan.run_dir(plan.nodes[FREE]) / "manifest.json").unlink()
    assert look(plan).state == "waiting"


def test_what_failed_under_another_driver_is_queued_again_by_the_next(plan: Plan) -> None:
    finish_with(plan, UNROLLED, {})
    finish_with(plan, "data/s3-train", {})
    write_journal(plan, FREE, STARTED, event("stage_failed", 5, error="ValueError: no"))
    with held(plan.root / ".driver.lock", DRIVER):
        assert look(plan).state == "queued"
        os.utime(plan.root / ".driver.lock", (START_S, START_S))
        assert look(plan).state == "failed"  # it failed five seconds after this driver began
    assert look(plan).state == "failed"


def test_a_silent_job_of_another_machine_counts_as_stopped(plan: Plan) -> None:
    write_journal(plan, FREE, STARTED)
    lock_of(plan).write_text("process 7 on elsewhere\n")
    assert look(plan).state == "stopped"
    log(plan, FREE, "INFO implicit_llm.train: at work")
    assert look(plan).state == "running"
    past = time.time() - 3600
    os.utime(plan.run_dir(plan.nodes[FREE]) / "job.log", (past, past))
    assert look(plan).state == "stopped"


def test_looking_changes_nothing(plan: Plan) -> None:
    assert {job.state for job in observe(plan).values()} == {"waiting"}
    assert driver_of(plan) is None
    with held(lock_of(plan)):  # as a job without a journal does while it checks its inputs
        assert look(plan).state == "running"
    finish(plan)
    write_journal(plan, FREE, STARTED)
    before = {path: path.stat().st_mtime_ns for path in plan.root.rglob("*")}
    observe(plan)
    assert {path: path.stat().st_mtime_ns for path in plan.root.rglob("*")} == before


@pytest.mark.parametrize(("text", "host"), [(JOB, socket.gethostname()), (DRIVER, None)])
def test_a_holder_is_alive_until_its_process_ends(tmp_path: Path, text: str, host: str | None) -> None:
    with held(tmp_path / "lock", text) as pid:
        assert holder_of(tmp_path / "lock") == Holder(pid, host, True)
        with pytest.raises(DriverRunning, match=f"process {pid}"):
            hold_lock(tmp_path / "lock")
    assert holder_of(tmp_path / "lock") == Holder(pid, host, False)
    hold_lock(tmp_path / "lock").close()


def test_a_process_that_lives_and_has_let_go_holds_nothing_and_jobs_do_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = hold_lock(tmp_path / "lock")
    assert holder_of(tmp_path / "lock") == Holder(os.getpid(), None, True)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        lock.close()
        assert holder_of(tmp_path / "lock") == Holder(os.getpid(), None, False)
        hold_lock(tmp_path / "lock").close()


def test_without_a_list_of_locks_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_states, "LOCKS", tmp_path / "none")
    with held(tmp_path / "lock") as pid:
        assert holder_of(tmp_path / "lock") == Holder(pid, socket.gethostname(), True)
    assert holder_of(tmp_path / "lock") == Holder(pid, socket.gethostname(), False)


@pytest.mark.parametrize(
    ("text", "holder"),
    [
        ("process 7 on elsewhere\n", Holder(7, "elsewhere", None)),
        (None, None),
        ("", None),
        ("unknown", None),
        ("process on", None),
    ],
)
def test_of_another_machine_nothing_is_known_and_a_file_may_name_nobody(
    tmp_path: Path, text: str | None, holder: Holder | None
) -> None:
    if text is not None:
        (tmp_path / "lock").write_text(text)
    assert holder_of(tmp_path / "lock") == holder
