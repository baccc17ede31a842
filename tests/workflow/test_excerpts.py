"""Figures and tables by themselves, and experiments by name, through Snakemake."""

import shutil

import pytest

from tests.workflow.tiny_project import Project

EXCERPTS = """
excerpts:
  figure_3:
    title: "Figure 3"
    figures: [accuracy-by-length]
    tables: [accuracy]
    from: [{runs: [implicit], evaluations: [word-problem]}]
"""


def test_a_figure_is_made_by_its_name_and_from_its_own_jobs(project: Project) -> None:
    project.append(project.config, EXCERPTS)
    assert project.planned("figure_3") == {"excerpt/figure_3"}
    project.snakemake("figure_3")
    made = project.manifest("excerpt/figure_3")
    assert made["identity"]["config"]["figures"] == ["accuracy-by-length"]
    assert made["summary"]["num_inputs"] == 3  # two phases and an evaluation
    project.edit(project.config, "batch_size: 8", "batch_size: 4")
    implicit = {"train/implicit-s0/unrolled", "train/implicit-s0/free", "evaluate/implicit-s0/free/word-problem"}
    assert project.planned("figure_3") == {*implicit, "excerpt/figure_3"}  # nothing of the explicit run


def test_the_paper_is_the_experiment_of_a_call_without_a_config_file(project: Project) -> None:
    paper = project.config.read_text().replace("name: tiny", "name: paper")
    (project.dir / "workflow" / "config" / "paper.yaml").write_text(paper)
    said = project.command("snakemake", "--dry-run", "--profile", "profiles/local", "paper", "--cores", "1")
    assert "results/paper/report/manifest.json" in said


@pytest.mark.slow
def test_a_job_in_a_process_of_its_own_reads_the_default_configuration_too(project: Project) -> None:
    config = project.dir / "workflow" / "config" / "paper.yaml"
    shutil.copy(project.config, config)
    shutil.copytree(project.dir / "curricula", config.parent / "curricula", dirs_exist_ok=True)
    target = "results/tiny/data/s3-train/manifest.json"
    (project.dir / target).unlink()
    project.command("snakemake", "--executor", "submitit", "--submitit-cluster", "local", "--jobs", "1", target)
    assert (project.dir / target).is_file()
