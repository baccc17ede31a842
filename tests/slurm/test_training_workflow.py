"""The workflow itself on a Slurm, with the cluster profile of a test site: from the data to the report."""

from pathlib import Path

import pytest

from slurm_cluster import SlurmCluster
from tests.workflow.tiny_project import Project, edit_site, make_real_project

# No GPUs: the fake ones of the test are no more than a device file.
SITE = """\
  classes:
    v100: {partition: v100, constraint: v100, venv: "", gpus: 0, cpus: 2, mem_gb: 4, setup: ""}
    mi300x: {partition: mi300x, constraint: "", venv: "", gpus: 0, cpus: 2, mem_gb: 4, setup: "export A=1"}
  other_jobs: {partition: h100}
  account: ""
  rules:
    train_word_problem:
      {class: mi300x, nodes: "2 if 'implicit-' in wildcards.run else 1", mem_mb: 3000, runtime: 20, threads: 2}
    evaluate_word_problem: {class: v100, mem_mb: 3000, runtime: 20, threads: 2}
"""


class OnSlurm(Project):
    """A project whose Snakemake submits to a Slurm."""

    @property
    def driver(self) -> list[str]:
        return ["snakemake", "--profile", "profiles/cluster", "--configfile", self.config.name]


@pytest.mark.timeout(3000)
@pytest.mark.slow
def test_the_whole_graph_runs_on_slurm_and_a_second_start_has_nothing_to_do(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    real = make_real_project(tmp_path)
    project = OnSlurm(real.dir, real.library, variables={"SLURM_CONF": str(slurm.conf), "OMP_NUM_THREADS": "1"})
    edit_site(project.dir / "profiles" / "cluster" / "config.yaml", SITE)
    before = len(slurm.states())
    output = project.snakemake("--jobs", "3", "--latency-wait", "10", "--submitit-poll-interval-s", "2")
    assert project.manifest("report")["stage"] == "report"
    assert (project.results / ".preflight" / "mi300x.json").is_file()
    assert "on 2 cpu" in (project.results / "train/implicit-s0/free/job.log").read_text()
    assert "on 1 cpu" in (project.results / "train/explicit-s0/explicit/job.log").read_text()
    assert len(slurm.states()) > before, output
    submitted = len(slurm.states())
    assert "Nothing to be done" in project.snakemake()
    assert len(slurm.states()) == submitted
