"""The state of an experiment at a glance."""

import json
import os
import re
from pathlib import Path

import pytest

from implicit_llm_workflow.results.verify import rebuild_commands
from tests.unit.workflow.console_calls import output, where
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
    out = output(capsys, "status", *where(failed), "--lines", "3")
    assert out.splitlines()[0] == "tiny: 2 of 12 jobs done, 1 failed, 9 waiting; no driver"
    for line in (
        r"stage +done +of +failed +waiting",
        r"data\W+1 +3 +0 +2",
        r"train\W+1 +5 +1 +3",
        rf"failed {EXPLICIT} \(class quota, \d+ d ago\)",
        r".*OSError: \[Errno 28\] full",
        r".*advice: free some space",
        r"next: snakemake --configfile \S+ --profile profiles/local --directory \S+",
    ):
        assert re.search(f"^{line}$", out, re.MULTILINE), line
    assert [int(number) for number in re.findall(r"line (\d+)", out)] == [17, 18, 19]


def test_an_input_that_a_job_refused_is_made_again_by_the_command_that_verify_prints(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    plan = real_plan(failed)
    evaluation, manifest = "evaluate/implicit-s0/free/word-problem", f"{plan.root}/{FREE}/manifest.json"
    finish_with(plan, FREE, {})
    plan.write_job_files()
    log(plan, evaluation, f"ERROR runs: model: found another; type `rm -f {manifest}` and run the workflow again")
    out = output(capsys, "status", *where(failed))
    remove, run_again = rebuild_commands(plan, [FREE])
    assert remove == f"rm -f {manifest}"
    assert out.splitlines()[-1] == f"next: {remove} && {run_again}"
    Path(manifest).unlink()
    assert output(capsys, "status", *where(failed)).splitlines()[-1] == f"next: {run_again}"


def test_the_next_command_has_the_profile_of_the_last_driver(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    (real_plan(failed).root / ".driver.json").write_text('{"profile": "profiles/gpu"}')
    assert re.search(r"^next: snakemake .* --profile profiles/gpu ", output(capsys, "status", *where(failed)), re.M)


def test_a_running_job_is_told_with_step_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    plan = real_plan(failed)
    write_journal(plan, FREE, event("stage_started", host="here"), metrics(5, 10, loss=2.0), metrics(6, 13, loss=1.5))
    with held(plan.run_dir(plan.nodes[FREE]) / "work" / ".lock"), held(plan.root / ".driver.lock", DRIVER) as driver:
        os.utime(plan.root / ".driver.lock", (START_S, START_S))
        out = output(capsys, "status", *where(failed))
    assert re.fullmatch(rf"tiny: 2 of 12 jobs done, .*; driver is process {driver}, since \d+ d", out.splitlines()[0])
    assert re.search(rf"^{FREE} +6/10 +33 % +3.0 s/step +12 s +\d+ d ago +on here +loss 1.5", out, re.MULTILINE)
    assert "next: nothing to type, the driver goes on; it leaves out what failed" in out


def test_machines_get_a_target_and_what_it_needs_with_all_that_is_known(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    (work_of(real_plan(failed), UNROLLED) / "mlflow.json").write_text('{"run_id": "abc"}')
    words = ("status", "train/*/unrolled", EXPLICIT, *where(failed), "--json", "--lines", "2")
    found = json.loads(output(capsys, *words))
    assert found["driver"] is None
    assert {stage: sum(counts.values()) for stage, counts in found["stages"].items()} == {"data": 1, "train": 3}
    jobs = {job["job"]: job for job in found["jobs"]}
    assert list(jobs) == ["data/s3-train", UNROLLED, "train/implicit-s1/unrolled", EXPLICIT]
    assert (jobs[UNROLLED]["mlflow_run_id"], jobs[UNROLLED]["progress"]["end_step"]) == ("abc", 4)
    job = jobs[EXPLICIT]
    assert (job["state"], job["failure_class"], len(job["last_lines"])) == ("failed", "quota", 2)
    assert job["log"].endswith(f"{EXPLICIT}/job.log")
    assert job["age_s"] > 0
    (real_plan(failed).root / "data" / "s3-train" / "manifest.json").unlink()
    out = output(capsys, "status", UNROLLED, *where(failed))
    assert out.splitlines()[-1] == "next: nothing, all is done; 1 of its inputs are gone and not needed"


def test_each_job_is_a_line_that_says_how_it_is_doing_and_why_it_is_not_done(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    plan = real_plan(failed.edit("{steps: 4}", "{steps: 5}"))
    values = {"loss": 0.5, "residual": 0.0301, "num_iter": 7.25, "unconverged_share": 0.012}
    write_journal(plan, FREE, event("stage_started"), metrics(7, 5, **values), torn='{"kind": "metr')
    with held(plan.run_dir(plan.nodes[FREE]) / "work" / ".lock"):
        out = output(capsys, "status", "--jobs", *where(failed))
    assert out.startswith("tiny: 1 of 12 jobs done, 1 running, 1 failed, 1 stale, 8 waiting; no driver")
    for line in (
        r"job +state +step +loss +residual +iter +unconv +age +why",
        rf"{UNROLLED} +stale +4/4 +- +- +- +- +\d+ \w+ +config: phase.end_step 4 -> 5",
        rf"{FREE} +running +7/10 +0\.5 +0\.03 +7\.25 +1\.2 % +\d+ d *$",
        r"train/implicit-s1/free +waiting +-/10 +- ",
    ):
        assert re.search(f"^{line}", out, re.MULTILINE), line
    assert f"1 stale: `implicit-llm explain --config {failed.path}` says why" in output(
        capsys, "status", *where(failed)
    )


def test_a_freed_result_that_a_job_needs_is_stale_here_as_in_explain(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    plan = real_plan(failed)
    (work_of(plan, UNROLLED) / "freed.json").touch()
    why = f"its files were freed, and {FREE} needs them"
    for command in ("explain", "status"):
        jobs = json.loads(output(capsys, command, FREE, *where(failed), "--json"))["jobs"]
        (job,) = [job for job in jobs if job["job"] == UNROLLED]
        assert (job["state"], job["why"]) == ("stale", why), command


def test_a_preflight_that_failed_is_told(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile) -> None:
    log = tiny.beside("results/tiny/.preflight/h100.log", "no space left\n")
    failure = "failed preflight, which all jobs on h100 wait for"
    out = output(capsys, "status", *where(tiny))
    assert (failure in out, "    no space left\n" in out) == (True, True)
    log.with_suffix(".json").touch()
    assert "failed preflight" not in output(capsys, "status", *where(tiny))
