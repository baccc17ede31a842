"""One workflow with what Snakemake has to offer, run by this plugin and by the official one on the same Slurm."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from slurm_cluster import SlurmCluster
from toy_project import write_shim

SNAKEFILE = """\
SMALL = range(config["small"])
GROUPS = range(config["groups"])
RESOURCES = dict(mem_mb=700, runtime=5)

rule all:
    default_target: True
    input: "result.txt"

rule small:
    output: temp("small/{i}.txt")
    threads: config.get("threads", 1)
    resources: **RESOURCES
    shell: "sleep 1; echo {wildcards.i} > {output}"

rule begin:
    output: temp("begun/{i}.txt")
    group: "pair"
    resources: **RESOURCES
    shell: "echo {wildcards.i} > {output}"

rule end:
    input: "begun/{i}.txt"
    output: "ended/{i}.txt"
    group: "pair"
    resources: **RESOURCES
    shell: "cp {input} {output}"

checkpoint split:
    output: directory("parts")
    resources: **RESOURCES
    shell: "mkdir {output}; for i in 1 2 3 4 5 6; do echo $i > {output}/$i.in; done"

rule part:
    input: "parts/{i}.in"
    output: "done/{i}.out"
    resources: **RESOURCES
    shell: "cp {input} {output}"

def parts(wildcards):
    folder = checkpoints.split.get().output[0]
    return expand("done/{i}.out", i=glob_wildcards(folder + "/{i}.in").i)

rule growing:
    output: "grown.txt"
    retries: 2
    resources: mem_mb=lambda wildcards, attempt: 500 + 200 * attempt, runtime=5
    shell: "echo {resources.mem_mb} >> asked; [ {resources.mem_mb} -ge 900 ] && touch {output}"

rule result:
    input: expand("small/{i}.txt", i=SMALL), expand("ended/{i}.txt", i=GROUPS), parts, "grown.txt"
    output: "result.txt"
    resources: **RESOURCES
    shell: "cat {input} | sort -n | tr '\\\\n' ' ' > {output}"
"""
PLUGINS = {
    "submitit": ("--executor", "submitit", "--submitit-poll-interval-s", "5"),
    "slurm": (*("--executor", "slurm", "--slurm-array-jobs", "small"), "--slurm-init-seconds-before-status-checks=2"),
}
COUNTED = ("sbatch", "srun", "squeue", "sacct")


class Counted:
    """A workflow with Slurm's programs counted; `calls` has the time of each call."""

    def __init__(self, path: Path, slurm: SlurmCluster) -> None:
        self.path, self.slurm = path, slurm
        path.mkdir()
        (path / "Snakefile").write_text(SNAKEFILE)
        for program in COUNTED:
            # the official plugin takes SLURM_CONF out of the environment of its jobs
            lines = [f"export SLURM_CONF={slurm.conf}", f"date +%s.%N >> {path}/calls-{program}", 'exec "$REAL" "$@"']
            write_shim(path / "shims", program, lines)

    def run(self, plugin: str, *options: str, jobs: int = 100, **config: int) -> None:
        env = dict(self.slurm.env)
        env["PATH"] = f"{self.path / 'shims'}:{Path(sys.executable).parent}:{env['PATH']}"
        command = [sys.executable, "-m", "snakemake", *PLUGINS[plugin], "--jobs", str(jobs), "--latency-wait", "5"]
        given = [f"{name}={value}" for name, value in config.items()]
        with open(self.path / "driver.log", "w") as log:
            subprocess.run(
                [*command, "--default-resources", "mem_mb=700", "--nolock", *options, "--config", *given],
                cwd=self.path, env=env, stdout=log, stderr=log, timeout=3600, check=False,
            )  # fmt: skip

    def said(self) -> str:
        return (self.path / "driver.log").read_text()

    def calls(self, program: str) -> list[float]:
        path = self.path / f"calls-{program}"
        return [float(line) for line in path.read_text().split()] if path.exists() else []


def check(project: Counted, small: int, groups: int) -> None:
    expected = sorted([*range(small), *range(groups), *range(1, 7)])
    assert (project.path / "result.txt").exists(), project.said()
    assert [int(word) for word in (project.path / "result.txt").read_text().split()] == expected
    assert not list((project.path / "small").glob("*.txt"))  # temp()
    assert not list((project.path / "begun").glob("*.txt"))
    assert len(list((project.path / "parts").glob("*.in"))) == 6


def test_arrays_groups_checkpoints_and_retries_run_with_few_questions(slurm: SlurmCluster, tmp_path: Path) -> None:
    project = Counted(tmp_path / "toy", slurm)
    project.run("submitit", small=4, groups=1)
    check(project, small=4, groups=1)
    assert (project.path / "asked").read_text().split() == ["700", "900"]
    assert project.calls("srun") == []
    assert len(project.calls("sbatch")) == 7  # small, pair, split, parts, growing twice, result
    assert project.calls("sacct") == []
    assert all(later - earlier > 4.9 for earlier, later in pairwise(project.calls("squeue")))


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_forty_jobs_run_with_either_plugin(slurm: SlurmCluster, tmp_path: Path, plugin: str) -> None:
    project = Counted(tmp_path / "toy", slurm)
    project.run(plugin, small=20, groups=5)
    check(project, small=20, groups=5)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_short_jobs_take_ten_submissions_and_a_question_in_thirty_seconds(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    project = Counted(tmp_path / "toy", slurm)
    options = ("--until", "small", "--submitit-poll-interval-s", "30")
    project.run("submitit", *options, jobs=1000, small=1000, groups=1, threads=4)  # four at a time
    assert project.said().count("Finished jobid") >= 1000, project.said()[-2000:]
    assert len(project.calls("sbatch")) <= 10
    assert project.calls("srun") == []
    assert project.calls("sacct") == []
    assert all(later - earlier > 29.9 for earlier, later in pairwise(project.calls("squeue")))
