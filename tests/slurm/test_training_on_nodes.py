"""Training over several nodes of a real Slurm, with gloo, and the workflow on it, from the data to the report."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_workflow.planning.code_digest import job_code, job_digest
from slurm_cluster import SlurmCluster
from tests.limits import wait_until
from tests.pages import ROOT
from tests.unit.training.small_runs import CONFIGS, FEW_STEPS, artifacts, logged, make_data, request, train, work_of
from tests.unit.training.test_distributed import check_same_training
from tests.workflow.tiny_project import ALL, Project, edit_site, make_project, make_real_project

DEADLINE_S = 400
TWO_BY_TWO = ("--nodes", "2", "--processes-per-node", "2")
TWO_BY_ONE = ("--nodes", "2", "--processes-per-node", "1")


@dataclass
class TrainingJob:
    """A job of the command line as submitit starts it: one process on the first node.

    `nodes` of the allocation; `options` of `implicit-llm train`.
    """

    slurm: SlurmCluster
    run_dir: Path
    config: dict[str, Any]
    data: Path
    options: tuple[str, ...] = ()
    nodes: int = 2
    job_id: str = ""

    @property
    def folder(self) -> Path:
        return self.run_dir.parent

    @property
    def status(self) -> dict[str, Any]:
        """What the executor is told."""
        path = self.folder / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def output(self) -> str:
        path = self.folder / f"{self.job_id}.out"
        return path.read_text() if path.exists() else ""

    def submit(self) -> TrainingJob:
        self.folder.mkdir(parents=True, exist_ok=True)
        identity, code = self.folder / "identity.json", job_digest(job_code("train", self.config, self.config["model"]))
        wanted = request(self.run_dir, self.config, self.data).identity
        identity.write_text(replace(wanted, code=code).to_json({"data": str(self.data)}))
        program = [str(Path(sys.executable).with_name("implicit-llm")), "train", "--run-dir", str(self.run_dir)]
        program += ["--identity", f"@{identity}", "--device", "cpu"]
        program += ["--log-every-steps", "1", "--progress", "log", "--threads", "2", *self.options]
        program += ["--log", str(self.folder / "job.log")]
        step = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpus-per-task=2"]
        command = ["sbatch", "--parsable", f"--nodes={self.nodes}", "--ntasks-per-node=1", "--cpus-per-task=2"]
        command += ["--mem=6000", "--time=10", "--signal=USR2@60", "--partition=mi300x", "--no-requeue"]
        command += [f"--output={self.folder}/%j.out", "--open-mode=append"]
        environment = self.slurm.env | {
            "OMP_NUM_THREADS": "1",
            "MLFLOW_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "workflow" / "lib")]),
            "SUBMITIT_JOB_STATUS": str(self.folder / "status.json"),
        }
        script = f"#!/bin/bash\nexec {shlex.join([*step, *program])}\n"
        self.job_id = subprocess.run(
            command, input=script, env=environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
        return self

    def signal(self, name: str) -> None:
        """To every step of the job, as Slurm does before its time limit and before a preemption."""
        self.slurm.run("scancel", f"--signal={name}", self.job_id)

    def end(self) -> int:
        """Exit code, once the job is over."""
        return int(wait_until(self._row, DEADLINE_S).partition(":")[0])

    def _row(self) -> str:
        rows = self.slurm.run("sacct", "-X", "-n", "-P", "-j", self.job_id, "-o", "State,ExitCode").split("\n")
        state, _, code = rows[0].partition("|")
        return code if state and state.split()[0] not in ("PENDING", "RUNNING", "REQUEUED") else ""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "demo")


def test_an_allocation_that_is_not_the_one_asked_for_ends_the_job_with_the_variables_of_slurm(
    slurm: SlurmCluster, tmp_path: Path, data: Path
) -> None:
    job = TrainingJob(slurm, tmp_path / "a" / "only", CONFIGS["explicit"], data, TWO_BY_TWO, nodes=1).submit()
    assert job.end() == 2, job.output
    assert job.status["failure_class"] == "env"
    assert "--nodes 2: there are 1 here" in job.output
    assert f"SLURM_JOB_ID={job.job_id} SLURM_JOB_NUM_NODES=1" in job.output


@pytest.mark.slow
def test_two_nodes_with_two_processes_each_give_the_loss_curve_of_one_process(
    slurm: SlurmCluster, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, alone = tmp_path / "together" / "only", tmp_path / "alone" / "only"
    job = TrainingJob(slurm, together, CONFIGS["implicit"], data, TWO_BY_TWO).submit()
    monkeypatch.setitem(sys.modules, "mlflow", None)
    train(alone, CONFIGS["implicit"], data)
    assert job.end() == 0, job.output
    assert "in 1 micro-batch(es) on 4 cpu" in job.output
    assert len(logged(alone)) == FEW_STEPS
    check_same_training(together, alone)
    assert list(together.glob(".launch*")) == []


@pytest.mark.slow
def test_a_preempted_job_on_two_nodes_goes_on_and_ends_bit_for_bit_as_an_undisturbed_one(
    slurm: SlurmCluster, tmp_path: Path, data: Path
) -> None:
    stopped, undisturbed = tmp_path / "stopped" / "only", tmp_path / "undisturbed" / "only"
    config = {**CONFIGS["explicit"], "total_steps": 400, "phase": {**CONFIGS["explicit"]["phase"], "end_step": 400}}
    options = (*TWO_BY_ONE, "--save-steps", "1")
    first = TrainingJob(slurm, stopped, config, data, options).submit()
    wait_until(lambda: first.status.get("progress", 0) >= 2, DEADLINE_S)
    first.signal("USR2")
    assert first.end() == 75, first.output
    assert first.output.count("SIGUSR2 received") == 2  # each of the two processes hears it once
    assert first.status["failure_class"] == "preempted"
    assert 2 <= first.status["progress"] < 400
    (newest,) = sorted(path.name for path in (work_of(stopped) / "checkpoints").iterdir())[-1:]
    assert newest == f"step-{first.status['progress']:08}"

    second = TrainingJob(slurm, stopped, config, data, TWO_BY_ONE).submit()
    assert second.end() == 0, second.output
    whole = TrainingJob(slurm, undisturbed, config, data, TWO_BY_ONE).submit()
    assert whole.end() == 0, whole.output
    assert artifacts(stopped) == artifacts(undisturbed)
    assert logged(stopped) == logged(undisturbed)


@pytest.mark.slow
def test_one_killed_process_ends_the_job_on_both_nodes(slurm: SlurmCluster, tmp_path: Path, data: Path) -> None:
    config = {**CONFIGS["explicit"], "total_steps": 5000, "phase": {**CONFIGS["explicit"]["phase"], "end_step": 5000}}
    job = TrainingJob(slurm, tmp_path / "a" / "only", config, data, (*TWO_BY_ONE, "--save-steps", "1")).submit()
    wait_until(lambda: job.status.get("progress", 0) >= 2, DEADLINE_S)
    (folder,) = job.run_dir.glob(".launch-*")
    (process,) = folder.glob("ready-1-*")
    os.kill(int(process.read_text()), signal.SIGKILL)
    assert job.end() != 0, job.output
    assert f"Exited with exit code {128 + signal.SIGKILL}" in job.output  # sacct shows the signal's number alone
    assert job.status["failure_class"] == "node_fail"
    assert job.status["progress"] >= 2


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


def on_slurm(project: Project, slurm: SlurmCluster, **variables: str) -> Project:
    """The project with a Snakemake that submits to a Slurm."""
    return replace(project, profile="profiles/cluster", variables={"SLURM_CONF": str(slurm.conf), **variables})


@pytest.mark.timeout(3000)
@pytest.mark.slow
def test_the_whole_graph_runs_on_slurm_and_a_second_start_has_nothing_to_do(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    project = on_slurm(make_real_project(tmp_path), slurm, OMP_NUM_THREADS="1")
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


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_a_job_that_dies_after_its_commit_is_not_computed_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    project, job = on_slurm(make_project(tmp_path), slurm), "data/s3-train"
    edit_site(project.dir / "profiles" / "cluster" / "config.yaml", SITE)
    options = ("--jobs", "3", "--latency-wait", "10", "--submitit-poll-interval-s", "2")
    words = (*options, "--", f"results/tiny/{job}/manifest.json")
    faulty = replace(project, variables={**project.variables, "IMPLICIT_LLM_FAULT": "publish.before_manifest:kill9"})
    faulty.snakemake(*words, code=1)
    assert not (project.results / job / "manifest.json").exists()
    assert project.starts(job) == 1
    project.snakemake(*words)
    assert project.manifest(job)["stage"] == "data"
    assert project.starts(job) == 1


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_the_worked_site_of_the_page_runs_on_four_a100s_and_a_killed_driver_is_taken_up(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    project = on_slurm(make_project(tmp_path), slurm)
    page = (ROOT / "docs" / "your-cluster.md").read_text(encoding="utf-8")
    block = page.partition("```yaml\n__variables__:\n")[2].partition("```")[0]
    edit_site(project.dir / "profiles" / "cluster" / "config.yaml", block)
    (project.results / ".preflight").mkdir(parents=True)
    (project.results / ".preflight" / "a100.json").write_text("{}")  # which no pretended GPU passes
    options = ("--latency-wait", "10", "--submitit-poll-interval-s", "2")
    before = slurm.states().keys()
    with project.held(*options):
        pass  # it has reached its first training; leaving kills the driver
    project.release()
    project.snakemake(*options)
    assert project.manifest("report")["stage"] == "report"
    assert {key: project.starts(key) for key in ALL} == dict.fromkeys(ALL, 1)
    rows = slurm.run("sacct", "-X", "-n", "-P", "-o", "JobID,Partition,AllocTRES,JobName").splitlines()
    mine = [row for row in rows if row.partition("|")[0] not in before]
    assert all("|a100|" in row for row in mine)
    assert {"gres/gpu=1" in row for row in mine if "train_" in row or "evaluate_" in row} == {True}
    assert "Nothing to be done" in project.snakemake("-n")
