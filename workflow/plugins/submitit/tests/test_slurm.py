"""Reading Slurm's answers about jobs and partitions, with programs that answer in place of a Slurm."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm import (
    NoAnswer,
    SlurmQueue,
    choose,
    find_by_name,
    minutes,
    read_partitions,
    read_table,
)

LOG = logging.getLogger("test")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH; `asked` in it lists the calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for program in ("sacct", "squeue"):
        answer(folder, program)
    return folder


def answer(folder: Path, program: str, *lines: str, code: int = 0, error: str = "") -> None:
    text = [f'#!/bin/bash\necho {program} "$@" >> {folder}/asked', "cat <<'END'", *lines, "END"]
    (folder / program).write_text("\n".join([*text, f"echo '{error}' >&2", f"exit {code}", ""]))
    (folder / program).chmod(0o755)


def asked(folder: Path) -> list[str]:
    path = folder / "asked"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_running_jobs_and_arrays_take_one_question(programs: Path) -> None:
    answer(programs, "squeue", "7|RUNNING||n1|None", "8_[0-1,3%2]|PENDING|||Priority", "8_2|RUNNING||n2|None")
    states = SlurmQueue(1, LOG).ask(["7", "8_0", "8_1", "8_2", "8_3"])
    assert {job: state.state for job, state in states.items()} == {
        "7": "RUNNING",
        "8_0": "PENDING",
        "8_1": "PENDING",
        "8_2": "RUNNING",
        "8_3": "PENDING",
    }
    assert asked(programs) == ["squeue"]


def test_the_accounting_is_asked_about_jobs_that_squeue_has_forgotten(programs: Path) -> None:
    answer(programs, "squeue", "7|PENDING|||BeginTime")
    answer(programs, "sacct", "7|PREEMPTED|0:0|n1", "8|CANCELLED by 1000|0:15|n2")
    states = SlurmQueue(1, LOG).ask(["7", "8"])
    assert states["7"].state == "PENDING"  # between its end and its requeue, sacct shows the end
    assert states["8"].state == "CANCELLED"
    assert states["8"].is_ended


def test_no_end_is_believed_while_squeue_does_not_answer(programs: Path) -> None:
    answer(programs, "sacct", "7|PREEMPTED|0:0|n1", "8|RUNNING|0:0|n2")
    answer(programs, "squeue", code=1, error="Unable to contact slurm controller")
    assert set(SlurmQueue(1, LOG).ask(["7", "8"])) == {"8"}


@pytest.mark.parametrize("state", ["UNKNOWN", "", "?", "COMPLETEDISH"])
def test_an_unknown_state_is_no_state(programs: Path, state: str) -> None:
    answer(programs, "sacct", f"7|{state}|0:0|n1")
    assert SlurmQueue(1, LOG).ask(["7"]) == {}


def test_a_cluster_without_accounting_is_asked_for_it_once(programs: Path) -> None:
    answer(programs, "sacct", code=1, error="Slurm accounting storage is disabled")
    answer(programs, "squeue", "7|FAILED||n1|NonZeroExitCode")
    queue = SlurmQueue(1, LOG)
    assert queue.ask(["7", "8"])["7"].state == "FAILED"
    queue.ask(["7", "8"])
    assert asked(programs) == ["squeue", "sacct", "squeue"]


def test_a_job_that_slurm_has_forgotten_is_just_not_there(programs: Path) -> None:
    answer(programs, "squeue", code=1, error="slurm_load_jobs error: Invalid job id specified")
    assert SlurmQueue(1, LOG).ask(["7"]) == {}


def test_questions_become_rare_while_nobody_answers(programs: Path) -> None:
    for program in ("sacct", "squeue"):
        answer(programs, program, code=1, error="Unable to contact slurm controller")
    clock = Clock()
    queue = SlurmQueue(10, LOG, clock)
    pauses = []
    for _ in range(8):
        with pytest.raises(NoAnswer):
            queue.ask(["7"])
        since = clock.now
        while not queue.is_due():
            clock.now += 10
        pauses.append(clock.now - since)
    assert pauses == [20, 40, 80, 160, 320, 600, 600, 600]
    answer(programs, "sacct", "7|RUNNING|0:0|n1")
    queue.ask(["7"])
    clock.now += 10
    assert queue.is_due()


def test_a_job_is_found_by_its_name_in_the_queue_or_in_the_accounting(programs: Path) -> None:
    answer(programs, "squeue", "12|train-abc-1-00000000")
    assert find_by_name("train-abc-1-00000000", 0) == "12"
    answer(programs, "squeue")
    answer(programs, "sacct", "13_0|train-abc-1-00000000", "13_1|train-abc-1-00000000")
    assert find_by_name("train-abc-1-00000000", 0) == "13"
    assert find_by_name("train-abc-2-00000000", 0, tries=1) is None


SINFO = """\
short*|up|1:00:00|32|64000|10|(null)|skylake
long|up|7-00:00:00|32|64000|10|(null)|skylake,avx512
long|up|7-00:00:00|64|512000|2|(null)|epyc
gpu|up|2-00:00:00|48|256000|4|gpu:v100:4(S:0-1)|v100
gpu|up|2-00:00:00|96|1000000|2|gpu:h100:8|h100
old|down|infinite|8|16000|4|(null)|
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that answer like Slurm's; there is only sinfo yet."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    program(folder, "sinfo", f"cat <<'END'\n{SINFO}END")
    program(folder, "scontrol", "echo PreemptType = preempt/none")
    return folder


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("wanted", "partition"),
    [
        ({"runtime": 30}, "short"),
        ({"runtime": 61}, "long"),
        ({"runtime": 30, "mem_mb": 100_000}, "long"),
        ({"runtime": 30, "threads": 64}, "long"),
        ({"runtime": 30, "threads": 65}, "gpu"),
        ({"runtime": 30, "gpu": 1}, "gpu"),
        ({"runtime": 30, "gpu": 8, "gpu_model": "h100"}, "gpu"),
        ({"runtime": 30, "constraint": "avx512|epyc"}, "long"),
    ],
)
def test_a_job_gets_the_default_if_it_fits_then_the_shortest_and_no_gpu_node_without_need(
    site: Path, wanted: dict[str, int], partition: str
) -> None:
    assert choose(read_partitions(), wanted, "train") == partition


