"""After a change exactly what depends on it runs again, as Snakemake sees it and as `implicit-llm explain` says.

tests/unit/workflow/planning/test_graph.py has the cases of changed configurations.
"""

import json
import os
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.workflow.experiments import TEST_SETS
from tests.workflow.tiny_project import ALL, EVALUATED, NOTHING, Project

EXPERIMENT = ("--config", "tiny.yaml")
FREE = {"train/implicit-s0/free", "evaluate/implicit-s0/free/word-problem", "report"}
TRAINED = ALL - {"data/s3-train", *TEST_SETS}
EXPLICIT = {"train/explicit-s0/explicit", "evaluate/explicit-s0/explicit/word-problem", "report"}
IMPLICIT_EVALUATION = "evaluate/implicit-s0/free/word-problem"
EXPLICIT_PHASE = "train/explicit-s0/explicit"


def explained(project: Project, *arguments: str) -> dict[str, dict[str, Any]]:
    """What `explain` says of the jobs that run."""
    values = json.loads(project.command("implicit-llm", "explain", *arguments, *EXPERIMENT, "--json"))
    running = {job["job"]: job for job in values["jobs"] if job["runs"]}
    assert values["total"]["jobs"] == len(running)
    return running


def test_a_changed_setting_is_no_forced_execution_for_snakemake_and_leaves_the_explicit_model_alone(
    project: Project,
) -> None:
    project.edit(project.config, "eval_block_len: 4", "eval_block_len: 8")
    assert project.planned() == {IMPLICIT_EVALUATION, "report"}
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    output = project.snakemake()
    assert "train/implicit-s0/free" in output
    assert not re.search("forced", output, re.IGNORECASE)


def accept_edited_model(project: Project) -> None:
    project.edit(project.library / "models" / "stack.py", "tol / 2", "tol / 3")
    project.command("implicit-llm", "accept", "train/*", "--why", "half or a third", *EXPERIMENT)


@pytest.mark.parametrize(
    ("module", "jobs"),
    [
        ("implicit_llm_data/stages/word_problem.py", ALL),
        ("implicit_llm/models/llama3/model.py", set()),  # of a family that the experiment does not have
        ("implicit_llm/solver/fixed_point.py", {"train/implicit-s0/unrolled", *FREE}),
    ],
)
def test_changed_code_reruns_the_jobs_that_can_run_it_and_what_follows(
    project: Project, module: str, jobs: set[str]
) -> None:
    project.append(project.library.parent / module, "\nANOTHER = 1\n")
    assert project.planned() == jobs


def test_what_is_explained_is_what_snakemake_runs(project: Project) -> None:
    project.edit(project.library / "models" / "stack.py", "tol / 2", "tol / 3")
    jobs = explained(project)
    assert jobs.keys() == project.planned() == TRAINED
    free = jobs["train/implicit-s0/free"]
    assert free["code"]["files"] == ["implicit_llm.models.stack (solve)"]
    assert free["difference"]["changed_inputs"] == ["train/implicit-s0/unrolled"]
    assert (free["cost"]["unit"], free["cost"]["basis"], free["cost"]["hours"] > 0) == ("cpu", "as last time", True)
    text = project.command("implicit-llm", "explain", *EXPERIMENT)
    assert "implicit_llm.models.stack (solve)" in text
    assert f"{len(TRAINED)} of 9 jobs will run" in text


def test_comments_plumbing_machine_facts_and_touched_or_copied_files_rerun_nothing(
    project: Project, tmp_path: Path
) -> None:
    project.edit(project.library / "models" / "stack.py", "# a comment", "# another")
    project.edit(project.library / "models" / "stack.py", "Half of it.", "A half.")
    (project.dir / "README.md").write_text("Another page.\n")
    jobs = project.dir / "workflow" / "lib" / "implicit_llm_jobs"
    project.append(jobs / "tracking" / "mlflow_writer.py", "\nANOTHER = 1\n")
    project.edit(project.config, "name: tiny", "name: tiny\ndescription: another one")
    machine = ("--set-threads", "train_word_problem=2", "--set-resources", "train_word_problem:device=cuda")
    assert NOTHING in project.snakemake(*machine)
    for path in sorted(project.dir.rglob("*"), reverse=True):  # as a checkout there and back does
        os.utime(path)
    assert NOTHING in project.snakemake()
    shutil.rmtree(project.dir / ".snakemake")
    assert NOTHING in project.copy_to(tmp_path / "again", keeps_times=False).snakemake()


