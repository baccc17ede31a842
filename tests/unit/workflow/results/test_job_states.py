"""The state of each job, from what lies in its run directory, and who holds a lock, seen from outside."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs import journal
from implicit_llm_jobs.stage import logged
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results import job_states
from implicit_llm_workflow.results.job_states import (
    TAIL_BYTES,
    Holder,
    JobView,
    Tail,
    failed_preflights,
    holder_of,
    observe,
    read_tail,
    submitted_jobs,
)
from implicit_llm_workflow.results.missing import find_missing
from implicit_llm_workflow.results.status import Snapshot, headline, next_step
from implicit_llm_workflow.rules.snakemake_driver import DriverRunning, hold_lock
from snakemake_executor_plugin_submitit import store
from snakemake_executor_plugin_submitit.processes import start_ticks
from snakemake_executor_plugin_submitit.store import JobFiles, write_json
from tests.unit.workflow.experiments import (
    EVALUATIONS,
    PEER,
    START_S,
    TEST_SETS,
    ExperimentFile,
    event,
    finish,
    finish_with,
    held,
    log,
    metrics,
    work_of,
    write_journal,
)

FREE, UNROLLED = "train/implicit-s0/free", "train/implicit-s0/unrolled"
STARTED = event("stage_started", host="here", pid=1)


def look(plan: Plan, key: str = FREE) -> JobView:
    return observe(plan)[key]


def lock_of(plan: Plan, key: str = FREE) -> Path:
    return plan.run_dir(plan.nodes[key]) / "work" / ".lock"


def test_a_finished_job_shows_the_end_of_its_phase(plan: Plan) -> None:
    finish_with(plan, FREE, {"global_step": 10, "metrics": {"loss": 0.25, "residual": 0.01}})
    (work_of(plan, FREE) / "mlflow.json").write_text('{"run_id": "abc"}')
    found = look(plan)
    assert (found.state, found.progress.step, found.progress.end_step) == ("done", 10, 10)
    assert (found.metrics, found.mlflow_run_id) == ({"loss": 0.25, "residual": 0.01}, "abc")
    assert found.unix_s > START_S
    (work_of(plan, FREE) / "provenance.json").write_text('{"finished": "2023-11-14T22:13:20+00:00"}')
    assert look(plan).unix_s == START_S
    (work_of(plan, FREE) / "provenance.json").write_text('{"finished": "yesterday"}')
    assert look(plan).unix_s > START_S


def test_a_job_that_holds_its_lock_runs(plan: Plan) -> None:
    write_journal(plan, FREE, STARTED, metrics(5, 1, loss=2.0), metrics(6, 3, loss=1.5, residual=0.1), torn='{"kind')
    log(plan, FREE, "INFO implicit_llm.train: free: step 6/10, loss 1.5")
    with held(lock_of(plan)):
        found = look(plan)
    assert (found.state, found.progress.step, found.metrics["loss"]) == ("running", 6, 1.5)
    assert (found.progress.steps_per_s, found.progress.remaining_s) == (0.5, 8.0)
    assert found.progress.share == pytest.approx(1 / 3)  # of the steps 4 to 10
    assert (found.doing, found.unix_s) == ("free: step 6/10, loss 1.5", START_S + 3)
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


def test_a_job_that_is_interrupted_before_its_journal_has_not_failed(plan: Plan) -> None:
    plan.write_job_files()
    with pytest.raises(KeyboardInterrupt), logged(plan.run_dir(plan.nodes[FREE]), work_of(plan, FREE) / "job.log"):
        raise KeyboardInterrupt
    assert look(plan).state == "waiting"


def test_a_failure_of_former_settings_is_none_of_these(tiny: ExperimentFile) -> None:
    before, submitted = tiny.plan(), "train/implicit-s1/free"
    files = submit(before, submitted, is_open=False, submitted_unix_s=START_S)
    write_json(files.outcome(1), {"exit_code": 2, "failure_class": "user", "message": "no"})
    os.utime(log(before, FREE, "ERROR implicit_llm_jobs.stage: no such input"), (START_S, START_S))
    write_journal(before, UNROLLED, STARTED, event("stage_failed", error="ValueError: no"))
    plan = tiny.edit("hidden_size: 16", "hidden_size: 32").plan()
    plan.write_job_files()
    assert {look(plan, key).state for key in (submitted, FREE, UNROLLED)} == {"waiting"}


def test_a_failure_outranks_a_result_of_before_and_a_fresh_one_outranks_a_failure(tiny: ExperimentFile) -> None:
    finish(tiny.plan())
    plan = tiny.edit("tol: 0.1", "tol: 0.2").plan()
    assert (look(plan).state, look(plan).why) == ("stale", "config: phase.solver.tol 0.1 -> 0.2")
    write_journal(plan, FREE, STARTED, event("stage_failed", error="ValueError: no"))
    assert look(plan).state == "failed"
    finish_with(plan, FREE, {})
    assert look(plan).state == "done"


def test_what_is_next_in_turn_of_a_driver_is_queued(plan: Plan) -> None:
    finish_with(plan, "data/s3-train", {})
    with held(plan.root / ".driver.lock") as pid:
        states = {key: job.state for key, job in observe(plan).items()}
        driver = holder_of(plan.driver_lock)
    assert (driver.pid, driver.is_alive) == (pid, True)
    training = {"train/implicit-s1/unrolled", UNROLLED, "train/explicit-s0/explicit"}
    assert {key for key, state in states.items() if state == "queued"} == {*training, *TEST_SETS}
    assert look(plan, UNROLLED).state == "waiting"


def test_a_driver_on_another_machine_that_was_not_seen_to_end_may_still_run(plan: Plan) -> None:
    plan.root.mkdir(parents=True, exist_ok=True)
    plan.driver_lock.write_text("process 7 on elsewhere\n")
    snapshot = Snapshot(plan, plan.nodes, (), 1)
    assert headline(snapshot).endswith("process 7 on elsewhere was the last driver, and may still run")
    assert next_step(snapshot).startswith(
        "nothing while process 7 still runs on elsewhere, which is not visible here; "
    )
    assert next_step(snapshot).endswith(f"after its end, type: {snapshot.command}")


@pytest.mark.parametrize("command", ["gc", "accept"])
def test_a_command_that_keeps_drivers_away_is_no_driver(plan: Plan, command: str) -> None:
    with hold_lock(plan.driver_lock, command):
        assert headline(Snapshot(plan, plan.nodes, (), 1)).endswith("no driver")
        assert {job.state for job in observe(plan).values()} == {"waiting"}
        with (
            pytest.raises(DriverRunning, match=rf"\({command}: process {os.getpid()} on "),
            hold_lock(plan.driver_lock),
        ):
            pass


def test_a_result_that_is_only_not_published_waits_for_the_next_driver(plan: Plan) -> None:
    write_journal(plan, FREE, STARTED, event("stage_finished"))
    assert look(plan).state == "stopped"
    finish_with(plan, FREE, {})
    (plan.run_dir(plan.nodes[FREE]) / "manifest.json").unlink()
    assert look(plan).state == "waiting"


def test_a_forced_job_that_never_started_is_stale_unless_its_submission_failed(plan: Plan, slurm: Path) -> None:
    finish(plan)
    write_journal(plan, FREE, STARTED, event("stage_finished"))
    (work_of(plan, FREE) / "again").touch()
    assert (look(plan).state, look(plan).why) == ("stale", "forced, or made from what was forced")
    files = submit(plan, FREE, is_open=False, submitted_unix_s=START_S - 1)
    assert look(plan).state == "stale"
    write_json(files.outcome(1), ENV)
    assert look(plan).state == "stale"  # it was submitted before the attempt that finished
    submit(plan, FREE, is_open=False, submitted_unix_s=START_S + 1)
    assert (look(plan).state, look(plan).why) == ("failed", "no such venv")


def test_what_failed_under_another_driver_is_queued_again_by_the_next(plan: Plan) -> None:
    finish_with(plan, UNROLLED, {})
    finish_with(plan, "data/s3-train", {})
    write_journal(plan, FREE, STARTED, event("stage_failed", 5, error="ValueError: no"))
    with held(plan.root / ".driver.lock"):
        assert look(plan).state == "queued"
        os.utime(plan.root / ".driver.lock", (START_S, START_S))
        assert look(plan).state == "failed"  # it failed five seconds after this driver began
    assert look(plan).state == "failed"


def test_a_silent_job_of_another_machine_counts_as_stopped(plan: Plan) -> None:
    write_journal(plan, FREE, STARTED)
    lock_of(plan).write_text("process 7 on elsewhere\n")
    assert look(plan).state == "stopped"
    path = log(plan, FREE, "INFO implicit_llm.train: at work")
    assert look(plan).state == "running"
    os.utime(path, (time.time() - 3600,) * 2)
    assert (look(plan).state, look(plan).why) == (
        "stopped",
        "process 7 on elsewhere is silent for over 10 min; does it run?",
    )


def test_looking_changes_nothing(plan: Plan) -> None:
    assert {job.state for job in observe(plan).values()} == {"waiting"}
    assert holder_of(plan.driver_lock) is None
    with held(lock_of(plan)):  # as a job without a journal does while it checks its inputs
        assert look(plan).state == "running"
    finish(plan)
    write_journal(plan, FREE, STARTED)
    before = {path: path.stat().st_mtime_ns for path in plan.root.rglob("*")}
    observe(plan)
    assert {path: path.stat().st_mtime_ns for path in plan.root.rglob("*")} == before


@pytest.mark.parametrize("locks", [None, "no list of locks"])
def test_a_holder_is_alive_until_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: str | None
) -> None:
    monkeypatch.setattr(job_states, "LOCKS", tmp_path / locks if locks else job_states.LOCKS)
    host = socket.gethostname()
    with held(tmp_path / "lock") as pid:
        assert holder_of(tmp_path / "lock") == Holder(pid, host, True)
        with pytest.raises(DriverRunning, match=f"process {pid} on {host}"), hold_lock(tmp_path / "lock"):
            pass
    assert holder_of(tmp_path / "lock") == Holder(pid, host, False)
    with hold_lock(tmp_path / "lock"):
        pass


def test_a_process_that_lives_and_has_let_go_holds_nothing_and_jobs_do_not_inherit_the_lock(tmp_path: Path) -> None:
    lock, mine = ExitStack(), (os.getpid(), socket.gethostname())
    lock.enter_context(hold_lock(tmp_path / "lock"))
    assert holder_of(tmp_path / "lock") == Holder(*mine, True)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        lock.close()
        assert holder_of(tmp_path / "lock") is None  # on no machine
        with hold_lock(tmp_path / "lock"):
            pass


@pytest.mark.parametrize(
    ("owner", "other_device", "is_held"), [(708, False, True), (708, True, False), (7, True, True), (-1, False, True)]
)
def test_the_lock_of_a_file_with_this_inode_on_another_device_is_another_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, other_device: bool, is_held: bool
) -> None:
    lock, host = tmp_path / "lock", socket.gethostname()
    lock.write_text(f"process 7 on {host}\n")
    about = lock.stat()
    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev) + other_device:02x}"
    unnamed = "1: FLOCK  ADVISORY  WRITE 9 <none>:0 0 EOF\n"
    (tmp_path / "locks").write_text(f"{unnamed}2: FLOCK  ADVISORY  WRITE {owner} {device}:{about.st_ino} 0 EOF\n")
    monkeypatch.setattr(job_states, "LOCKS", tmp_path / "locks")
    assert holder_of(lock) == Holder(7, host, is_held)


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


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose file `answer` squeue prints; without one it fails. There is no accounting."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, line in (("squeue", f"cat {folder}/answer"), ("sacct", "echo accounting is disabled >&2; exit 1")):
        (folder / name).write_text(f"#!/bin/sh\necho {name} >> {folder}/asked\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def submit(plan: Plan, key: str, rule: str = "train_word_problem", **changes: object) -> JobFiles:
    """A record as the executor writes it before it waits."""
    plan.write_job_files()
    home = plan.root.parent.parent.absolute()
    outputs = [os.path.abspath(plan.manifest(plan.nodes[key]))]
    files = store.job_files(home / store.DEFAULT_FOLDER, rule, outputs)
    values = {"key": "k", "name": "n", "number": 1, "cluster": "slurm", "folder": str(files.submission(1))}
    store.save(files, store.Record(**{**values, "job_id": "12", **changes}))
    return files


def test_a_slurm_that_does_not_answer_is_said(plan: Plan, slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert submitted_jobs(plan, {FREE: [plan.manifest(plan.nodes[FREE])]}) == {}
    submit(plan, FREE)
    assert (look(plan).state, look(plan).why) == ("queued", "Slurm gives no answer")
    assert capfd.readouterr() == ("", "")


def test_a_preflight_that_failed_before_its_command_shows_the_log_of_the_executor(plan: Plan) -> None:
    log = plan.root / ".preflight" / "h100.log"
    log.parent.mkdir(parents=True)
    log.touch()  # Snakemake creates it
    assert failed_preflights(plan) == []
    outputs = [os.path.abspath(log.with_suffix(".json"))]
    files = store.job_files(plan.root.parent.parent.absolute() / store.DEFAULT_FOLDER, "preflight", outputs)
    store.save(files, store.Record("k", "n", 1, "slurm", "", is_open=False, job_id="12"))
    assert failed_preflights(plan) == []
    log.write_text("kernels: well\n")
    assert failed_preflights(plan) == []  # it was interrupted
    log.write_text("")
    write_json(files.outcome(1), ENV)
    (found,) = failed_preflights(plan)
    assert (found.hardware, found.log, found.why) == ("h100", files.output_log, "no such venv")
    log.write_text("all is well, some time ago\n")
    os.utime(log, (START_S, START_S))
    assert failed_preflights(plan) == [found]
    log.write_text("no space left\n")
    os.utime(log)
    assert [check.log for check in failed_preflights(plan)] == [log]


@pytest.mark.parametrize(("text", "job_id"), [(" in Slurm job 7", "7"), ("", None)])
def test_a_job_of_former_settings_is_not_taken_for_the_job_that_waits_for_it(
    tiny: ExperimentFile, slurm: Path, text: str, job_id: str | None
) -> None:
    (slurm / "answer").write_text("12|PENDING|||Resources\n")
    before = tiny.plan()
    write_journal(before, FREE, STARTED, metrics(5, 1, loss=2.0))
    plan = tiny.edit("tol: 0.1", "tol: 0.2").plan()
    submit(plan, FREE)
    assert (look(plan).state, look(plan).why) == ("queued", "Resources")
    with held(lock_of(plan), text):
        found = look(plan)
    assert (found.state, found.why) == ("running", "with former settings or code")
    assert (found.submitted.job_id if found.submitted else None) == job_id


def test_beside_a_running_job_stands_its_own_id_and_not_that_of_the_job_which_failed_because_of_it(
    plan: Plan, slurm: Path
) -> None:
    write_json(submit(plan, FREE).outcome(1), {"exit_code": 2, "failure_class": "user", "message": "is writing here"})
    log(plan, FREE, "ERROR job: is writing here")
    with held(lock_of(plan), " in Slurm job 7"):
        found = look(plan)
    assert found.submitted is not None
    assert (found.state, found.submitted.job_id, found.doing) == ("running", "7", "is writing here")


def test_all_jobs_are_asked_about_in_one_question_and_ended_ones_not_at_all(plan: Plan, slurm: Path) -> None:
    (slurm / "answer").write_text("12|RUNNING||n1|None\n13|PENDING|||Priority\n")
    submit(plan, FREE)
    submit(plan, UNROLLED, job_id="13")
    submit(plan, "train/implicit-s1/free", job_id="14", is_open=False)
    states = {key: job.submitted.state for key, job in observe(plan).items() if job.submitted is not None}
    assert states == {FREE: "running", UNROLLED: "queued", "train/implicit-s1/free": "ended"}
    assert (slurm / "asked").read_text().split() == ["squeue"]


OOM = {"exit_code": 1, "failure_class": "oom", "message": "killed for\nwant of memory"}
PREEMPTED = {"exit_code": 75, "failure_class": "preempted"}
SIGTERM = PREEMPTED | {"asked": "SIGTERM"}
CANCELLED = {"exit_code": None, "failure_class": "cancelled", "message": "cancelled"}
ENV = {"exit_code": 96, "failure_class": "env", "message": "no such venv"}
FULL = event("stage_failed", error="OSError: full")
STOPPED = event("stage_preempted", error="Preempted: at 6")


@pytest.mark.parametrize(
    ("outcome", "journal", "answer", "state", "failure_class", "why"),
    [
        (OOM, [], "", "failed", "oom", "killed for want of memory"),
        (OOM, [STARTED, metrics(6, 1, loss=1.0)], "", "failed", "oom", "killed for want of memory"),  # no last word
        (
            PREEMPTED | {"message": "50 times"},
            [STARTED, STOPPED],
            "",
            "stopped",
            "preempted",
            "50 times",
        ),
        (SIGTERM, [STARTED, STOPPED], "CANCELLED||n1|None", "stopped", "cancelled", "cancelled"),
        (CANCELLED, [STARTED, STOPPED], "", "stopped", "cancelled", "cancelled"),
        (CANCELLED, [], "", "stopped", "cancelled", "cancelled"),
        (None, [], "PENDING|||(Resources)", "queued", None, "(Resources)"),
        (None, [], "REQUEUED|||BeginTime", "queued", None, "BeginTime"),
        (None, [], "RUNNING||n1|None", "running", None, ""),
        (None, [], "COMPLETING||n1|None", "running", None, ""),
        (None, [STARTED, FULL], "", "stopped", None, "ended without a message"),  # of a submission before this one
        (ENV, [STARTED, FULL], "", "failed", "env", "no such venv"),
    ],
)
def test_the_last_submission_is_told_as_slurm_answers_and_as_the_executor_records_its_end(
    plan: Plan,
    slurm: Path,
    outcome: dict[str, object] | None,
    journal: list[dict[str, object]],
    answer: str,
    state: str,
    failure_class: str | None,
    why: str,
) -> None:
    files = submit(plan, FREE, is_open=bool(answer))
    if outcome is not None:
        write_json(files.outcome(1), outcome)
    write_journal(plan, FREE, *journal)
    (slurm / "answer").write_text(f"12|{answer}\n")
    job = look(plan)
    assert (job.state, job.failure_class, job.why) == (state, failure_class, why)
    assert (job.submitted.job_id, job.submitted.nodes) == ("12", "n1" if "n1" in answer else "")


def test_a_job_that_slurm_runs_and_that_has_not_begun_is_starting(plan: Plan, slurm: Path) -> None:
    submit(plan, FREE)
    (slurm / "answer").write_text("12|RUNNING||n1|None\n")
    points = metrics(5, 1, loss=2.0), metrics(6, 2, loss=1.0)
    write_journal(plan, FREE, STARTED, *points, event("stage_preempted", 3, error="Preempted: at 6"))
    job = look(plan)
    assert (job.state, job.doing, job.progress.step, job.progress.steps_per_s) == ("running", "starting", 6, None)
    write_journal(plan, FREE, event("stage_started", 4))
    assert look(plan).doing != "starting"


def test_a_job_of_this_machine_lives_as_long_as_its_process(plan: Plan) -> None:
    for age, state in ((0, "running"), (1, "waiting")):  # the second is another one with its number
        submit(plan, FREE, cluster="local", job_id=str(os.getpid()), started=start_ticks(os.getpid()) - age)
        assert look(plan).state == state


def written(path: Path, *, points: int = 0) -> journal.Journal:
    """A journal of the library itself, with a start and so many points."""
    open_journal = journal.Journal(path)
    open_journal.event("stage_started", host="here", pid=1)
    for step in range(1, points + 1):
        open_journal.metrics(step, {"loss": 1 / step, "learning_rate": 0.1})
    return open_journal


def steps_in(path: Path) -> list[int]:
    return [point.step for point in read_tail(path).points]


def test_points_are_those_that_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "j"
    open_journal = written(path, points=8)
    open_journal.rewind(5)
    open_journal.metrics(6, {"loss": 9.0})
    assert list(read_tail(path).points) == journal.read(path)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]


def test_a_torn_and_a_damaged_line_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, points=2).close()
    with open(path, "ab") as file:
        file.write(
            b'\xff{"kind"\n[1]\n{"kind": "metrics", "step": 3}\n'
            b'{"kind": "metrics", "step": 3, "time": "?", "values": {}}\n'
            b'{"kind": "metrics", "step": 4, "ti'
        )
    assert (steps_in(path), read_tail(path).is_open) == ([1, 2], True)


def test_the_end_is_enough_of_a_long_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    open_journal = written(path, points=8000)
    assert path.stat().st_size > 2 * TAIL_BYTES
    assert read_tail(path).is_open
    open_journal.event("stage_failed", error="ValueError: no")
    tail = read_tail(path)
    assert (tail.is_open, tail.event["error"], tail.last.step) == (False, "ValueError: no", 8000)
    assert len(tail.points) < 4000


def test_the_points_of_an_attempt_are_those_since_its_start(tmp_path: Path) -> None:
    path = tmp_path / "j"
    assert read_tail(path) == Tail()
    open_journal = written(path)
    open_journal.metrics(10, {"loss": 2.0})
    open_journal.event("stage_preempted")
    open_journal.event("stage_started")
    assert steps_in(path) == [10]  # nothing else is known yet
    open_journal.metrics(20, {"loss": 1.0})
    assert steps_in(path) == [20]


def test_an_evaluation_that_is_in_progress_says_what_its_model_was_trained_on(tiny: ExperimentFile) -> None:
    plan = tiny.plan()

    def known() -> dict[str, dict[str, Any]]:
        return {it.job: it.training for it in find_missing(plan, plan.nodes["report"]) if it.job in EVALUATIONS}

    assert list(known().values()) == [{}, {}, {}]
    with held(plan.driver_lock):
        found = known()
    assert set(found) == EVALUATIONS
    explicit = found["evaluate/explicit-s0/explicit/word-problem"]
    assert explicit.pop("num_parameters") > 10_000
    assert explicit == {
        "model_type": "implicit_mamba2",
        "num_layers": 1,
        "train_length": 8,
        "train_hard_fraction": [0.5, 1],
        "train_tokens": 10 * 8 * 8,
    }


def test_missing_results_say_what_is_in_the_way_and_what_makes_them(language: ExperimentFile) -> None:
    plan = language.add(PEER).plan()
    finish(plan)
    for key in ("checkpoint/other", "evaluate/other/checkpoint/perplexity", "train/flat-s0/explicit"):
        shutil.rmtree(plan.root / key)
    failed = event("stage_failed", error="CheckpointError: no such")
    write_journal(plan, "checkpoint/other", event("stage_started"), failed, torn='{"torn')
    missing = {item.job: item for item in find_missing(plan, plan.nodes["report"])}
    assert missing.pop("train/flat-s0/explicit").state == "waiting"
    assert {job: (item.state, item.why) for job, item in missing.items()} == {
        "checkpoint/other": ("failed", "CheckpointError: no such"),
        "evaluate/other/checkpoint/perplexity": ("waiting", "checkpoint/other failed: CheckpointError: no such"),
    }
    evaluated = missing["evaluate/other/checkpoint/perplexity"]
    assert (evaluated.is_implicit, evaluated.data["text-test"]["kind"]) == (None, "token_stream")
    assert evaluated.command.endswith(" results/language/evaluate/other/checkpoint/perplexity/manifest.json")


def test_a_failed_job_is_in_the_way_also_behind_an_input_that_only_waits(plan: Plan) -> None:
    assert list(plan.nodes[FREE].upstream.values())[-1] == UNROLLED
    write_journal(plan, UNROLLED, STARTED, event("stage_failed", error="ValueError: no"))
    missing = {item.job: item for item in find_missing(plan, plan.nodes["report"])}
    assert missing[FREE].why == f"{UNROLLED} failed: ValueError: no"
