"""Jobs that are stopped, by Slurm or by somebody: what was done is kept, and each stop has its class and its rule.

The driver dies, or Slurm's commands fail: no job is lost, submitted twice or reported as done.
"""

import os
import re
import signal

import pytest

from snakemake_executor_plugin_submitit import processes
from snakemake_executor_plugin_submitit.step import MAIN
from toy_project import ToyProject

LOW = {"mem_mb": 500, "runtime": 10, "slurm_partition": "low"}


def assert_no_step_is_lost_or_done_twice(project: ToyProject, steps: int) -> None:
    assert project.steps() == list(range(1, steps + 1))
    starts = [event["start"] for event in project.starts()]
    assert starts == [0, *(event["stop"] for event in project.journal() if "stop" in event)]


@pytest.mark.slow
def test_a_preempted_job_goes_on_where_it_was(on_slurm: ToyProject) -> None:
    on_slurm.start_until(3, steps=30, resources=LOW)
    on_slurm.cluster.run("sbatch", "-N2", "--exclusive", "--mem=0", "--output=/dev/null", "--wrap=sleep 2")
    on_slurm.finish()
    assert_no_step_is_lost_or_done_twice(on_slurm, 30)
    first, second = on_slurm.starts()
    assert first["job"] == second["job"]
    (stop,) = [event for event in on_slurm.journal() if "stop" in event]
    assert stop["asked"] == ["SIGUSR2"]  # once
    assert (on_slurm.path / "train.log").read_text() == f"starting at step {second['start']}\n"
    assert on_slurm.submitted == 3  # train, the one that preempted it, result


@pytest.mark.slow
def test_a_preempted_job_that_is_only_sent_sigterm_goes_on_where_it_was(on_slurm: ToyProject) -> None:
    """As on clusters that are not set up to send the signal of --signal at a preemption: its steps get it."""
    on_slurm.shim("scontrol", '"$REAL" "$@" | grep -v send_user_signal')
    on_slurm.start_until(3, steps=20, resources={**LOW, "runtime": 11})
    job = on_slurm.record("train")["job_id"]
    on_slurm.cluster.run("scancel", "--signal=TERM", job)
    on_slurm.finish("class preempted")
    assert_no_step_is_lost_or_done_twice(on_slurm, 20)


@pytest.mark.slow
def test_a_job_goes_on_after_its_time_limit(on_slurm: ToyProject) -> None:
    resources = {"mem_mb": 500, "runtime": 1}
    on_slurm.run("--submitit-signal-delay-s", "15", steps=60, pause=1, resources=resources)
    assert_no_step_is_lost_or_done_twice(on_slurm, 60)
    assert len(on_slurm.starts()) > 1
    assert len({event["job"] for event in on_slurm.starts()}) == 1


@pytest.mark.slow
def test_a_job_without_progress_is_stopped_after_two_attempts(on_slurm: ToyProject) -> None:
    resources = {"mem_mb": 500, "runtime": 1}
    on_slurm.start(steps=5, pause=0.2, more="--is-stuck", resources=resources)
    for attempt in (1, 2, 3):  # the first one states a progress for the first time
        on_slurm.wait_until(lambda attempt=attempt: len(on_slurm.starts()) == attempt)
        on_slurm.cluster.run("scancel", "--signal=USR2", on_slurm.record("train")["job_id"])
    on_slurm.finish("class timeout", "2 attempts in a row without progress", code=1)
    assert len(on_slurm.starts()) == 3


@pytest.mark.slow
def test_a_job_that_is_killed_at_its_time_limit_fails_with_its_class(on_slurm: ToyProject) -> None:
    (on_slurm.path / "train.py").write_text("import time\nprint('deaf', flush=True)\ntime.sleep(600)\n")
    says = ("class timeout, Slurm state TIMEOUT", "    deaf")
    on_slurm.run(resources={"mem_mb": 500, "runtime": 1}, code=1, says=says)


@pytest.mark.slow
def test_scancel_is_taken_at_its_word(on_slurm: ToyProject) -> None:
    on_slurm.start_until(2, steps=100)
    on_slurm.cluster.run("scancel", on_slurm.record("train")["job_id"])
    on_slurm.finish("class cancelled, Slurm state CANCELLED", str(on_slurm.job("train") / "output.log"), code=1)
    assert on_slurm.outcome("train")["failure_class"] == "cancelled"
    assert on_slurm.submitted == 1


