"""The state of an experiment at a glance."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from implicit_llm_workflow.results.verify import rebuild_commands
from tests.unit.workflow.console_calls import run, where
from tests.unit.workflow.experiments import ExperimentFile
from tests.unit.workflow.run_dirs import (
    DRIVER,
    START_S,
    event,
    finish_with,
    held,
    log,
    metrics,
    real_plan,
    work_of,
    write_journal,
)

EXPLICIT, FREE, UNROLLED = "train/explicit-s0/explicit", "train/implicit-s0/free", "train/implicit-s0/unrolled"
DEADLINE_S = 60


@pytest.fixture
def failed(tiny: ExperimentFile) -> ExperimentFile:
    """Data and a phase done, another one failed."""
    plan = real_plan(tiny)
    finish_with(plan, "data/s3-train", {})
    finish_with(plan, UNROLLED, {"global_step": 4})
    ended = event("stage_failed", 4, error="OSError: [Errno 28] full", failure_class="quota")
    write_journal(plan, EXPLICIT, event("stage_started"), ended)
    log(plan, EXPLICIT, *[f"INFO implicit_llm.train: line {number}" for number in range(20)])
    return tiny


def test_stages_are_counted_and_a_failure_is_told_with_its_log(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    code, out, _ = run(capsys, "status", *where(failed), "--lines", "3")
    assert code == 0
    assert out.splitlines()[0] == "tiny: 2 of 12 jobs done, 1 failed, 9 waiting; no driver"
    assert re.search(r"^stage +done +of +failed +waiting$", out, re.MULTILINE)
    assert re.search(r"^data\W+1 +3 +0 +2$", out, re.MULTILINE)
    assert re.search(r"^train\W+1 +5 +1 +3$", out, re.MULTILINE)
    assert re.search(rf"^failed {EXPLICIT} \(class quota, \d+ d ago\)$", out, re.MULTILINE)
    assert "OSError: [Errno 28] full\n" in out
    assert "advice: free some space\n" in out
    assert [int(number) for number in re.findall(r"line (\d+)", out)] == [17, 18, 19]
    assert re.search(r"^next: snakemake --configfile \S+ --profile profiles/local --directory \S+$", out, re.M)


def test_an_input_that_a_job_refused_is_made_again_by_the_command_that_verify_prints(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    plan = real_plan(failed)
    evaluation, manifest = "evaluate/implicit-s0/free/word-problem", f"{plan.root}/{FREE}/manifest.json"
    finish_with(plan, FREE, {})
    plan.write_job_files()
    log(plan, evaluation, f"ERROR runs: model: found another; type `rm -f {manifest}` and run the workflow again")
    _, out, _ = run(capsys, "status", *where(failed))
    remove, run_again = rebuild_commands(plan, [FREE])
    assert remove == f"rm -f {manifest}"
    assert out.splitlines()[-1] == f"next: {remove} && {run_again}"
    Path(manifest).unlink()
    _, out, _ = run(capsys, "status", *where(failed))
    assert out.splitlines()[-1] == f"next: {run_again}"


def test_the_next_command_has_the_profile_of_the_last_driver(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    (real_plan(failed).root / ".driver.json").write_text('{"profile": "profiles/gpu"}')
    _, out, _ = run(capsys, "status", *where(failed))
    assert re.search(r"^next: snakemake --configfile \S+ --profile profiles/gpu ", out, re.M)


def test_a_running_job_is_told_with_step_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    plan = real_plan(failed)
    write_journal(plan, FREE, event("stage_started", host="here"), metrics(5, 10, loss=2.0), metrics(6, 13, loss=1.5))
    with held(plan.run_dir(plan.nodes[FREE]) / "work" / ".lock"), held(plan.root / ".driver.lock", DRIVER) as driver:
        os.utime(plan.root / ".driver.lock", (START_S, START_S))
        code, out, _ = run(capsys, "status", *where(failed))
    assert code == 0
    assert re.fullmatch(rf"tiny: 2 of 12 jobs done, .*; driver is process {driver}, since \d+ d", out.splitlines()[0])
    assert re.search(rf"^{FREE} +6/10 +33 % +3.0 s/step +12 s +\d+ d ago +on here +loss 1.5", out, re.MULTILINE)
    assert "next: nothing to type, the driver goes on; it leaves out what failed" in out


def test_a_target_is_counted_with_what_it_needs_alone(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    code, out, _ = run(capsys, "status", UNROLLED, *where(failed), "--json")
    found = json.loads(out)
    assert (code, found["next"]) == (0, "nothing, all is done")
    assert {stage: counts["done"] for stage, counts in found["stages"].items()} == {"data": 1, "train": 1}
    assert [job["job"] for job in found["jobs"]] == ["data/s3-train", UNROLLED]


def test_what_is_gone_and_not_needed_is_nothing_to_make(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    (real_plan(failed).root / "data" / "s3-train" / "manifest.json").unlink()
    _, out, _ = run(capsys, "status", UNROLLED, *where(failed))
    assert out.splitlines()[-1] == ("next: nothing, all is done; 1 of its inputs are gone and not needed")


def test_machines_get_every_job(capsys: pytest.CaptureFixture[str], failed: ExperimentFile) -> None:
    _, out, _ = run(capsys, "status", *where(failed), "--json", "--lines", "2")
    found = json.loads(out)
    assert found["driver"] is None
    assert sum(found["stages"]["train"].values()) == 5
    (job,) = [job for job in found["jobs"] if job["status"] == "failed"]
    assert (job["failure_class"], len(job["last_lines"])) == ("quota", 2)
    assert job["log"].endswith(f"{EXPLICIT}/job.log")


def test_every_job_is_listed_with_its_fingerprint_and_why_it_is_not_done(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    code, out, _ = run(capsys, "status", "--jobs", *where(failed.edit("{steps: 4}", "{steps: 5}")))
    assert code == 0
    assert re.search(rf"^{UNROLLED} +stale +[0-9a-f]{{16}} +config: phase.end_step 4 -> 5", out, re.MULTILINE)
    assert re.search(rf"^{FREE} +waiting +[0-9a-f]{{16}} *$", out, re.MULTILINE)
    assert out.startswith("tiny: 1 of 12 jobs done, 1 failed, 1 stale, 9 waiting; no driver")


def test_a_freed_result_that_a_job_needs_is_stale_here_as_in_explain(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    plan = real_plan(failed)
    (work_of(plan, UNROLLED) / "freed.json").touch()
    why = f"its files were freed, and {FREE} needs them"
    for command, key in (("explain", "state"), ("status", "status")):
        _, out, _ = run(capsys, command, FREE, *where(failed), "--json")
        (job,) = [job for job in json.loads(out)["jobs"] if job["job"] == UNROLLED]
        assert (job[key], job["why"]) == ("stale", why), command


def test_stale_results_are_told_with_the_command_that_says_why(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    _, out, _ = run(capsys, "status", *where(failed.edit("{steps: 4}", "{steps: 5}")))
    assert f"1 stale: `implicit-llm explain --config {failed.path}` says why" in out


def test_a_preflight_that_failed_is_told(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile) -> None:
    log = tiny.plan().root / ".preflight" / "h100.log"
    log.parent.mkdir(parents=True)
    log.write_text("no space left\n")
    _, out, _ = run(capsys, "status", *where(tiny))
    assert "failed preflight, which all jobs on h100 wait for" in out
    assert "    no space left\n" in out
    log.with_suffix(".json").touch()
    _, out, _ = run(capsys, "status", *where(tiny))
    assert "failed preflight" not in out
