"""After a change exactly what depends on it runs again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.workflow.tiny_project import NOTHING, Project

DATA = {"data/s3-train", "data/s3-test-L8-h0.5", "data/s3-test-L16-h0.5"}
FREE = {"train/implicit-s0/free", "evaluate/implicit-s0/word-problem", "report"}
IMPLICIT = {"train/implicit-s0/unrolled", *FREE}
EXPLICIT = {"train/explicit-s0/explicit", "evaluate/explicit-s0/word-problem", "report"}
EVALUATIONS = {"evaluate/implicit-s0/word-problem", "evaluate/explicit-s0/word-problem", "report"}


def test_a_change_of_the_free_phase_keeps_the_phase_before_it(project: Project) -> None:
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    assert project.planned() == FREE


def test_a_change_of_an_evaluation_keeps_the_training(project: Project) -> None:
    project.edit(project.config, "eval_block_len: 4", "eval_block_len: 8")
    assert project.planned() == EVALUATIONS


def test_a_change_of_the_recipe_keeps_the_data(project: Project) -> None:
    project.edit(project.config, "batch_size: 8", "batch_size: 4")
    assert project.planned() == IMPLICIT | EXPLICIT


def test_a_change_of_the_description_of_the_experiment_reruns_nothing(project: Project) -> None:
    project.edit(project.config, "name: tiny", "name: tiny\ndescription: another one")
    assert NOTHING in project.snakemake()


def test_a_new_test_set_is_made_and_evaluated(project: Project) -> None:
    project.edit(project.config, "lengths: [8, 16]", "lengths: [8, 16, 32]")
    assert project.planned() == {"data/s3-test-L32-h0.5", *EVALUATIONS}


def test_a_change_of_the_solver_reruns_the_training_but_not_the_data(project: Project) -> None:
    project.edit(project.library / "solver" / "fixed_point.py", "tol / 2", "tol / 3")
    assert project.planned() == IMPLICIT | EXPLICIT


def test_a_change_of_comments_and_docstrings_reruns_nothing(project: Project) -> None:
    project.edit(project.library / "solver" / "fixed_point.py", "# a comment", "# another")
    project.edit(project.library / "solver" / "fixed_point.py", "Half of it.", "A half.")
    assert NOTHING in project.snakemake()


def test_a_change_of_the_plumbing_reruns_nothing(project: Project) -> None:
    with open(project.library / "tracking" / "journal.py", "a") as file:
        file.write("\nANOTHER = 1\n")
    assert NOTHING in project.snakemake()


def test_threads_and_resources_rerun_nothing(project: Project) -> None:
    assert NOTHING in project.snakemake("--set-threads", "train_phase=2", "--set-resources", "train_phase:device=cuda")


def test_touching_every_file_reruns_nothing(project: Project) -> None:
    for path in sorted(project.results.rglob("*"), reverse=True):
        os.utime(path)
    assert NOTHING in project.snakemake()


def test_a_copy_without_file_times_and_without_snakemakes_records_reruns_nothing(
    project: Project, tmp_path: Path
) -> None:
    shutil.rmtree(project.dir / ".snakemake")
    copy = project.copy_to(tmp_path / "again", keeps_times=False)
    assert NOTHING in copy.snakemake()


def test_a_change_there_and_back_reruns_nothing(project: Project) -> None:
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    assert project.planned() == FREE
    project.edit(project.config, "tol: 0.2", "tol: 0.1")
    assert NOTHING in project.snakemake()


def test_a_deleted_snakemake_folder_hides_no_change(project: Project) -> None:
    shutil.rmtree(project.dir / ".snakemake")
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    assert project.planned() == FREE
    output = project.snakemake()
    assert "config: phase.solver.tol 0.1 -> 0.2" in output
    assert NOTHING in project.snakemake()


def test_a_damaged_manifest_is_made_again(project: Project) -> None:
    (project.results / "train/explicit-s0/explicit/manifest.json").write_text("{")
    assert project.planned() == {"train/explicit-s0/explicit"}
    project.snakemake()
    assert "already done" in (project.results / "train/explicit-s0/explicit/job.log").read_text()
    assert NOTHING in project.snakemake()


def test_a_target_runs_only_what_it_needs(project: Project) -> None:
    project.edit(project.config, "batch_size: 8", "batch_size: 4")
    assert project.planned("results/tiny/train/explicit-s0/explicit/manifest.json") == {"train/explicit-s0/explicit"}


def test_a_missing_result_that_nothing_needs_is_left_missing(project: Project) -> None:
    shutil.rmtree(project.results / "data" / "s3-train")
    assert NOTHING in project.snakemake()
    assert project.planned("data") == {"data/s3-train"}


@pytest.mark.parametrize("key", ["data/s3-train", "train/implicit-s0/unrolled"])
def test_a_missing_result_comes_back_when_it_is_needed(project: Project, key: str) -> None:
    shutil.rmtree(project.results / key)
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    project.snakemake()
    assert (project.results / key / "manifest.json").is_file()
    assert NOTHING in project.snakemake()