@pytest.mark.slow
def test_ctrl_c_cancels_the_jobs_and_the_next_start_waits_until_they_have_saved(on_slurm: ToyProject) -> None:
    on_slurm.start_until(2, steps=100, pause=3)
    os.killpg(on_slurm.drivers[-1].pid, signal.SIGINT)
    on_slurm.finish(code=1)
    assert (on_slurm.record("train")["is_open"], on_slurm.outcome("train")["failure_class"]) == (False, "cancelled")
    job = on_slurm.record("train")["job_id"]
    on_slurm.run(steps=8)
    assert on_slurm.cluster.states()[job] == "CANCELLED"
    assert on_slurm.steps() == list(range(1, 9))


@pytest.mark.slow
def test_a_job_that_ctrl_c_could_not_cancel_is_taken_over(on_slurm: ToyProject) -> None:
    on_slurm.shim("scancel", "echo 'Unable to contact slurm controller' >&2", "exit 1")
    on_slurm.start_until(2, steps=20)
    os.killpg(on_slurm.drivers[-1].pid, signal.SIGINT)
    on_slurm.finish("Unable to contact slurm controller; the jobs may still run", code=1)
    on_slurm.run(steps=20, says=("taken over",))
    assert on_slurm.steps() == list(range(1, 21))
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_ctrl_c_can_leave_the_jobs_to_the_next_driver(on_slurm: ToyProject) -> None:
    on_slurm.start_until(2, "--submitit-on-interrupt", "detach", steps=20)
    os.killpg(on_slurm.drivers[-1].pid, signal.SIGINT)
    on_slurm.finish("its next start takes them over", code=1)
    on_slurm.run(steps=20)
    assert on_slurm.steps() == list(range(1, 21))
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_a_job_on_a_node_that_goes_down_runs_on_another(on_slurm: ToyProject) -> None:
    on_slurm.start_until(2, steps=12, resources={"mem_mb": 500, "runtime": 5, "slurm_extra": "--no-requeue"})
    (start,) = on_slurm.starts()
    on_slurm.cluster.run("scontrol", "update", f"nodename={start['node']}", "state=down", "reason=test")
    on_slurm.finish("class node_fail")
    on_slurm.cluster.resume_nodes()
    assert on_slurm.starts()[-1]["node"] != start["node"]
    assert on_slurm.record("train")["excluded"] == [start["node"]]


@pytest.mark.slow
def test_slurms_own_requeue_of_a_job_whose_node_goes_down_is_no_failure(on_slurm: ToyProject) -> None:
    on_slurm.start_until(2, steps=12)
    (start,) = on_slurm.starts()
    on_slurm.cluster.run("scontrol", "update", f"nodename={start['node']}", "state=down", "reason=test")
    said = on_slurm.finish()
    on_slurm.cluster.resume_nodes()
    assert "class node_fail" not in said
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_a_killed_training_process_is_started_once_more_on_another_node(on_slurm: ToyProject) -> None:
    on_slurm.start_until(2, steps=12)
    (start,) = on_slurm.starts()
    os.kill(start["pid"], signal.SIGKILL)
    on_slurm.finish("class node_fail", "exit code 137")
    assert on_slurm.starts()[-1]["node"] != start["node"]


@pytest.mark.slow
def test_a_job_without_enough_memory_gets_more_once(on_slurm: ToyProject) -> None:
    (on_slurm.path / "train.py").write_text("import time\ndata = bytearray(1 << 31)\ntime.sleep(30)\n")
    said = on_slurm.run(resources={"mem_mb": 300, "runtime": 5}, code=1, says=("raise the resource 'mem_mb'",))
    assert said.count("class oom") == 2  # the first one is followed by another attempt
    assert on_slurm.record("train")["memory"] == 1.5


def test_a_running_job_is_taken_over(on_slurm: ToyProject) -> None:
    on_slurm.start_until(1, steps=4)
    (on_slurm.path / "hold").touch()
    on_slurm.kill_driver()
    on_slurm.start(steps=4)
    on_slurm.wait_until(lambda: "taken over" in on_slurm.said())
    (on_slurm.path / "hold").unlink()
    assert "%s" not in on_slurm.finish()
    assert on_slurm.steps() == [1, 2, 3, 4]
    assert on_slurm.submitted == 2  # train and result


@pytest.mark.slow
def test_a_pending_job_is_taken_over(on_slurm: ToyProject) -> None:
    blocker = ["sbatch", "--parsable", "--partition=h100", "--exclusive", "--mem=0", "--wrap=sleep 600"]
    blocking = on_slurm.cluster.run(*blocker, "--output=/dev/null").strip()
    config = {"resources": {"mem_mb": 500, "runtime": 5, "slurm_partition": "h100"}}
    on_slurm.start(**config)
    job_id = on_slurm.wait_until(lambda: on_slurm.record("train").get("job_id"))
    on_slurm.kill_driver()
    assert on_slurm.cluster.states()[job_id] == "PENDING"
    on_slurm.start(**config)
    on_slurm.wait_until(lambda: "taken over" in on_slurm.said())
    on_slurm.cluster.run("scancel", blocking)
    on_slurm.finish()
    assert on_slurm.submitted == 3


