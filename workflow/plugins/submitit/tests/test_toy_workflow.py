"""Whole workflows: a toy project, Snakemake's own tests for executor plugins, and one workflow by either plugin."""

import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import snakemake.common.tests as base

from slurm_cluster import SlurmCluster
from snakemake_executor_plugin_submitit import ExecutorSettings, processes
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
    on_this_machine.run(
        "--submitit-cluster", "slurm", code=1, says=("sbatch is not on PATH", "--submitit-cluster local")
    )


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
    project.start_until(2, **config)
    project.kill_driver()
    assert "%s" not in project.run(**config, says=("taken over",))
    assert project.steps() == list(range(1, 71))
    _, *_, last = project.starts()  # more than two on a busy machine
    # Snakemake deletes a rule's log before each start.
    assert (project.path / "train.log").read_text() == f"starting at step {last['start']}\n"
    assert 0 < last["start"] < 70


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_of_a_local_job(on_this_machine: ToyProject) -> None:
    project = on_this_machine
    project.start_until(2, steps=500)
    os.kill(project.drivers[-1].pid, signal.SIGINT)
    project.finish(code=1)
    (start,) = project.starts()
    assert processes.start_ticks(start["pid"]) is None


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_can_leave_local_jobs_to_the_next_driver(on_this_machine: ToyProject) -> None:
    on_this_machine.start_until(2, "--submitit-on-interrupt", "detach", steps=20)
    os.killpg(on_this_machine.drivers[-1].pid, signal.SIGINT)
    on_this_machine.finish("its next start takes them over", code=1)
    on_this_machine.run(steps=20)
    assert on_this_machine.steps() == list(range(1, 21))
    assert len(on_this_machine.starts()) == 1


def test_a_resource_of_a_wrong_type_fails_its_job_alone(on_this_machine: ToyProject) -> None:
    said = on_this_machine.run("--keep-going", small=3, wrong="1", code=1, says=("Error in rule small",))
    assert said.count("not submitted: rule small: resource gpus=many: give a whole number, at least 0") == 1
    assert "Traceback" not in said
    assert sorted(path.name for path in (on_this_machine.path / "small").iterdir()) == ["0.txt", "2.txt"]
    assert (on_this_machine.path / "trained.txt").exists()


def test_a_folder_that_fills_up_while_jobs_run_does_not_end_the_driver(on_this_machine: ToyProject) -> None:
    project = on_this_machine
    project.start_until(1, "trained.txt", "--keep-going", steps=8)
    jobs = project.path / ".snakemake" / "submitit" / "jobs"
    for path in jobs.glob("*/lock"):
        path.unlink()
        path.mkdir()  # as root no permission would be missing
    assert "Traceback" not in project.finish("--submitit-folder: ")
    assert (project.path / "trained.txt").exists()


def test_old_logs_that_cannot_be_deleted_do_not_fail_a_workflow(on_this_machine: ToyProject) -> None:
    arrays = on_this_machine.path / ".snakemake" / "submitit" / "arrays"
    arrays.mkdir(parents=True)
    (arrays / "old").symlink_to(on_this_machine.path / "profile", target_is_directory=True)  # rmtree refuses links
    (on_this_machine.path / "profile").mkdir()
    os.utime(on_this_machine.path / "profile", (1, 1))
    on_this_machine.run("small/0.txt", says=("Not all old logs were deleted",))


DEAF = """
rule deaf:
    output: "deaf.txt"
    resources: runtime=5
    shell: "trap '' TERM; touch deaf; while true; do sleep 1; done"
"""
DIES = """
rule fails:
    output: "never.txt"
    resources: runtime=5
    shell: "until grep 'exit_code.: 0' .snakemake/submitit/jobs/small-*/outcome-1.json; do sleep 0.1; done; exit 1"

import os, sys, time
from snakemake.jobs import Job

async def die(job, **options):
    while "class bug" not in open("driver-0.log").read():
        time.sleep(0.1)
    os.kill(os.getpid(), 9)

if config.get("dies") and "--mode" not in sys.argv:
    Job.postprocess = die
"""


