"""Jobs that are stopped, by Slurm or by somebody: what was done is kept, and each stop has its class and its rule."""

import os
import signal

import pytest

from toy_project import ToyProject

LOW = {"mem_mb": 500, "runtime": 10, "slurm_partition": "low"}
pytestmark = pytest.mark.slow


def assert_no_step_is_lost_or_done_twice(project: ToyProject, steps: int) -> None:
    assert project.steps() == list(range(1, steps + 1))
    starts = [event["start"] for event in project.starts()]
    assert starts == [0, *(event["stop"] for event in project.journal() if "stop" in event)]


def test_a_preempted_job_goes_on_where_it_was(on_slurm: ToyProject) -> None:
    on_slurm.start(steps=30, resources=LOW)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 3)
    on_slurm.cluster.run("sbatch", "-N2", "--exclusive", "--mem=0", "--output=/dev/null", "--wrap=sleep 2")
    on_slurm.finish()
    assert_no_step_is_lost_or_done_twice(on_slurm, 30)
    first, second = on_slurm.starts()
    assert first["job"] == second["job"]
    (stop,) = [event for event in on_slurm.journal() if "stop" in event]
    assert stop["asked"] == ["SIGUSR2"]  # once
    assert (on_slurm.path / "train.log").read_text().splitlines() == [
        "starting at step 0",
        f"starting at step {second['start']}",
    ]
    assert on_slurm.submitted == 3  # train, the one that preempted it, result


def test_a_preempted_job_that_is_only_sent_sigterm_goes_on_where_it_was(on_slurm: ToyProject) -> None:
    """As on clusters that are not set up to send the signal of --signal at a preemption: its steps get it."""
    on_slurm.shim("scontrol", '"$REAL" "$@" | grep -v send_user_signal')
    on_slurm.start(steps=20, resources={**LOW, "runtime": 11})
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 3)
    job = on_slurm.record("train")["job_id"]
    on_slurm.cluster.run("scancel", "--signal=TERM", job)
    on_slurm.finish()
    assert_no_step_is_lost_or_done_twice(on_slurm, 20)
    assert "class preempted" in on_slurm.said()


def test_a_job_goes_on_after_its_time_limit(on_slurm: ToyProject) -> None:
    resources = {"mem_mb": 500, "runtime": 1}
    on_slurm.run("--submitit-signal-delay-s", "15", steps=60, pause=1, resources=resources)
    assert_no_step_is_lost_or_done_twice(on_slurm, 60)
    assert len(on_slurm.starts()) > 1
    assert len({event["job"] for event in on_slurm.starts()}) == 1


def test_a_job_without_progress_is_stopped_after_two_attempts(on_slurm: ToyProject) -> None:
    resources = {"mem_mb": 500, "runtime": 1}
    on_slurm.start(steps=5, pause=0.2, more="--is-stuck", resources=resources)
    for attempt in (1, 2, 3):  # the first one states a progress for the first time
        on_slurm.wait_until(lambda attempt=attempt: len(on_slurm.starts()) == attempt)
        on_slurm.cluster.run("scancel", "--signal=USR2", on_slurm.record("train")["job_id"])
    said = on_slurm.finish(code=1)
    assert "class timeout" in said
    assert "2 attempts in a row without progress" in said
    assert len(on_slurm.starts()) == 3


def test_a_job_that_is_killed_at_its_time_limit_fails_with_its_class(on_slurm: ToyProject) -> None:
    (on_slurm.path / "train.py").write_text("import time\nprint('deaf', flush=True)\ntime.sleep(600)\n")
    said = on_slurm.run(resources={"mem_mb": 500, "runtime": 1}, code=1)
    assert "class timeout, Slurm state TIMEOUT" in said
    assert "    deaf" in said


def test_scancel_is_taken_at_its_word(on_slurm: ToyProject) -> None:
    on_slurm.start(steps=100)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 2)
    on_slurm.cluster.run("scancel", on_slurm.record("train")["job_id"])
    said = on_slurm.finish(code=1)
    assert "class user, Slurm state CANCELLED" in said
    assert str(on_slurm.job("train") / "output.log") in said
    assert on_slurm.submitted == 1


def test_ctrl_c_cancels_the_jobs(on_slurm: ToyProject) -> None:
    on_slurm.start(steps=100)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 2)
    os.killpg(on_slurm.drivers[-1].pid, signal.SIGINT)
    on_slurm.finish(code=1)
    job = on_slurm.record("train")["job_id"]
    on_slurm.wait_until(lambda: on_slurm.cluster.states()[job] == "CANCELLED")
    on_slurm.run(steps=4)


def test_ctrl_c_can_leave_the_jobs_to_the_next_driver(on_slurm: ToyProject) -> None:
    on_slurm.start("--submitit-on-interrupt", "detach", steps=20)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 2)
    os.killpg(on_slurm.drivers[-1].pid, signal.SIGINT)
    said = on_slurm.finish(code=1)
    assert "its next start takes them over" in said
    on_slurm.run(steps=20)
    assert on_slurm.steps() == list(range(1, 21))
    assert on_slurm.submitted == 2


def test_a_job_on_a_node_that_goes_down_runs_on_another(on_slurm: ToyProject) -> None:
    on_slurm.start(steps=12, resources={"mem_mb": 500, "runtime": 5, "slurm_extra": "--no-requeue"})
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 2)
    (start,) = on_slurm.starts()
    on_slurm.cluster.run("scontrol", "update", f"nodename={start['node']}", "state=down", "reason=test")
    said = on_slurm.finish()
    on_slurm.cluster.resume_nodes()
    assert "class node_fail" in said
    assert on_slurm.starts()[-1]["node"] != start["node"]
    assert on_slurm.record("train")["excluded"] == [start["node"]]


def test_slurms_own_requeue_of_a_job_whose_node_goes_down_is_no_failure(on_slurm: ToyProject) -> None:
    on_slurm.start(steps=12)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 2)
    (start,) = on_slurm.starts()
    on_slurm.cluster.run("scontrol", "update", f"nodename={start['node']}", "state=down", "reason=test")
    said = on_slurm.finish()
    on_slurm.cluster.resume_nodes()
    assert "class node_fail" not in said
    assert on_slurm.submitted == 2


def test_a_killed_training_process_is_started_once_more_on_another_node(on_slurm: ToyProject) -> None:
    on_slurm.start(steps=12)
    on_slurm.wait_until(lambda: len(on_slurm.steps()) > 2)
    (start,) = on_slurm.starts()
    os.kill(start["pid"], signal.SIGKILL)
    said = on_slurm.finish()
    assert "class node_fail" in said
    assert "exit code 137" in said
    assert on_slurm.starts()[-1]["node"] != start["node"]


def test_a_job_without_enough_memory_gets_more_once(on_slurm: ToyProject) -> None:
    (on_slurm.path / "train.py").write_text("import time\ndata = bytearray(1 << 31)\ntime.sleep(30)\n")
    said = on_slurm.run(resources={"mem_mb": 300, "runtime": 5}, code=1)
    assert said.count("class oom") == 2  # the first one is followed by another attempt
    assert "raise the resource 'mem_mb'" in said
    assert on_slurm.record("train")["memory"] == 1.5
