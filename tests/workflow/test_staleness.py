"""After a change exactly what depends on it runs again, as Snakemake sees it; test_plan.py has the cases."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.unit.workflow.experiments import TEST_SETS
from tests.workflow.tiny_project import ALL, NOTHING, Project

FREE = {"train/implicit-s0/free", "evaluate/implicit-s0/free/word-problem", "report"}
TRAINED = ALL - {"data/s3-train", *TEST_SETS}


@pytest.mark.parametrize(
    ("module", "jobs"),
    [
        ("implicit_llm_data/stages/word_problem.py", ALL),
        ("implicit_llm/models/llama3.py", set()),  # of a family that the experiment does not have
        ("implicit_llm/solver/fixed_point.py", {"train/implicit-s0/unrolled", *FREE}),
    ],
)
def test_changed_code_reruns_the_jobs_that_can_run_it_and_what_follows(
    project: Project, module: str, jobs: set[str]
) -> None:
    project.append(project.library.parent / module, "\nANOTHER = 1\n")
    assert project.planned() == jobs


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


def test_a_deleted_snakemake_folder_hides_no_change(project: Project) -> None:
    shutil.rmtree(project.dir / ".snakemake")
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    assert project.planned() == FREE
    assert "(config: phase.solver.tol 0.1 -> 0.2)" in project.snakemake()
    project.edit(project.config, "tol: 0.2", "tol: 0.1")
    project.snakemake()
    for key in FREE:
        assert "already done" in (project.results / key / "job.log").read_text(), key
    assert NOTHING in project.snakemake()


def test_a_missing_result_below_a_fresh_report_comes_back_and_nothing_else_runs(project: Project) -> None:
    shutil.rmtree(project.results / "train/implicit-s0/unrolled")
    (project.results / "evaluate/explicit-s0/explicit/word-problem/manifest.json").unlink()
    (project.results / "train/explicit-s0/explicit/manifest.json").write_text("{")  # damaged
    missing = {"train/implicit-s0/unrolled", "evaluate/explicit-s0/explicit/word-problem"}
    assert project.planned("tiny") == {*missing, "train/explicit-s0/explicit"}
    project.snakemake()
    assert "already done" in (project.results / "train/explicit-s0/explicit/job.log").read_text()
    assert (project.results / "train/implicit-s0/unrolled/manifest.json").is_file()
    assert NOTHING in project.snakemake()


def test_freed_files_are_made_again_when_a_job_needs_them(project: Project) -> None:
    unrolled = "train/implicit-s0/unrolled"
    (work,) = (project.results / unrolled).glob("work/[0-9a-f]*")
    (work / "state").write_text("large")
    project.command("implicit-llm", "gc", "--payload", unrolled, "--config", "tiny.yaml")
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    said = project.snakemake()
    assert f"stale: results/tiny/{unrolled} (its files were freed, and train/implicit-s0/free needs them)" in said
    assert not (work / "freed.json").exists()
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
