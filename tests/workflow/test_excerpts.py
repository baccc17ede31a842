"""Figures and tables by themselves, and experiments by name, through Snakemake."""

from __future__ import annotations

import json
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
IMPLICIT = {"train/implicit-s0/free", "evaluate/implicit-s0/free/word-problem"}


def with_excerpts(project: Project) -> Project:
    project.config.write_text(project.config.read_text() + EXCERPTS)
    return project


def test_a_figure_is_made_by_its_name_and_from_its_own_jobs(project: Project) -> None:
    with_excerpts(project)
    assert project.planned("figure_3") == {"excerpt/figure_3"}
    project.snakemake("figure_3")
    made = json.loads((project.results / "excerpt" / "figure_3" / "manifest.json").read_text())
    assert made["identity"]["config"]["figures"] == ["accuracy-by-length"]
    assert made["summary"]["num_inputs"] == 3  # two phases and an evaluation
    project.edit(project.config, "batch_size: 8", "batch_size: 4")
    both = {"train/implicit-s0/unrolled", *IMPLICIT, "excerpt/figure_3"}
    assert project.planned("figure_3") == both  # nothing of the explicit run


def test_the_paper_is_the_experiment_of_a_call_without_a_config_file(project: Project) -> None:
    shutil.copy(project.config, project.dir / "workflow" / "config" / "paper.yaml")
    project.edit(project.dir / "workflow" / "config" / "paper.yaml", "name: tiny", "name: paper")
    said = project.command("snakemake", "--dry-run", "--profile", "profiles/local", "paper", "--cores", "1")
    assert "results/paper/report/manifest.json" in said


@pytest.mark.slow
def test_a_job_in_a_process_of_its_own_reads_the_default_configuration_too(project: Project) -> None:
    config = project.dir / "workflow" / "config" / "paper.yaml"
    shutil.copy(project.config, config)
    shutil.copytree(project.dir / "curricula", config.parent / "curricula", dirs_exist_ok=True)
    manifest = project.results / "data" / "s3-train" / "manifest.json"
    manifest.unlink()
    target = manifest.relative_to(project.dir).as_posix()
    project.command("snakemake", "--executor", "submitit", "--submitit-cluster", "local", "--jobs", "1", target)
    assert manifest.is_file()
