"""What the commands take and refuse, and what `status` and `report --numbers` show."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_workflow import console
from implicit_llm_workflow.planning.plan import DRIVER_RECORD
from implicit_llm_workflow.project_dirs import PROJECT_DIR, VARIABLES
from implicit_llm_workflow.results.verify import rebuild_commands
from tests.unit.workflow.experiments import (
    START_S,
    ExperimentFile,
    event,
    finish,
    finish_with,
    held,
    loaded_after,
    loaded_by,
    log,
    metrics,
    output,
    real_plan,
    refusal,
    run,
    where,
    work_of,
    write_journal,
)

COMMANDS = get_command(console.app).commands
GROUPED = {f"{group} {name}": it for group in COMMANDS for name, it in getattr(COMMANDS[group], "commands", {}).items()}
HELPS = {name: it.help for name, it in {**COMMANDS, **GROUPED}.items() if not hasattr(it, "commands")}


def test_a_command_that_shows_something_loads_no_heavy_package(tiny: ExperimentFile) -> None:
    plan = real_plan(tiny)
    for phase in ("unrolled", "free"):
        write_journal(plan, f"train/implicit-s0/{phase}", event("stage_started"), metrics(1, 1, loss=1.0))
    (tiny.path.parent / "tasks_1-20_v1-2.tar.gz").write_bytes(b"damaged")
    babi = ("prefetch", "--config", "miniature", "--downloads", str(tiny.path.parent))
    shown = ("status", "status --jobs", "explain", "estimate --json", "verify", "gc", "report --numbers", "missing")
    calls = [
        ("--help",),
        ("list",),
        babi,
        *((*it.split(), *where(tiny)) for it in shown),
    ]
    assert loaded_by(*calls, ("compare", "implicit-s0", "implicit-s0/unrolled", *where(tiny))) == []


def test_making_data_loads_no_models() -> None:
    use = "from implicit_llm_jobs import stage; from implicit_llm_data.stages import catbabi, token_shard, word_problem"
    assert loaded_after(use) == ["numpy"]


@pytest.mark.parametrize("command", sorted(HELPS))
def test_every_command_explains_itself_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    out = output(capsys, *command.split(), "--help")
    example = out.split("Example")[1].partition("╭")[0]
    assert re.search(rf"implicit-llm {command}\b", example)
    # Without a name Typer shows the type, `<int range>`, and `<bool>` where an option takes nothing.
    assert re.findall(r"<(?:bool|int|float|str|path|list|dir|file)\b", out) == []


@pytest.mark.parametrize(("below", "options"), [("docs", ()), (".", ("--results", "reslts"))])
def test_a_folder_without_results_is_named_and_so_is_that_of_the_checkout(
    capsys: pytest.CaptureFixture[str],
    tiny: ExperimentFile,
    monkeypatch: pytest.MonkeyPatch,
    below: str,
    options: tuple[str, ...],
) -> None:
    checkout = tiny.path.parent
    (checkout / "Snakefile").touch()
    (checkout / "docs").mkdir()
    monkeypatch.chdir(checkout / below)
    err = refusal(capsys, "status", "--config", str(tiny.path), *options)
    assert f"type `cd {checkout}` and leave out --results" in err
    monkeypatch.chdir(checkout)
    (checkout / "results").rmdir()  # as before the first run
    output(capsys, "status", "--config", str(tiny.path))


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("gone")])
def test_results_that_are_a_file_or_a_link_to_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    checkout = tiny.path.parent
    (checkout / "Snakefile").touch()
    (checkout / "results").rmdir()
    make(checkout / "results")
    monkeypatch.chdir(checkout)
    assert "results: is a file, or a link to a folder that is not there" in refusal(capsys, "status", str(tiny.path))


def test_the_results_of_one_experiment_are_not_taken_for_all_results(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile, tmp_path: Path
) -> None:
    folder = tmp_path / "results" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DRIVER_RECORD).write_text("{}")
    err = refusal(capsys, "status", str(tiny.path), "--results", str(folder))
    assert f"is the folder of one experiment; give that of all results, --results {folder.parent}" in err


def test_a_folder_of_results_with_a_name_that_is_too_long_is_not_there(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile
) -> None:
    err = refusal(capsys, "status", str(tiny.path), "--results", "a" * 300)
    assert "there is no such folder of results" in err


def test_a_command_in_a_checkout_that_is_not_the_installed_one_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "my study"
    (checkout / "workflow" / "lib" / "implicit_llm_workflow").mkdir(parents=True)
    (checkout / "docs").mkdir()
    monkeypatch.chdir(checkout / "docs")
    said = refusal(capsys, "status")
    assert f"error: {checkout}: the installed package implicit_llm_workflow belongs to another tree" in said
    assert f"type `cd '{checkout}' && make setup" in said  # as a shell takes it


TINY = "--config tiny.yaml --results results"
NO_RUN = "experiment tiny has no such run; did you mean 'implicit-s.*"
IDENTITY = "--run-dir x --identity {}"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "status --confg demo",
            r"No such option: --confg \(Possible options: --config, --json\); type `implicit-llm status --help`",
        ),
        (
            "run demo train -np",
            "No such option: -n; .*; to pass it to Snakemake, type `implicit-llm run demo train -- -np`",
        ),
        ("accept", "Missing argument 'EXPERIMENT TARGET...'; type `implicit-llm accept --help`"),
        ("train --nodes x", "Invalid value for '--nodes': .*; type `implicit-llm train --help`"),
        (
            "evaluate word-problm",
            r"No such command 'word-problm'. Did you mean 'word-problem'\? Or type `implicit-llm evaluate --help`",
        ),
        ("preflight --hardware v100 --device cda", "Invalid value for '--device': .*"),
        ("mlflow rebuild --results /proc/none", "/proc/none: no such directory.*"),
        (f"job {IDENTITY} --threads -1", "--threads: expected an integer.*"),
        (f"train {IDENTITY} --grace-s -1", "--grace-s: expected a number.*"),
        ("evaluate lm-eval --model .", r".*tasks: give a list of tasks, or the name of a suite; valid: local, paper.*"),
        (f"status train/implicit-s0/fre {TINY}", ".*did you mean 'train/implicit-s0/free'.*"),
        (f"verify data/s3-trian {TINY}", ".*did you mean 'data/s3-train'.*"),
        (f"status train/*/fre {TINY}", r"train/\*/fre: no job matches; .*"),
        (
            f"compare implicit-s7 implicit-s0 {TINY}",
            f"implicit-s7: {NO_RUN}",
        ),
        (
            f"compare implicit-s explicit {TINY}",
            f"implicit-s: {NO_RUN}",
        ),
        ("compare tiny.yaml", "no run is named; type runs of tiny to compare: implicit, explicit"),
        (f"compare implicit-s0 explicit {TINY}", "implicit-s0: has not finished; type: snakemake .*"),
        (
            f"compare ./ explicit {TINY}",
            ".*: is in no run directory of a finished job; name a job, its folder or a file in it.*",
        ),
        (f"explain --identity {TINY}", "--identity: needs one job.*"),
        (f"lineage report {TINY}", "report: has not finished; type: snakemake --configfile .*"),
        (f"accept report {TINY}", ".*--why: is missing.*"),
        (f"missing train/implicit-s0/free {TINY}", "train/implicit-s0/free: is no figure or table; .*"),
        (f"estimate --hardware h20 {TINY}", ".*did you mean 'h200'.*"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_type(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: ExperimentFile,
    command: str,
    message: str,
) -> None:
    monkeypatch.chdir(tiny.path.parent)
    assert re.fullmatch(f"error: {message}\n", refusal(capsys, *command.split()))


USELESS = "error: --{}: does nothing in a job of the stage {}; remove it\n"


@pytest.mark.parametrize(
    ("stage", "words", "message"),
    [
        ("data", (), "there is no job of stage data and kind wordproblem"),
        ("daata", (), "there is no job of stage daata"),
        ("train", (), "is that of a job of the stage train; type `implicit-llm train`"),
        ("data", ("--device", "cpu"), USELESS.format("device", "data")),
        ("data", ("--batch-size", "4"), USELESS.format("batch-size", "data")),
        ("checkpoint", ("--threads", "2"), USELESS.format("threads", "checkpoint")),
        ("evaluate", ("--downloads", "elsewhere"), USELESS.format("downloads", "evaluate")),
        ("report", ("--kernels", "torch"), USELESS.format("kernels", "report")),
        ("excerpt", ("--threads", "2"), USELESS.format("threads", "excerpt")),
    ],
)
def test_an_identity_that_no_job_has_and_an_option_that_does_nothing_in_it_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stage: str, words: tuple[str, ...], message: str
) -> None:
    identity = Identity(stage, "s3", {"kind": "wordproblem"}, "c0de", {}).to_json()
    code, _, err = run(capsys, "job", "--run-dir", str(tmp_path / "s3"), "--identity", identity, *words)
    assert (code, message in err, (tmp_path / "s3" / "work").exists()) == (2, True, False)


def test_a_package_that_a_job_misses_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, "implicit_llm_data.stages.word_problem", raising=False)
    identity = Identity("data", "s3", {"kind": "word_problem"}, "c0de", {}).to_json()
    code, _, err = run(capsys, "job", "--run-dir", str(tmp_path / "s3"), "--identity", identity)
    assert (code, "numpy" in err, "pip install" in err) == (2, True, True)


def test_a_plugin_that_cannot_be_imported_is_named_by_its_job_and_by_status(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.path.parent)
    plugin = tiny.beside("lost.py", 'PLUGIN = {"groups": {"Own": 6}}\nimport helper_mod\n')
    tiny.edit("name: tiny", "name: tiny\nplugins: [lost.py]").edit("group: S3", "group: Own")
    key = "data/s3-train"
    identity = output(capsys, "explain", "--identity", key, "--config", str(tiny.path))
    plan = real_plan(tiny)
    words = ("--run-dir", str(plan.run_dir(plan.nodes[key])), "--log", str(work_of(plan, key) / "job.log"))
    message = f"{plugin}:2: there is no module 'helper_mod'; install it, or move its code into the plugin"
    assert run(capsys, "job", "--identity", identity, *words) == (2, "", f"error: {message}\n")
    said = output(capsys, "status", *where(tiny))
    assert "1 failed" in said
    assert message in " ".join(said.split())


def test_only_a_package_that_the_project_itself_imports_is_one_of_its_optional_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(**_: object) -> None:
        import helper_mod  # type: ignore[import-not-found]  # noqa: F401

    monkeypatch.setattr(console, "app", draw)
    message = "error: ModuleNotFoundError: No module named 'helper_mod'; add --debug for the traceback\n"
    assert run(capsys, "status") == (1, "", message)


def test_debug_shows_the_traceback_wherever_it_stands(tiny: ExperimentFile, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.edit("group: S3", "group: Q3")
    for words in (["--debug", "status"], ["status", "--debug"]):
        code, _, err = run(capsys, *words, "--config", str(tiny.path))
        assert (code, "Traceback" in err, "is no group" in err.splitlines()[-1]) == (2, True, True)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("broken\n  here"), 1, "error: ValueError: broken here; add --debug for the traceback\n"),
        (type("Preempted", (Exception,), {"exit_code": 75})("saved"), 75, "error: saved\n"),
        (type("Wrong", (ValueError,), {"exit_code": 2})("tau: 2"), 2, "error: tau: 2\n"),
    ],
)
def test_the_exit_code_says_what_kind_of_error_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(console, "app", fail)
    assert run(capsys, "status") == (code, "", message)
    found, _, err = run(capsys, "status", "--debug")  # a preempted job is started again in either case
    assert (found, err.startswith("Traceback"), err.endswith(message)) == (code, True, True)


@pytest.mark.parametrize(("given", "seen"), [(None, "1"), ("0", "0")])
def test_a_job_is_run_from_its_identity_alone_and_does_not_look_at_the_hub_unless_told_to(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: ExperimentFile,
    tmp_path: Path,
    given: str | None,
    seen: str,
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if given is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", given)
    identity = output(capsys, "explain", "--identity", "data/s3-test-L8-h0.5", "--config", str(tiny.path))
    run_dir = tmp_path / "run"
    output(capsys, "job", "--run-dir", str(run_dir), "--identity", identity, "--log", f"{run_dir}/job.log")
    assert os.environ["HF_HUB_OFFLINE"] == seen
    assert json.loads((run_dir / "manifest.json").read_text())["summary"]["num_samples"] == 32
    assert "done" in (run_dir / "job.log").read_text()


def test_the_headline_shows_each_mode_and_marks_stale_numbers(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile
) -> None:
    plan = tiny.plan()
    finish(plan)
    for run_name in ("implicit-s0/free", "implicit-s1/free", "explicit-s0/explicit"):
        accuracy = 1.0 if "s1" in run_name else 0.992
        accuracies = {
            "s3-test-L8-h0.5": {"blockwise": accuracy, "sequential": None},
            "s3-test-L16-h0.5": {"blockwise": 0},
        }
        finish_with(plan, f"evaluate/{run_name}/word-problem", {"accuracy_last10": accuracies})
    out = output(capsys, "report", "--numbers", *where(tiny))
    # Stale, as made-up code digests are not the real ones.
    assert re.search(r"^s3 +implicit/free \(stale\) +explicit/explicit \(stale\)", out, re.MULTILINE)
    spread = r"0\.996 \(0\.992 to 1, 2 seeds\) +0\.992"
    assert re.search(rf"accuracy_last10 s3-test-L8-h0\.5 blockwise +{spread}\n", out)
    assert re.search(r"accuracy_last10 s3-test-L16-h0\.5 blockwise +0 \(0 to 0, 2 seeds\) +0\n", out)
    assert "sequential" not in out  # an unknown number is no zero
    assert "mlflow ui --backend-store-uri sqlite:///" in out


def test_the_evaluation_that_the_file_names_first_comes_first_among_the_numbers(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile
) -> None:
    tiny.add(
        "  ablation:\n    kind: word_problem\n    modes: [{name: sequential, eval_mode: sequential}]\n"
        "    runs: [implicit]\n"
    )
    plan = tiny.plan()
    finish(plan)
    for name, mode in (("word-problem", "blockwise"), ("ablation", "sequential")):
        accuracies = {"accuracy_last10": {"s3-test-L8-h0.5": {mode: 0.5}}}
        finish_with(plan, f"evaluate/implicit-s0/free/{name}", accuracies)
    out = output(capsys, "report", "--numbers", *where(tiny))
    assert re.findall(r"(blockwise|sequential) +0\.5", out) == ["blockwise", "sequential"]


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


def test_the_next_command_of_days_on_this_machine_has_its_price(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = output(capsys, "status", "paper", "--results", str(tmp_path))
    assert re.search(r"^next: snakemake .*# 49,\d+ hours of training by estimate, on this machine$", out, re.M)


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
    with held(plan.run_dir(plan.nodes[FREE]) / "work" / ".lock"), held(plan.root / ".driver.lock") as driver:
        os.utime(plan.root / ".driver.lock", (START_S, START_S))
        out = output(capsys, "status", *where(failed))
    assert re.fullmatch(rf"tiny: 2 of 12 jobs done, .*; driver is process {driver}, since \d+ d", out.splitlines()[0])
    assert re.search(rf"^{FREE} +6/10 +33 % +3.0 s/step +12 s +\d+ d ago +on here +loss 1.5", out, re.MULTILINE)
    assert "next: nothing to type, the driver goes on; it leaves out what failed" in out


def test_a_stopped_job_under_a_driver_that_goes_on_waits_for_the_next_start(
    capsys: pytest.CaptureFixture[str], failed: ExperimentFile
) -> None:
    plan = real_plan(failed)
    write_journal(plan, EXPLICIT, event("stage_started"), event("stage_stopped", 4, error="SystemExit: 143"))
    with held(plan.root / ".driver.lock"):
        os.utime(plan.root / ".driver.lock", (START_S, START_S))
        out = output(capsys, "status", *where(failed))
    assert f"stopped, to be continued: {EXPLICIT}" in out
    assert out.endswith("the driver goes on; what it leaves stopped is resumed by the next start\n")


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
    assert job["log"] == str(work_of(real_plan(failed), EXPLICIT) / "job.log")
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
        r"job +state +step +loss +iter +residual +unconv +age +why",
        rf"{UNROLLED} +stale +4/4 +- +- +- +- +\d+ \w+ +config: phase.end_step 4 -> 5",
        rf"{FREE} +running +7/10 +0\.5000 +7\.2 +0\.03 +1\.2% +\d+ d *$",
        r"train/implicit-s1/free +waiting +-/10 +- ",
    ):
        assert re.search(f"^{line}", out, re.MULTILINE), line
    assert f"1 stale: `implicit-llm explain {failed.path}` says why" in output(capsys, "status", *where(failed))


def test_a_preflight_that_failed_is_told(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile) -> None:
    log = tiny.beside("results/tiny/.preflight/h100.log", "no space left\n")
    failure = "failed preflight, which all jobs on h100 wait for"
    out = output(capsys, "status", *where(tiny))
    assert (failure in out, "    no space left\n" in out) == (True, True)
    log.with_suffix(".json").touch()
    assert "failed preflight" not in output(capsys, "status", *where(tiny))


def test_a_misspelt_environment_variable_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPLICIT_LLM_KERNEL", "torch")
    message = "IMPLICIT_LLM_KERNEL: is no environment variable of this project; did you mean 'IMPLICIT_LLM_KERNELS'?"
    assert message in refusal(capsys, "list")
    monkeypatch.delenv("IMPLICIT_LLM_KERNEL")
    monkeypatch.setenv("IMPLICIT_LLM_KERNELS", "torch")
    assert output(capsys, "list")


def test_the_known_environment_variables_are_those_in_the_code() -> None:
    code = ("implicit_llm", "workflow/lib", "workflow/report", "workflow/plugins/submitit/src")
    paths = [PROJECT_DIR / "hatch_build.py", *(path for part in code for path in (PROJECT_DIR / part).rglob("*.py"))]
    found = {name for path in paths for name in re.findall(r"\bIMPLICIT_LLM_([A-Z_]+)", path.read_text())}
    assert found == set(VARIABLES)