def test_results_from_the_future_stop_no_job_that_reads_them(project: Project) -> None:
    future = time.time() + 86400
    for path in sorted(project.results.rglob("*"), reverse=True):
        os.utime(path, (future, future))
    assert NOTHING in project.snakemake()
    shutil.rmtree(project.results / "train" / "explicit-s0")
    project.snakemake()
    assert NOTHING in project.snakemake()


def test_a_deleted_snakemake_folder_hides_no_change(project: Project) -> None:
    shutil.rmtree(project.dir / ".snakemake")
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    assert project.planned() == FREE
    assert "(config: phase.solver.tol 0.1 -> 0.2)" in project.snakemake()
    shutil.rmtree(project.dir / ".snakemake")
    assert NOTHING in project.snakemake()


def shown(project: Project, keys: set[str] = FREE) -> dict[str, str]:
    """What people find under the readable names: manifests, logs, page, figures and tables, and the trained models."""
    texts = {path: path.read_text() for key in keys for path in (project.results / key).rglob("*") if path.is_file()}
    names = {path: str(path.relative_to(project.results)) for path in texts if path.name != "accepted.json"}
    found = {name: texts[path] for path, name in names.items() if "work" not in path.parts}
    for key in keys:
        for record in project.manifest(key)["files"]:
            found[f"{key} {Path(record['path']).name}"] = (project.results / key / record["path"]).read_text()
    return found


def test_a_setting_that_is_changed_and_changed_back_shows_the_first_results_again_without_a_job(
    project: Project,
) -> None:
    before = shown(project)
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    project.snakemake()
    changed = shown(project)
    differing = {name for name in before if changed[name] != before[name]}
    assert differing > {f"{key}/{name}" for key in FREE for name in ("manifest.json", "job.log", "provenance.json")}
    project.edit(project.config, "tol: 0.2", "tol: 0.1")
    said = project.snakemake("--dry-run")
    assert NOTHING in said
    assert set(re.findall(r"results/tiny/([^,\s]+)", said)) == FREE, "it names what would move"
    assert shown(project) == changed, "a dry run changes nothing"
    assert NOTHING in project.snakemake()
    assert shown(project) == before


def test_accepted_and_revoked_results_are_shown_in_turn(project: Project) -> None:
    stack = project.library / "models" / "stack.py"
    first = shown(project, TRAINED)
    project.edit(stack, "tol / 2", "tol / 3")
    project.snakemake()
    second = shown(project, TRAINED)
    project.edit(stack, "tol / 3", "tol / 4")
    project.command("implicit-llm", "accept", "train/*", "--why", "a third or a quarter", *EXPERIMENT)
    for code, results in (("tol / 4", second), ("tol / 2", first), ("tol / 4", second)):
        stack.write_text(re.sub(r"tol / \d", code, stack.read_text()))
        assert NOTHING in project.snakemake()
        assert shown(project, TRAINED) == results
    project.command("implicit-llm", "accept", "--revoke", "train/*", *EXPERIMENT)
    assert explained(project).keys() == project.planned() == TRAINED
    stack.write_text(re.sub(r"tol / \d", "tol / 3", stack.read_text()))
    assert NOTHING in project.snakemake()
    assert shown(project, TRAINED) == second


def summarised(project: Project) -> set[str]:
    """Jobs that `snakemake --summary` calls pending."""
    rows = [line.split("\t") for line in project.snakemake("--summary").splitlines() if line.startswith("results/")]
    return {row[0].removeprefix("results/tiny/").partition("/work/")[0] for row in rows if "update pending" in row}


