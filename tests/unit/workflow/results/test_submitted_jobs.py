"""The executor's records as `status` reads them, with a Slurm that answers from files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.job_states import observe, submitted_jobs
from snakemake_executor_plugin_submitit import store
from snakemake_executor_plugin_submitit.processes import start_ticks
from snakemake_executor_plugin_submitit.store import JobFiles, write_json
from tests.unit.workflow.experiments import ExperimentFile
from tests.unit.workflow.run_dirs import event, metrics, write_journal

FREE, UNROLLED = "train/implicit-s0/free", "train/implicit-s0/unrolled"


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
    outputs = [str(home / "results" / "tiny" / key / "manifest.json")]
    files = store.job_files(home / store.DEFAULT_FOLDER, rule, outputs)
    values = {"key": "k", "name": "n", "number": 1, "cluster": "slurm", "folder": str(files.submission(1))}
    store.save(files, store.Record(**{**values, "state": "submitted", "job_id": "12", **changes}))
    return files


@pytest.mark.parametrize(
    ("answer", "state", "why"),
    [
        ("12|PENDING||(Resources)\n", "queued", "(Resources)"),
        ("12|REQUEUED||BeginTime\n", "queued", "BeginTime"),
        ("12|RUNNING||gpu-node-3|None\n", "running", ""),
        ("12|COMPLETING||gpu-node-3|None\n", "running", ""),
    ],
)
def test_slurm_says_whether_a_job_waits_or_runs(plan: Plan, slurm: Path, answer: str, state: str, why: str) -> None:
    submit(plan, FREE)
    (slurm / "answer").write_text(answer.replace("||(", "|||(").replace("||B", "|||B"))
    job = observe(plan)[FREE]
    assert (job.state, job.why) == (state, why)
    assert (job.submitted.job_id, job.submitted.nodes) == ("12", "gpu-node-3" if state == "running" else "")


def test_a_slurm_that_does_not_answer_is_said(plan: Plan, slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert submitted_jobs(plan, plan.nodes.values()) == {}
    submit(plan, FREE)
    job = observe(plan)[FREE]
    assert (job.state, job.why, capfd.readouterr()) == ("queued", "Slurm gives no answer", ("", ""))


def test_all_jobs_are_asked_about_in_one_question_and_ended_ones_not_at_all(plan: Plan, slurm: Path) -> None:
    (slurm / "answer").write_text("12|RUNNING||n1|None\n13|PENDING|||Priority\n")
    submit(plan, FREE)
    submit(plan, UNROLLED, job_id="13")
    submit(plan, "train/implicit-s1/free", job_id="14", state="reported")
    found = submitted_jobs(plan, plan.nodes.values())
    assert {key: job.state for key, job in found.items()} == {
        FREE: "running",
        UNROLLED: "queued",
        "train/implicit-s1/free": "ended",
    }
    assert (slurm / "asked").read_text().split() == ["squeue"]


STARTED = event("stage_started")
OOM = {"exit_code": 1, "failure_class": "oom", "message": "killed for\nwant of memory"}
PREEMPTED = {"exit_code": 75, "failure_class": "preempted"}
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
        (PREEMPTED | {"asked": "SIGTERM"}, [STARTED, STOPPED], "CANCELLED||n1|None", "failed", "user", "cancelled"),
        (None, [STARTED, FULL], "", "stopped", None, "ended without a message"),  # of a submission before this one
        (ENV, [STARTED, FULL], "", "failed", "env", "no such venv"),
    ],
)
def test_the_end_of_the_last_submission_is_told_as_the_executor_records_it(
    plan: Plan,
    slurm: Path,
    outcome: dict[str, object] | None,
    journal: list[dict[str, object]],
    answer: str,
    state: str,
    failure_class: str | None,
    why: str,
) -> None:
    files = submit(plan, FREE, **({} if answer else {"state": "reported"}))
    if outcome is not None:
        write_json(files.outcome(1), outcome)
    write_journal(plan, FREE, *journal)
    (slurm / "answer").write_text(f"12|{answer}\n")
    job = observe(plan)[FREE]
    assert (job.state, job.failure_class, job.why) == (state, failure_class, why)


def test_a_job_that_slurm_runs_and_that_has_not_begun_is_starting(plan: Plan, slurm: Path) -> None:
    submit(plan, FREE)
    (slurm / "answer").write_text("12|RUNNING||n1|None\n")
    write_journal(plan, FREE, event("stage_started"), metrics(5, 1, loss=2.0), metrics(6, 2, loss=1.0))
    write_journal(plan, FREE, event("stage_preempted", 3, error="Preempted: at 6"))
    job = observe(plan)[FREE]
    assert (job.state, job.doing, job.progress.step, job.progress.steps_per_s) == ("running", "starting", 6, None)
    write_journal(plan, FREE, event("stage_started", 4))
    assert observe(plan)[FREE].doing != "starting"


def test_a_failure_of_former_settings_is_not_one_of_the_wanted_job(tiny: ExperimentFile) -> None:
    files = submit(tiny.plan(), FREE, state="reported", submitted_unix_s=1.7e9)
    write_json(files.outcome(1), {"exit_code": 2, "failure_class": "user", "message": "no"})
    plan = tiny.edit("tol: 0.1", "tol: 0.2").plan()
    plan.write_job_files()
    assert observe(plan)[FREE].state == "waiting"


def test_a_job_of_this_machine_lives_as_long_as_its_process(plan: Plan) -> None:
    mine = start_ticks(os.getpid())
    submit(plan, FREE, cluster="local", job_id=str(os.getpid()), started=mine)
    assert observe(plan)[FREE].state == "running"
    submit(plan, FREE, cluster="local", job_id=str(os.getpid()), started=(mine or 0) - 1)  # another one with its number
    assert observe(plan)[FREE].state == "waiting"