@pytest.mark.slow
def test_a_job_that_finished_meanwhile_is_taken_over(on_slurm: ToyProject) -> None:
    on_slurm.start_until(2, steps=4)
    on_slurm.kill_driver()
    on_slurm.wait_until(lambda: list(on_slurm.job("train").glob("outcome-*.json")))
    on_slurm.run(steps=4)
    assert len(on_slurm.starts()) == 1
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_a_driver_killed_within_sbatch_leaves_one_job(on_slurm: ToyProject) -> None:
    on_slurm.shim("sbatch", '"$REAL" "$@" > accepted', "sleep 60")
    on_slurm.start(steps=8)
    on_slurm.wait_until(lambda: (on_slurm.path / "accepted").exists() and (on_slurm.path / "accepted").read_text())
    assert on_slurm.record("train")["job_id"] == ""
    os.killpg(on_slurm.drivers[-1].pid, signal.SIGKILL)
    (on_slurm.path / "shims" / "sbatch").unlink()
    assert "%s" not in on_slurm.run(steps=8, says=("taken over",))
    assert on_slurm.steps() == list(range(1, 9))
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_a_second_driver_waits_for_the_jobs_of_the_first(on_slurm: ToyProject) -> None:
    first = on_slurm.start_until(1, steps=16)
    on_slurm.run("trained.txt", steps=16)
    assert first.wait(timeout=60) == 0
    assert on_slurm.steps() == list(range(1, 17))
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_a_partition_that_slurm_refuses_is_named_before_anything_is_submitted(on_slurm: ToyProject) -> None:
    says = ("Slurm refuses --partition=moon", "invalid partition specified: moon")
    said = on_slurm.run(resources={"mem_mb": 500, "runtime": 5, "slurm_partition": "moon"}, code=1, says=says)
    named = re.search(r"partitions: (.*)", said)[1]
    assert {"mi300x", "v100", "h100", "a100", "low"} <= set(named.split(", "))
    assert on_slurm.submitted == 0


@pytest.mark.slow
def test_the_end_of_a_cancelled_job_is_noticed_though_the_accounting_says_unknown(on_slurm: ToyProject) -> None:
    on_slurm.shim("sacct", '"$REAL" "$@" | sed -E \'s/(PENDING|RUNNING|COMPLETED|CANCELLED[^|]*)/UNKNOWN/\'')
    on_slurm.start_until(1, steps=400)
    on_slurm.cluster.run("scancel", on_slurm.record("train")["job_id"])
    on_slurm.finish("class cancelled, Slurm state CANCELLED", code=1)


@pytest.mark.slow
def test_a_job_that_ends_without_an_outcome_is_lost_and_started_once_more(on_slurm: ToyProject) -> None:
    """Killed is the process that would have written how the job ended."""
    on_slurm.start(steps=400)
    for attempt in (1, 2):
        on_slurm.wait_until(lambda attempt=attempt: len(on_slurm.starts()) == attempt)
        found = processes.with_environment(SLURM_JOB_ID=on_slurm.record("train")["job_id"])
        processes.kill([process for process in found if MAIN in process.cmdline()])
    assert on_slurm.finish("ended without an outcome", code=1).count("class lost") == 2


@pytest.mark.slow
def test_while_slurm_answers_nothing_at_all_the_driver_waits_for_the_job(on_slurm: ToyProject) -> None:
    for program in ("sacct", "squeue"):
        on_slurm.shim(program, "echo 'Unable to contact slurm controller' >&2", "exit 1")
    on_slurm.run(steps=20, says=("asked again in",))
    assert on_slurm.steps() == list(range(1, 21))
    assert on_slurm.submitted == 2


@pytest.mark.slow
def test_the_time_limits_of_partitions_are_asked_for_until_slurm_answers(on_slurm: ToyProject) -> None:
    away = "{ echo 'Unable to contact slurm controller' >&2; exit 1; }"
    on_slurm.shim("sinfo", "echo >> asked-sinfo", f"[ $(wc -l < asked-sinfo) -gt 1 ] || {away}", "echo 'mi300x*|3:00'")
    on_slurm.run(small=1, says=("are asked for again before the next jobs",))
    assert on_slurm.record("small")["requested"]["runtime"] == 3