@pytest.mark.parametrize("change", ["nothing", "setting", "code", "comment", "lost folder", "lost manifest", "force"])
def test_a_dry_run_the_summary_and_explain_name_the_same_jobs(project: Project, change: str) -> None:
    data = project.results / "data" / "s3-train"
    expected: set[str] = set()
    match change:
        case "setting":
            project.edit(project.config, "tol: 0.1", "tol: 0.2")
            expected = FREE
        case "code":
            project.edit(project.library / "models" / "stack.py", "tol / 2", "tol / 3")
            expected = TRAINED
        case "comment":
            project.edit(project.library / "models" / "stack.py", "# a comment", "# another")
        case "lost folder":
            shutil.rmtree(data)
            expected = {"data/s3-train"}
        case "lost manifest":
            (data / "manifest.json").unlink()
            expected = {"data/s3-train"}
        case "force":
            project.snakemake("-f", project.declared(EXPLICIT_PHASE))
            expected = EXPLICIT - {EXPLICIT_PHASE}
    shutil.rmtree(project.dir / ".snakemake")
    assert explained(project).keys() == project.planned() == summarised(project) == expected
    states = json.loads(project.command("implicit-llm", "status", *EXPERIMENT, "--json"))["jobs"]
    assert {job["job"] for job in states if job["state"] != "done"} == expected


@pytest.mark.parametrize("name", ["manifest.json", "index.html"])
def test_a_readable_path_is_a_target_and_means_the_result_that_is_wanted(project: Project, name: str) -> None:
    path = f"results/tiny/report/{name}"
    assert project.planned(path) == set()
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    assert project.planned(path) == FREE
    old = project.declared(EXPLICIT_PHASE).replace("/work/", "/work/0", 1)
    assert "no target of tiny.yaml" in project.snakemake("--dry-run", old, code=2)
    assert "no target of tiny.yaml" in project.snakemake("--dry-run", project.declared("report"), code=2)


def test_a_missing_result_below_a_fresh_report_comes_back_and_nothing_else_runs(project: Project) -> None:
    unrolled, damaged = "train/implicit-s0/unrolled", "train/explicit-s0/explicit"
    evaluated = "evaluate/explicit-s0/explicit/word-problem"
    shutil.rmtree(project.results / unrolled)
    (project.results / evaluated / "manifest.json").unlink()
    (project.results / damaged / "manifest.json").write_text("{")
    jobs = explained(project)
    assert jobs.keys() == project.planned("tiny") == {unrolled, evaluated}
    assert jobs[evaluated]["cost"]["basis"] == "done before, is taken up again"
    assert explained(project, unrolled).keys() == {unrolled}
    project.snakemake()
    assert "already done" in (project.results / evaluated / "job.log").read_text()
    assert project.manifest(damaged)["name"] == "explicit-s0/explicit"
    assert (project.results / unrolled / "manifest.json").is_file()
    assert NOTHING in project.snakemake()


def test_freed_files_are_made_again_when_a_job_needs_them(project: Project) -> None:
    unrolled = "train/implicit-s0/unrolled"
    (work,) = (project.results / unrolled).glob("work/[0-9a-f]*")
    (work / "state").write_text("large")
    project.command("implicit-llm", "gc", "--payload", unrolled, *EXPERIMENT)
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    said = project.snakemake()
    assert f"stale: results/tiny/{unrolled} (its files were freed, and train/implicit-s0/free needs them)" in said
    assert not (work / "freed").exists()
    assert NOTHING in project.snakemake("--dry-run")


def test_a_deleted_checkpoint_is_missed_by_the_phase_that_starts_from_it(project: Project) -> None:
    (model,) = project.results.glob("train/implicit-s0/unrolled/work/*/model.json")
    content = model.read_bytes()
    model.unlink()
    assert NOTHING in project.snakemake("--dry-run")
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    assert project.planned() == FREE
    said = project.snakemake(code=1)
    (command,) = set(re.findall(r"type `(rm -f \S+manifest\.json)` and run the workflow again", said))
    project.command(*command.split())
    assert project.planned() == {"train/implicit-s0/unrolled", *FREE}
    project.snakemake()
    assert model.read_bytes() == content