def test_the_record_of_a_finished_job_is_open_if_the_driver_dies_before_it_has_saved_the_end(
    on_this_machine: ToyProject,
) -> None:
    """The driver dies where it would save the first of the two ends, when both have been reported to it."""
    project = on_this_machine
    with open(project.path / "Snakefile", "a") as snakefile:
        snakefile.write(DIES)
    project.run("small/0.txt", "never.txt", dies=True, code=-signal.SIGKILL)
    assert (project.outcome("small")["failure_class"], project.record("small")["is_open"]) == (None, True)
    project.run("small/0.txt", "--force")
    assert not project.record("small")["is_open"]


@pytest.mark.slow
def test_after_ctrl_c_no_local_job_is_started_again_while_another_one_stops(on_this_machine: ToyProject) -> None:
    """The one ends at once, with a checkpoint; the other has to be killed."""
    project = on_this_machine
    with open(project.path / "Snakefile", "a") as snakefile:
        snakefile.write(DEAF)
    project.start_until(1, "trained.txt", "deaf.txt", steps=500)
    project.wait_until((project.path / "deaf").exists)
    os.kill(project.drivers[-1].pid, signal.SIGINT)
    assert "Submitted again" not in project.finish(code=1)
    assert len(project.starts()) == 1
    assert {project.outcome(rule)["failure_class"] for rule in ("train", "deaf")} == {"cancelled"}


ODD = """
rule odd:
    output: "odd/{i}.txt"
    resources: runtime=5, gpus=lambda wildcards: "many" if wildcards.i in config["wrong"] else 0
    shell: "touch {output}"
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["0", "2"])
def test_a_resource_that_is_wrong_for_one_job_does_not_stop_the_others_at_the_start(
    on_slurm: ToyProject, wrong: str
) -> None:
    with open(on_slurm.path / "Snakefile", "a") as snakefile:
        snakefile.write(ODD)
    said = on_slurm.run("--keep-going", *(f"odd/{i}.txt" for i in "012"), wrong=wrong, code=1)
    assert said.count("not submitted: rule odd: resource gpus=many: give a whole number") == 1
    assert sorted(path.stem for path in (on_slurm.path / "odd").glob("*.txt")) == sorted({*"012"} - {wrong})


@pytest.mark.slow
def test_a_resource_of_a_wrong_type_is_refused_before_anything_is_submitted(on_slurm: ToyProject) -> None:
    says = ("rule train: resource nodes=two: give a whole number",)
    assert "Traceback" not in on_slurm.run(resources={"nodes": "two"}, small=2, code=1, says=says)
    assert on_slurm.submitted == 0


@pytest.mark.slow
def test_a_job_that_sbatch_refuses_fails_once_in_the_words_of_sbatch(on_slurm: ToyProject) -> None:
    options, says = ("--submitit-partition", "low", "--keep-going"), ("Memory specification can not be satisfied",)
    said = on_slurm.run(*options, small=1, resources={"mem_mb": 40000}, code=1, says=says)
    assert said.count("not submitted: sbatch failed") == 1
    assert "Submitted again" not in said
    assert (on_slurm.path / "small" / "0.txt").exists()


ENVIRONMENT = {
    "SBATCH_PARTITION": "v100",
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_MEM_PER_NODE": "300",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_JOB_NAME": "mine",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_ARRAY_INX": "0-1",
    "SBATCH_OUTPUT": "elsewhere",
    "SQUEUE_USERS": "nobody",
    "SQUEUE_PARTITION": "v100",
    "SCANCEL_PARTITION": "v100",
    "SACCT_FORMAT": "User",
    "SNAKEMAKE_PROFILE": "profile",
}


@pytest.mark.slow
def test_variables_of_the_shell_change_neither_what_is_asked_of_slurm_nor_its_answers(
    on_slurm: ToyProject,
) -> None:
    on_slurm.variables = {**ENVIRONMENT, "MY_OWN": "kept"}
    (on_slurm.path / "profile").mkdir()
    (on_slurm.path / "profile" / "config.yaml").write_text("executor: submitit\ndry-run: true\n")
    before = set(on_slurm.cluster.states())
    on_slurm.start_until(0, "trained.txt", "--profile", "none", "--submitit-partition", "h100")
    (job,) = set(on_slurm.cluster.states()) - before
    shown = on_slurm.cluster.run("scontrol", "show", "job", job)
    name = on_slurm.record("train")["name"]
    for fact in (f"JobName={name}", "Partition=h100", "TimeLimit=00:05:00", "Requeue=1", "MinMemoryNode=1000M"):
        assert fact in shown
    said = on_slurm.finish()
    assert "SBATCH_PARTITION, SBATCH_TIMELIMIT have no effect" in said
    environ = (on_slurm.path / "environ").read_text()
    assert "MY_OWN=kept" in environ
    assert "SBATCH_" not in environ


@pytest.mark.slow
def test_a_job_runs_in_the_partition_of_a_list_that_can_run_it(on_slurm: ToyProject) -> None:
    resources = {"mem_mb": 500, "runtime": 5, "gpus": 1, "gpu_model": "h100", "slurm_partition": "v100,h100"}
    on_slurm.run(resources=resources)
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
    "submitit": ("--submitit-poll-interval-s", "5"),
    "slurm": ("--executor", "slurm", "--slurm-array-jobs", "small", "--slurm-init-seconds-before-status-checks=2"),
}


@pytest.fixture
def counted(on_slurm: ToyProject) -> ToyProject:
    """A larger workflow, with Slurm's programs counted."""
    (on_slurm.path / "Snakefile").write_text(SNAKEFILE)
    for program in ("sbatch", "srun", "squeue", "sacct"):
        # the official plugin takes SLURM_CONF out of the environment of its jobs
        conf = f"export SLURM_CONF={on_slurm.cluster.conf}"
        on_slurm.shim(program, conf, f"date +%s.%N >> {on_slurm.path}/calls-{program}", 'exec "$REAL" "$@"')
    return on_slurm


