"""Whole workflows: a toy project, and Snakemake's own tests for executor plugins."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import snakemake.common.tests as base

from slurm_cluster import SlurmCluster
from snakemake_executor_plugin_submitit import ExecutorSettings
from toy_project import ToyProject


def test_it_runs_on_this_machine(on_this_machine: ToyProject) -> None:
    on_this_machine.run(small=1)
    assert (on_this_machine.path / "result.txt").read_text().endswith("\n0\n")
    assert on_this_machine.steps() == [1, 2, 3, 4]
    assert (on_this_machine.path / "train.log").read_text() == "starting at step 0\n"
    assert (on_this_machine.path / ".snakemake" / "submitit").stat().st_mode & 0o777 == 0o700


def test_without_slurm_the_first_line_says_what_to_type(on_this_machine: ToyProject, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for program in ("bash", "which"):  # the official plugin calls `which` when Snakemake imports it
        (tmp_path / "bin" / program).symlink_to(f"/usr/bin/{program}")
    on_this_machine.path_variable = str(tmp_path / "bin")
    said = on_this_machine.run("--submitit-cluster", "slurm", code=1)
    assert "sbatch is not on PATH" in said
    assert "--submitit-cluster local" in said


def test_each_attempt_of_a_rule_is_a_submission_with_its_own_resources(on_this_machine: ToyProject) -> None:
    on_this_machine.run("grown.txt")
    assert (on_this_machine.path / "asked").read_text().split() == ["200", "400"]
    assert on_this_machine.record("growing")["number"] == 2


@pytest.mark.slow
def test_each_attempt_of_a_rule_is_a_slurm_job_with_its_own_request(on_slurm: ToyProject) -> None:
    before = set(on_slurm.cluster.states())
    on_slurm.run("grown.txt")
    jobs = sorted(set(on_slurm.cluster.states()) - before, key=int)
    expected = [f"{jobs[0]}|700M", f"{jobs[1]}|900M"]  # 500 MB are for the Snakemake within the job
    accounts = ("sacct", "-nPX", "-o", "JobID,ReqMem", "-j", ",".join(jobs))
    on_slurm.wait_until(lambda: on_slurm.cluster.run(*accounts).split() == expected)


@pytest.mark.slow
def test_a_local_job_is_taken_over_and_goes_on_after_its_time_limit(on_this_machine: ToyProject) -> None:
    project, config = on_this_machine, {"steps": 70, "pause": 1, "resources": {"mem_mb": 500, "runtime": 1}}
    project.start(**config)
    project.wait_until(lambda: len(project.steps()) > 2)
    project.kill_driver()
    said = project.run(**config)
    assert "taken over" in said
    assert "%s" not in said
    assert project.steps() == list(range(1, 71))
    assert len(project.starts()) == 2
    assert len((project.path / "train.log").read_text().splitlines()) == 2


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_of_a_local_job(on_this_machine: ToyProject) -> None:
    project = on_this_machine
    project.start(steps=500)
    project.wait_until(lambda: len(project.steps()) > 2)
    os.kill(project.drivers[-1].pid, signal.SIGINT)
    project.finish(code=1)
    (start,) = project.starts()
    state = subprocess.run(
        ["ps", "-o", "state=", "-p", str(start["pid"])], capture_output=True, text=True
    ).stdout.strip()
    assert state in ("", "Z")  # one that has ended keeps its entry until init takes notice


@pytest.mark.slow
@pytest.mark.parametrize("named", [{"slurm_partition": "v100,h100"}, {}])
def test_a_job_runs_in_the_partition_of_a_list_or_of_a_table_that_can_run_it(
    on_slurm: ToyProject, named: dict[str, str]
) -> None:
    resources = {"mem_mb": 500, "runtime": 5, "gpus": 1, "gpu_model": "h100", **named}
    (on_slurm.path / "table.yaml").write_text("partitions:\n  v100:\n  h100: {max_runtime: 0:10:00}\n")
    on_slurm.run("--submitit-partition-table", "table.yaml", resources=resources)
    assert [start["node"] for start in on_slurm.starts()] == ["h100n1"]


@pytest.mark.slow
def test_a_job_gets_its_environment_and_a_broken_one_has_its_class(on_this_machine: ToyProject) -> None:
    project, venv = on_this_machine, on_this_machine.path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text('#!/bin/sh\nexec "$ONCE_MORE" "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    resources = {"mem_mb": 500, "runtime": 5, "venv": "venv", "setup": f"export ONCE_MORE={sys.executable}"}
    project.run("trained.txt", resources=resources)
    said = project.run("trained.txt", "--force", resources={**resources, "venv": "nowhere"}, code=1)
    assert "class env" in said
    assert "nowhere: no virtual environment here" in said


class OnThisMachine(base.TestWorkflowsLocalStorageBase):
    cluster = "local"
    array_size = 0

    def get_executor(self) -> str:
        return "submitit"

    def get_executor_settings(self) -> ExecutorSettings:
        # the tests ask for 5 MB of memory, which would not even hold Python
        return ExecutorSettings(cluster=self.cluster, poll_interval_s=1, extra_mem_mb=500, array_size=self.array_size)


@pytest.mark.slow
class TestOnThisMachine(OnThisMachine):
    __test__ = True


class OnSlurm(OnThisMachine):
    cluster = "slurm"

    @pytest.fixture(autouse=True)
    def use_it(self, slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        slurm.resume_nodes()
        monkeypatch.setenv("SLURM_CONF", str(slurm.conf))


@pytest.mark.slow
class TestOnSlurm(OnSlurm):
    __test__ = True


@pytest.mark.slow
class TestOnSlurmWithArrays(OnSlurm):
    __test__ = True
    array_size = 10