def test_what_the_user_forces_is_computed_again_and_its_log_keeps_both(project: Project) -> None:
    assert project.planned("-R", "evaluate_word_problem") == {*EVALUATED, "report"}
    declared = project.declared(EXPLICIT_PHASE)
    assert project.planned("-R", declared) == EXPLICIT
    assert f"with -R, type the path in the work folder: {declared}" in project.snakemake(
        "-R", f"results/tiny/{EXPLICIT_PHASE}/manifest.json", code=2
    )
    assert not list(project.results.rglob("work/*/again"))
    before = journals(project)
    project.snakemake("-R", declared)
    assert {job for job, line in journals(project).items() if line != before[job]} == EXPLICIT
    assert not list(project.results.rglob("work/*.previous"))
    for job in EXPLICIT:
        text = (project.results / job / "job.log").read_text()
        assert (text.count("done, "), "to be computed again" in text) == (2, True), text
    assert NOTHING in project.snakemake()


def test_what_is_made_from_a_job_in_the_middle_follows_when_that_is_forced(project: Project) -> None:
    free = project.declared("train/implicit-s0/free")
    assert project.planned("-R", free) == FREE
    assert project.planned("-R", "train_word_problem") == TRAINED
    assert project.planned("-R", free, "--", project.declared(EXPLICIT_PHASE)) == {"train/implicit-s0/free"}
    assert project.planned("-F") == ALL
    before = journals(project)
    project.snakemake("-R", free)
    assert {job for job, line in journals(project).items() if line != before[job]} == FREE


def journals(project: Project) -> dict[str, str]:
    """The first line of each job's journal, which has the time."""
    paths = project.results.glob("**/work/*/journal.jsonl")
    return {str(path.parents[2].relative_to(project.results)): path.read_text().partition("\n")[0] for path in paths}


def test_what_is_made_from_a_forced_result_follows_in_the_next_run(project: Project) -> None:
    project.snakemake("-f", project.declared(EXPLICIT_PHASE))
    assert explained(project).keys() == project.planned() == EXPLICIT - {EXPLICIT_PHASE}
    assert "forced" in project.command("implicit-llm", "explain", *EXPERIMENT)
    project.snakemake()
    assert NOTHING in project.snakemake()


def test_touching_everything_asks_for_nothing(project: Project) -> None:
    project.snakemake("--touch", "-F")
    assert not list(project.results.rglob("work/*/again"))
    assert NOTHING in project.snakemake()


def test_what_an_interrupted_run_forced_costs_what_it_took_and_can_be_taken_back(project: Project) -> None:
    for job in EXPLICIT:
        declared = project.dir / project.declared(job)
        declared.with_name("again").touch()
        declared.unlink()
    jobs = explained(project)
    assert jobs.keys() == project.planned() == EXPLICIT
    assert jobs["train/explicit-s0/explicit"]["cost"]["basis"] == "as last time"
    (advice,) = re.findall(
        r"`(implicit-llm accept [^`]+ --forced)`", project.command("implicit-llm", "explain", *EXPERIMENT)
    )
    project.command(*shlex.split(advice))
    assert NOTHING in project.snakemake()
    assert "nothing was forced" in project.command(*shlex.split(advice), code=2)


def test_what_is_accepted_stays_and_can_be_built_upon_until_it_is_revoked(project: Project) -> None:
    accept_edited_model(project)
    assert NOTHING in project.snakemake()
    shutil.rmtree(project.dir / ".snakemake")
    assert NOTHING in project.snakemake()
    project.edit(project.config, "eval_block_len: 4", "eval_block_len: 8")
    assert project.planned() == {IMPLICIT_EVALUATION, "report"}
    project.snakemake()
    project.command("implicit-llm", "accept", "--revoke", "train/*", *EXPERIMENT)
    assert project.planned() == TRAINED


def test_forcing_an_accepted_job_says_how_to_revoke_that(project: Project) -> None:
    accept_edited_model(project)
    accepted, declared = project.manifest(EXPLICIT_PHASE), project.declared(EXPLICIT_PHASE)
    refused = project.snakemake(declared, "--forcerun", declared, code=2)
    (advice,) = re.findall(r"type `(implicit-llm accept [^`]+ --revoke)`", refused)
    assert project.manifest(EXPLICIT_PHASE) == accepted
    project.command(*shlex.split(advice))
    project.snakemake(f"results/tiny/{EXPLICIT_PHASE}/manifest.json")
    assert project.manifest(EXPLICIT_PHASE) != accepted
