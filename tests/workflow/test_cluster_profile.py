"""What `snakemake --profile profiles/cluster` makes of an experiment."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.workflow.tiny_project import LIBRARY, NOTHING, ROOT, Project, edit_site, make_project

SITE = """\
  classes:
    big: {partition: gpu, constraint: "a100&nvlink", venv: envs/big, gpus: 4, cpus: 64, mem_gb: 400, setup: "module load cuda"}
    small: {partition: old, constraint: "", venv: "", gpus: 0, cpus: 8, mem_gb: 16, setup: ""}
  other_jobs: {partition: cpus}
  account: project7
  rules:
    train_word_problem: {class: big, gpus: 2, nodes: "2 if 'implicit' in wildcards.run else 1", runtime: 77}
    evaluate_word_problem: {class: small, mem_mb: 3000, threads: 3}
"""  # noqa: E501


def dry_run(project: Project, *options: str) -> str:
    driver = ["snakemake", "--profile", "profiles/cluster", "--configfile", project.config.name]
    return project.command(*driver, "--dry-run", "--cores", "64", *options)  # as many threads as a rule wants are shown


def resources_of(output: str, rule: str) -> set[str]:
    """Different lines of resources of the rule's jobs."""
    blocks = re.findall(rf"^(?:local)?rule {rule}:\n((?:    .*\n)+)", output, re.MULTILINE)
    return {line.strip() for block in blocks for line in block.splitlines() if line.strip().startswith("resources:")}


def test_another_profile_and_a_missing_preflight_rerun_nothing(project: Project) -> None:
    assert NOTHING in dry_run(project)


def test_a_first_preflight_for_a_stale_job_reruns_no_fresh_one(project: Project) -> None:
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    output = dry_run(project)
    assert resources_of(output, "preflight")
    jobs = set(re.findall(rf"output: results/{project.name}/(\S+)/manifest\.json", output))
    assert jobs == {"train/implicit-s0/free", "evaluate/implicit-s0/free/word-problem", "report"}


def test_a_site_gives_each_rule_its_class_in_one_block(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    edit_site(project.dir / "profiles" / "cluster" / "config.yaml", SITE)
    output = dry_run(project)
    training = resources_of(output, "train_word_problem")
    assert len(training) == 2
    where = ["slurm_partition=gpu", "constraint=a100&nvlink", "venv=envs/big", "setup=module load cuda"]
    size = ["gpus=2", "processes_per_node=2", "mem_mb=200000", "device=cuda", "runtime=77"]
    assert [item for line in training for item in where + size if item not in line] == []
    assert sorted(re.search(r"nodes=(\d)", line)[1] for line in training) == ["1", "2"]
    assert output.count("threads: 32") == 3
    (evaluation,) = resources_of(output, "evaluate_word_problem")
    assert [item for item in ("slurm_partition=old", "mem_mb=3000", "device=cpu") if item not in evaluation] == []
    assert "gpus=" not in evaluation
    checks = resources_of(output, "preflight")
    assert {re.search(r"slurm_partition=(\w+)", line)[1] for line in checks} == {"gpu", "old"}
    assert all("slurm_partition" not in line for line in resources_of(output, "data_set"))


@pytest.mark.parametrize("config", ["demo", pytest.param("paper", marks=pytest.mark.slow)])
def test_the_profile_as_it_is_plans_the_experiments_by_its_name(tmp_path: Path, config: str) -> None:
    home = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    linked = make_profiles(tmp_path)
    assert linked.returncode == 0, linked.stderr
    assert f"{tmp_path}/snakemake/cluster -> {ROOT}/profiles/cluster" in linked.stdout
    words = ("snakemake", "--profile", "cluster", "-n", "--forceall", "--configfile", f"workflow/config/{config}.yaml")
    output = Project(ROOT, LIBRARY, variables=home).command(*words)
    assert all("hardware=v100" in line for line in resources_of(output, "train_word_problem"))
    if config == "paper":
        pretraining = resources_of(output, "train_language_model")
        assert all("gpus=8" in line and "hardware=mi300x" in line for line in pretraining)
        assert {re.search(r"nodes=(\d)", line)[1] for line in pretraining} == {"1", "2", "4"}
        assert len(resources_of(output, "preflight")) == 3


def test_a_folder_where_the_link_should_be_is_left_alone(tmp_path: Path) -> None:
    there = tmp_path / "snakemake" / "cluster"
    there.mkdir(parents=True)
    done = make_profiles(tmp_path)
    assert (done.returncode, f"{there} is there and no link; move it away" in done.stderr) == (2, True)
    assert not there.is_symlink()


def make_profiles(home: Path) -> subprocess.CompletedProcess[str]:
    command, environment = ["make", "--no-print-directory", "profiles"], {**os.environ, "XDG_CONFIG_HOME": str(home)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
