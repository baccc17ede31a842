"""Commands about the results of the small experiment, where these came from, and figures by themselves."""

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from implicit_llm_contracts.runs.atomic import write_json
from implicit_llm_contracts.runs.manifest import ManifestError
from implicit_llm_workflow.commands.options import make_plan
from implicit_llm_workflow.planning.staleness import ACCEPTED, Acceptance
from implicit_llm_workflow.results.lineage import Lineage, NoLineage, as_json, trace, tree_of
from implicit_llm_workflow.results.verify import Broken, check_files
from tests.limits import wait_until
from tests.unit.workflow.experiments import EXCERPTS, TEST_SETS, ExperimentFile, output, refusal, run, where
from tests.workflow.tiny_project import ALL, DEADLINE_S, NOTHING, Project

FREE, EXPLICIT = "train/implicit-s0/free", "evaluate/explicit-s0/explicit/word-problem"
IMPLICIT = "evaluate/implicit-s0/free/word-problem"


def command(project: Project, *words: str, code: int = 0) -> str:
    return project.command("implicit-llm", *words, "--config", project.config.name, code=code)


def status(project: Project) -> tuple[dict[str, Any], dict[str, str]]:
    """What `status` says, and the state of each job."""
    found = json.loads(command(project, "status", "--json"))
    return found, {job["job"]: job["state"] for job in found["jobs"]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_driver_is_not_said_to_go_on(fresh: Project, number: signal.Signals) -> None:
    def line(found: dict[str, Any]) -> str:
        return str(found["next"]).partition(" snakemake ")[0]

    stops = {
        signal.SIGTERM: "the driver was told to stop; when its running jobs have ended, type:",
        signal.SIGKILL: "jobs run without a driver; when they have ended, type:",
    }
    with fresh.held() as driver:
        found, states = status(fresh)
        assert line(found) == "nothing to type, the driver goes on"
        assert "queued" in states.values()
        driver.send_signal(number)
        wait_until(lambda: line(status(fresh)[0]) == stops[number])
        assert "queued" not in status(fresh)[1].values()
        assert "running" in status(fresh)[1].values()
        fresh.release()
        driver.communicate(timeout=DEADLINE_S)
    fresh.snakemake()
    assert line(status(fresh)[0]).startswith("nothing, all is done")


def test_a_job_at_work_and_one_that_failed_are_told_and_then_all_is_done(project: Project) -> None:
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    project.edit(project.config, "    modes:", "    lengths: [8, 16]\n    modes:")
    failing = replace(project, variables={"TINY_FAIL": EXPLICIT.removeprefix("evaluate/")})
    end = time.monotonic() + DEADLINE_S
    with failing.held(cores=2) as driver:
        found, states = status(project)
        while states[EXPLICIT] != "failed":
            assert time.monotonic() < end, states
            found, states = status(project)
        assert states[FREE] == "running"
        assert found["driver"] == {"pid": driver.pid, "is_alive": True}
        assert found["stages"]["data"] == {**dict.fromkeys(found["stages"]["data"], 0), "done": 3}
        (failed,) = [job for job in found["jobs"] if job["state"] == "failed"]
        assert (failed["why"], failed["failure_class"]) == ("RuntimeError: made to fail", "bug")
        assert failed["last_lines"][-1].endswith("RuntimeError: made to fail")
        assert states[IMPLICIT] in ("stale", "waiting")
        project.release()
        driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 1
    found, states = status(project)
    assert (found["driver"], states[FREE], states[EXPLICIT]) == (None, "done", "failed")
    assert found["next"] == "snakemake --configfile tiny.yaml --profile profiles/local"
    project.command(*found["next"].split(), "--cores", "2")
    assert set(status(project)[1].values()) == {"done"}


def test_the_outputs_by_which_a_job_is_known_again_are_those_of_its_rule(built: Project) -> None:
    said = built.snakemake("--dry-run", "--forceall")
    declared = {
        frozenset(without_digits(line).split(", ")) for line in re.findall(r"^ +output: (.*)$", said, re.MULTILINE)
    }
    plan = make_plan(str(built.config), built.results.parent)
    for node in plan.nodes.values():  # the code of the project has other digests than that of this process
        outputs = [os.path.relpath(path, built.dir) for path in plan.outputs(node).values()]
        assert frozenset(without_digits(path) for path in outputs) in declared


NOT_VOUCHED = ("commit.json", "manifest.json", "provenance.json", "mlflow.json", "claims.json")  # the last is a copy


def without_digits(paths: str) -> str:
    return re.sub("/work/[0-9a-f]+/", "/work/*/", paths)


def vouched_files(project: Project) -> dict[Path, tuple[bytes, int]]:
    """Content and time of what the jobs of the experiment made."""
    paths = [path for path in project.results.glob("*/**/work/*/*") if path.suffix in (".json", ".txt")]
    files = [path for path in paths if path.name not in NOT_VOUCHED]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_the_commands_that_verify_prints_rebuild_what_is_broken_and_nothing_else(project: Project) -> None:
    assert "none broken" in command(project, "verify")
    whole, jobs = vouched_files(project), {"data/s3-train", "train/explicit-s0/explicit"}
    victims = {next(path for path in whole if path.is_relative_to(project.results / job)) for job in jobs}
    page = project.results / "report" / "index.html"  # a copy of a file below work/
    for path in (*victims, page):
        path.write_bytes(path.read_bytes()[::-1])
    output = command(project, "verify", code=1)
    assert set(re.findall(r"\(job (\S+)\)", output)) == {*jobs, "report"}
    for line in re.findall("^    +(.*)$", output, re.MULTILINE):
        project.command("bash", "-c", line)
    assert "none broken" in command(project, "verify")
    now = vouched_files(project)
    assert {path: now[path][0] for path in whole} == {path: content for path, (content, _) in whole.items()}
    assert {path for path in whole if now[path][1] != whole[path][1]} == victims
    assert page.read_text() == "index.html\n"
    assert NOTHING in project.snakemake()


def test_a_figure_is_made_by_its_name_and_from_its_own_jobs(project: Project) -> None:
    project.append(project.config, EXCERPTS)
    assert project.planned("figure_3") == {"excerpt/figure_3"}
    project.snakemake("figure_3")
    made = project.manifest("excerpt/figure_3")
    assert made["identity"]["config"]["figures"] == ["accuracy-by-length"]
    assert made["summary"]["num_inputs"] == 3  # two phases and an evaluation
    project.edit(project.config, "batch_size: 8", "batch_size: 4")
    implicit = {"train/implicit-s0/unrolled", FREE, IMPLICIT}
    assert project.planned("figure_3") == {*implicit, "excerpt/figure_3"}  # nothing of the explicit run


def test_the_paper_is_the_experiment_of_a_call_without_a_config_file(project: Project) -> None:
    project.edit(project.config, "name: tiny", "name: paper")
    shutil.copy(project.config, project.dir / "workflow" / "config" / "paper.yaml")
    said = project.command("snakemake", "--dry-run", "--profile", "profiles/local", "paper", "--cores", "1")
    assert re.search("results/paper/report/work/[0-9a-f]{16}/manifest.json", said)


@pytest.mark.slow
def test_a_job_in_a_process_of_its_own_reads_the_default_configuration_too(project: Project) -> None:
    config = project.dir / "workflow" / "config" / "paper.yaml"
    shutil.move(project.config, config)
    shutil.copytree(project.dir / "curricula", config.parent / "curricula", dirs_exist_ok=True)
    target = "results/tiny/data/s3-train/manifest.json"
    (project.dir / target).unlink()
    project.command("snakemake", "--executor", "submitit", "--submitit-cluster", "local", "--jobs", "1", target)
    assert (project.dir / target).is_file()


def test_a_failing_evaluation_leaves_the_others_and_a_report_with_missing_results(project: Project) -> None:
    failing = replace(project, variables={"TINY_FAIL": IMPLICIT.removeprefix("evaluate/")})
    failing.edit(failing.config, "    modes:", "    lengths: [8, 16]\n    modes:")
    failing.snakemake("--keep-going", code=1)
    assert failing.manifest(EXPLICIT)["identity"]["config"]["lengths"] == [8, 16]
    said = command(failing, "missing", code=2)
    for part in (IMPLICIT, "RuntimeError: made to fail", "results/tiny/report/manifest.json"):
        assert part in said
    assert "explicit-s0" not in said
    command(failing, "missing", "--report")
    failing.append(failing.config, EXCERPTS)
    command(failing, "missing", "figure_3", "--report")
    made, figure = (failing.manifest(f"{key}-with-missing")["summary"] for key in ("report", "excerpt/figure_3"))
    assert [item["job"] for item in figure["missing"]] == [IMPLICIT]
    (lacking,) = made["missing"]
    assert (lacking["job"], lacking["state"], lacking["config"]["kind"]) == (IMPLICIT, "failed", "word_problem")
    assert lacking["data"]["s3-test-L16-h0.5"]["length"] == 16
    assert made["num_inputs"] == 4  # three phases and the evaluation that went well
    project.snakemake()
    assert "results/tiny/report/index.html" in command(project, "report")


def test_a_peer_is_imported_and_evaluated_and_other_content_is_another_peer(project: Project) -> None:
    folder = project.dir / "models" / "other"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"one")
    project.append(project.config, "\npeers:\n  other: {data: s3, checkpoint: {path: models/other}}\n")
    mine = {"checkpoint/other", "evaluate/other/checkpoint/word-problem", "report"}
    assert project.planned() == mine
    project.snakemake()
    imported = project.manifest("checkpoint/other")["identity"]["config"]
    assert (imported["path"], set(imported["sha256"])) == ("models/other", {"config.json", "model.safetensors"})
    (folder / "model.safetensors").write_bytes(b"two")
    assert project.planned() == mine