def test_a_job_that_no_partition_takes_is_told_the_limits(site: Path) -> None:
    with pytest.raises(
        WorkflowError,
        match=r"rule train: no partition accepts runtime=30, gpu=9: short has at most gpu 0; .*gpu has at most gpu 8",
    ):
        choose(read_partitions(), {"runtime": 30, "gpu": 9}, "train")


def test_a_table_names_the_candidates_and_its_limits_come_before_those_of_slurm(site: Path, tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text("partitions:\n  long: {max_runtime: 1-00:00:00}\n  gpu: {max_gpu: 2}\n")
    table = read_table(str(tmp_path / "table.yaml"), read_partitions())
    assert choose(table, {"runtime": 30}, "train") == "long"
    assert choose(table, {"runtime": 1500}, "train") == "gpu"
    with pytest.raises(WorkflowError, match="no partition accepts"):
        choose(table, {"runtime": 30, "gpu": 3}, "train")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("partitions: {moon: {}}", "Slurm has no partition moon; there are short, long, gpu"),
        ("partitions: {gpu: {max_gpus: 2}}", "partition gpu: no such limit: max_gpus; there are max_runtime"),
        ("gpu: {max_gpu: 2}", "not a table of partitions"),
    ],
)
def test_a_wrong_table_is_refused(site: Path, tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "table.yaml").write_text(text)
    with pytest.raises(WorkflowError, match=error):
        slurm.read_cluster(ExecutorSettings(partition_table=str(tmp_path / "table.yaml")))


def test_a_cluster_that_reports_nothing_is_left_to_its_own_default(site: Path) -> None:
    program(site, "sinfo", "echo down >&2; exit 1")
    assert slurm.read_cluster(ExecutorSettings()).partitions == ()


@pytest.mark.parametrize(
    ("config", "needs_srun"),
    [
        ("PreemptType = preempt/none", False),
        ("PreemptType = preempt/qos\nPreemptParameters = send_user_signal", False),
        ("PreemptType = preempt/qos\nPreemptParameters = (null)", True),
    ],
)
def test_srun_is_for_clusters_that_signal_only_its_steps_before_a_preemption(
    site: Path, config: str, needs_srun: bool
) -> None:
    program(site, "scontrol", f"echo '{config}'")
    assert slurm.read_cluster(ExecutorSettings(partition="short")).needs_srun is needs_srun


def test_a_place_that_slurm_refuses_is_one_line_with_what_there_is(site: Path) -> None:
    program(site, "sbatch", "echo 'sbatch: error: invalid partition specified: moon' >&2; exit 1")
    with pytest.raises(
        WorkflowError, match=r"rule a: Slurm refuses --partition=moon: .*specified: moon; partitions: short, long, gpu"
    ):
        slurm.check_place({"partition": "moon"}, "rule a")
    program(site, "sbatch", "echo 'Unable to contact slurm controller' >&2; exit 1")
    slurm.check_place({"partition": "moon"}, "rule a")  # the submission waits for Slurm, and then says so


@pytest.mark.parametrize(
    ("text", "value"),
    [("30", 30), ("30:30", 30.5), ("2:00:00", 120), ("1-12", 2160), ("1-00:30:00", 1470), ("infinite", math.inf)],
)
def test_time_limits_are_read_as_slurm_writes_them(text: str, value: float) -> None:
    assert minutes(text) == value
