import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from implicit_llm_contracts.runs.launched import Death, End, judge
from implicit_llm_workflow.launching import launch
from implicit_llm_workflow.launching.launch import Allocation, LaunchError, require_nodes

NODES = Allocation("7", 2, "n[1-2]", 16)


def end(rank: int, code: int, failure_class: str | None = "bug") -> End:
    return End(rank, code, failure_class, f"rank {rank}", float(rank))


LOST_CONNECTION = end(1, 1)
KILLED, ENDED_BY_TORCHRUN = Death(2, -signal.SIGKILL, "n1"), Death(3, -signal.SIGTERM, "n1")


@pytest.mark.parametrize(
    ("ends", "deaths", "code", "failure_class"),
    [
        ([end(0, 75, "preempted"), LOST_CONNECTION], [KILLED], 75, "preempted"),
        ([LOST_CONNECTION, end(2, 1, "hang")], [], 1, "hang"),
        ([LOST_CONNECTION, end(2, 2, "quota"), end(3, 75, "preempted")], [KILLED], 2, "quota"),
        ([LOST_CONNECTION], [ENDED_BY_TORCHRUN, KILLED], 137, "node_fail"),
        ([LOST_CONNECTION], [ENDED_BY_TORCHRUN], 1, "bug"),
        ([], [ENDED_BY_TORCHRUN, Death(1, 2, "n1")], 2, None),
        ([], [], 1, None),
    ],
    ids=["a commit", "a hang", "a full disk", "a kill", "a bug", "a silent end", "nothing known"],
)
def test_of_many_ends_the_one_that_is_the_reason_counts(
    ends: list[End], deaths: list[Death], code: int, failure_class: str | None
) -> None:
    assert judge(0, ends, deaths).code == 0  # the launcher ended well
    reason = judge(1, ends, deaths)
    assert (reason.code, reason.failure_class) == (code, failure_class)


def test_slurm_is_taken_at_its_word() -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "5", "SLURM_JOB_CPUS_PER_NODE": "32(x4),24"}
    found = Allocation.current(given)
    assert (found.num_nodes, found.cpus_per_node) == (5, 24)
    assert Allocation.current({"HOME": "/root"}) is None


@pytest.mark.parametrize(
    ("nodes", "given", "message"),
    [(2, None, "no Slurm allocation"), (4, NODES, "the allocation has 2"), (1, NODES, "the allocation has 2")],
)
def test_fewer_or_more_nodes_are_refused(nodes: int, given: Allocation | None, message: str) -> None:
    require_nodes(1, None)
    require_nodes(2, NODES)
    with pytest.raises(LaunchError, match=message) as caught:
        require_nodes(nodes, given)
    assert caught.value.failure_class == "env"


def test_srun_starts_one_agent_on_each_node_beside_the_step_it_is_called_in(
    tmp_path: Path,
) -> None:
    job = launch.NodeJob(tmp_path, 0, 2, 8, ("-m", "module", "--option"), "n1:29500", threads=2)
    words = launch._srun(job, cpus=16)
    all_cpus = "--cpus-per-task=16"  # of a node, which its processes share
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=1", all_cpus} <= {*words}
    assert words[-2] == "node"
    assert launch.NodeJob.of_json(words[-1], node=1) == replace(job, node=1)


def test_what_a_killed_attempt_left_between_nodes_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    with launch._folder(tmp_path, 2, NODES) as path:
        (path / "end-0.json").write_text("{}")
        with launch._folder(tmp_path, 2, NODES) as again:
            assert again == path
            assert list(path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


CATCHES = """
import signal, sys, time
caught = []
signal.signal(signal.SIGUSR2, lambda number, frame: caught.append(number))
print("ready", flush=True)
while not caught:
    time.sleep(0.01)
sys.exit(75)
"""


def test_a_process_is_told_when_it_is_ready_however_early_the_signal_came() -> None:
    with launch.StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR2)
        process = subprocess.Popen([sys.executable, "-c", CATCHES], stdout=subprocess.PIPE, text=True)
        told: list[int] = []

        def tell() -> None:
            if not told and process.stdout.readline():
                told.append(process.pid)
                process.send_signal(signal.SIGUSR2)

        assert launch.wait(process, stop, tell) == 75
    assert stop.received == signal.SIGTERM


def test_a_second_ctrl_c_leaves_no_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with launch.StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            launch.wait(process, stop, lambda: signal.raise_signal(signal.SIGINT))
    assert stop.received == signal.SIGINT
    assert process.wait(timeout=60) == -signal.SIGKILL