BEHIND = {IMPLICIT, FREE, "train/implicit-s0/unrolled", "data/s3-train", *TEST_SETS}


def text_of(lineage: Lineage) -> str:
    console = Console(width=400, highlight=False)
    with console.capture() as captured:
        console.print(tree_of(lineage))
    return captured.get()


def broken_in(lineage: Lineage) -> list[Broken]:
    files, damaged = lineage.files()
    assert len(files) + len(damaged) >= sum(len(item.manifest.files) for item in lineage.runs.values())
    return [*damaged, *check_files(files)]


def work_of(project: Project, job: str) -> Path:
    return next((project.results / job).glob("work/[0-9a-f]*"))


@pytest.mark.parametrize(
    "place", ["", "/manifest.json", "/work/[0-9a-f]*", "/work/*/manifest.json", "/work/*/metrics.json"]
)
def test_a_result_is_traced_back_to_the_data(built: Project, place: str) -> None:
    found = trace(next(built.results.glob(f"{IMPLICIT}{place}")))
    assert ({item.key for item in found.runs.values()}, list(found.missing())) == (BEHIND, [])
    text = text_of(found)
    for item in found.runs.values():
        assert f"{item.key}  {item.fingerprint[:16]}" in text
    assert text.index(IMPLICIT) < text.index(FREE) < text.index("train/implicit-s0/unrolled")
    assert ("metrics.json (sha256" in text.splitlines()[0]) == place.endswith("metrics.json")