def calls(project: ToyProject, program: str) -> list[float]:
    """The time of each call of one of Slurm's programs."""
    path = project.path / f"calls-{program}"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def run(project: ToyProject, plugin: str, small: int, groups: int) -> None:
    options = (*PLUGINS[plugin], "--jobs", "100", "--latency-wait", "5", "--default-resources", "mem_mb=700")
    project.run(*options, small=small, groups=groups)
    expected = sorted([*range(small), *range(groups), *range(1, 7)])
    assert [int(word) for word in (project.path / "result.txt").read_text().split()] == expected
    assert not list((project.path / "small").glob("*.txt"))  # temp()
    assert not list((project.path / "begun").glob("*.txt"))
    assert len(list((project.path / "parts").glob("*.in"))) == 6


def test_arrays_groups_checkpoints_and_retries_run_with_few_questions(counted: ToyProject) -> None:
    run(counted, "submitit", small=4, groups=1)
    assert (counted.path / "asked").read_text().split() == ["700", "900"]
    assert calls(counted, "srun") == []
    assert len(calls(counted, "sbatch")) == 7  # small, pair, split, parts, growing twice, result
    assert calls(counted, "sacct") == []
    assert all(later - earlier > 4.9 for earlier, later in pairwise(calls(counted, "squeue")))


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_forty_jobs_run_with_either_plugin(counted: ToyProject, plugin: str) -> None:
    run(counted, plugin, small=20, groups=5)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_short_jobs_take_ten_submissions_and_a_question_in_thirty_seconds(counted: ToyProject) -> None:
    options = ("--until", "small", "--submitit-poll-interval-s", "30", "--jobs", "1000")
    driver = counted.start(*options, small=1000, groups=1, threads=4)  # four at a time
    driver.wait(timeout=3600)
    assert counted.finish().count("Finished jobid") >= 1000
    assert len(calls(counted, "sbatch")) <= 10
    assert calls(counted, "srun") == []
    assert calls(counted, "sacct") == []
    assert all(later - earlier > 29.9 for earlier, later in pairwise(calls(counted, "squeue")))