def test_a_published_copy_has_the_lineage_of_the_file_below_work(built: Project) -> None:
    copy = next((built.results / "report" / "figures").iterdir())
    assert trace(copy).artifact == f"work/{trace(copy).top.fingerprint[:16]}/declared/figures/{copy.name}"


def test_a_result_of_former_settings_keeps_its_own_lineage(project: Project) -> None:
    model = work_of(project, FREE) / "model.json"
    before = trace(model).runs.keys()
    other = {**project.manifest(FREE), "fingerprint": "0" * 64}
    (project.results / FREE / "manifest.json").write_text(json.dumps(other))
    assert (trace(model).runs.keys(), broken_in(trace(model))) == (before, [])
    assert trace(project.results / IMPLICIT).runs.keys() >= before


def test_a_result_that_is_set_aside_is_not_part_of_the_lineage(project: Project) -> None:
    work = work_of(project, FREE)
    shutil.copytree(work, work.with_name(f"{work.name}.previous"))
    for top, is_forward in ((project.results / IMPLICIT, False), (work, True)):
        found = trace(top, is_forward=is_forward)
        assert {run.path.parent.suffix for run in found.runs.values()} == {""}
        assert broken_in(found) == []
    shutil.rmtree(work)
    assert [role for _, role, _ in trace(project.results / IMPLICIT).missing()] == ["model"]


def test_every_file_behind_a_result_is_verified_and_one_that_is_gone_is_broken(project: Project) -> None:
    found, work = trace(project.results / IMPLICIT), work_of(project, FREE)
    assert broken_in(found) == []
    (work / "model.json").write_bytes((work / "model.json").read_bytes()[::-1])
    assert [(item.job, item.path) for item in broken_in(found)] == [(FREE, work / "model.json")]
    work.rename(project.dir / "elsewhere")
    found = trace(project.results / IMPLICIT)
    assert "model: not found" in text_of(found)
    assert [entry["role"] for entry in as_json(found)["not_found"]] == ["model"]
    assert "found none" in broken_in(found)[0].why


def test_a_result_that_was_moved_has_its_lineage_with_its_experiment_and_says_so_without(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    options = where(ExperimentFile(project.config))
    table, moved = project.results / "report" / "tables" / "accuracy.csv", project.dir / "moved"
    _, tree, err = run(capsys, "lineage", str(table))
    assert err == ""
    shutil.copytree(project.results / FREE, project.dir / "alone" / "free")
    code, _, err = run(capsys, "lineage", str(project.dir / "alone" / "free"))
    assert (code, err.count("\n")) == (0, 1)
    assert re.match(
        rf"2 of its inputs are not below {project.dir}/alone: .* or the result was moved without them; move the whole",
        err,
    )
    project.results.rename(moved)
    assert run(capsys, "lineage", str(moved / "report" / "tables" / "accuracy.csv")) == (0, tree, "")
    assert "no file has this path either, so name a moved one by its new path" in refusal(
        capsys, "lineage", str(table), *options
    )


def test_an_accepted_exception_is_part_of_the_lineage(project: Project) -> None:
    fingerprint = project.manifest(FREE)["fingerprint"]
    acceptance = Acceptance(fingerprint, "1" * 64, "2" * 64, "3" * 64, ("solver (solve)",), "2026-11-21", "no matter")
    write_json(project.results / FREE / ACCEPTED, acceptance)
    found = trace(project.results / IMPLICIT)
    said = "accepted 2026-11-21 with other code (222222222222 -> 333333333333; solver (solve)): no matter"
    assert said in text_of(found)
    accepted = [(job["job"], job["accepted"].why) for job in as_json(found)["runs"] if job["accepted"]]
    assert accepted == [(FREE, "no matter")]


def test_what_was_made_from_a_result_is_found_down_to_the_report(built: Project) -> None:
    unrolled = trace(built.results / "train/implicit-s0/unrolled", is_forward=True)
    assert {item.key for item in unrolled.runs.values()} == {"train/implicit-s0/unrolled", FREE, IMPLICIT, "report"}
    assert unrolled.missing() == []
    text = text_of(unrolled)
    assert text.index("train/implicit-s0/unrolled") < text.index(FREE) < text.index(IMPLICIT)
    everything = trace(built.results / "data/s3-train", is_forward=True)
    assert {item.key for item in everything.runs.values()} == ALL - set(TEST_SETS)
    assert trace(built.results / "report", is_forward=True).runs.keys() == {built.manifest("report")["fingerprint"]}


def test_a_run_of_mlflow_has_the_lineage_of_its_job_whatever_its_experiment(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    own, unfinished = "a" * 32, "c" * 32
    write_json(work_of(project, FREE) / "mlflow.json", {"run_id": own})
    write_json(project.results / FREE / "work" / "other" / "mlflow.json", {"run_id": unfinished})
    folder = str(project.results.parent)
    assert FREE in output(capsys, "lineage", own, "--results", folder).splitlines()[0]
    assert IMPLICIT in output(capsys, "lineage", own, "--forward", "--results", folder)
    assert "which has not finished" in refusal(capsys, "lineage", unfinished, "--results", folder)
    assert f"{'d' * 32}: no job below {folder} is this run of MLflow" in refusal(
        capsys, "lineage", "d" * 32, "--results", folder
    )


def test_what_no_job_recorded_has_no_lineage(project: Project) -> None:
    with pytest.raises(NoLineage, match="did not record this file"):
        trace(project.results / FREE / "job.log")
    with pytest.raises(NoLineage, match="is in no run directory"):
        trace(project.config)
    (project.results / FREE / "manifest.json").write_text("{}")
    with pytest.raises(ManifestError, match="expected format"):
        trace(project.results / FREE)


def test_the_command_takes_a_job_or_a_path(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    options = where(ExperimentFile(project.config))
    found = json.loads(output(capsys, "lineage", IMPLICIT, *options, "--json", "--verify"))
    assert {item["job"] for item in found["runs"]} == BEHIND
    path = work_of(project, IMPLICIT) / "metrics.json"
    path.write_text("")
    assert f"broken {path}" in output(capsys, "lineage", str(path), "--verify", code=1)
    assert "did you mean" in refusal(capsys, "lineage", "train/implicit-s0/fre", *options)
