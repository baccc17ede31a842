"""Which partition a job gets, from what Slurm reports and from a table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm import choose, minutes, read_partitions, read_table

SINFO = """\
short*|up|1:00:00|32|64000|10|(null)|skylake
long|up|7-00:00:00|32|64000|10|(null)|skylake,avx512
long|up|7-00:00:00|64|512000|2|(null)|epyc
gpu|up|2-00:00:00|48|256000|4|gpu:v100:4(S:0-1)|v100
gpu|up|2-00:00:00|96|1000000|2|gpu:h100:8|h100
old|down|infinite|8|16000|4|(null)|
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    programs: Path, wanted: dict[str, int], partition: str
) -> None:
    assert choose(read_partitions(), wanted, "train") == partition


def test_a_job_that_no_partition_takes_is_told_the_limits(programs: Path) -> None:
    with pytest.raises(
        WorkflowError,
        match=r"rule train: no partition accepts runtime=30, gpu=9: short has at most gpu 0; .*gpu has at most gpu 8",
    ):
        choose(read_partitions(), {"runtime": 30, "gpu": 9}, "train")


def test_a_table_names_the_candidates_and_its_limits_come_before_those_of_slurm(programs: Path, tmp_path: Path) -> None:
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
def test_a_wrong_table_is_refused(programs: Path, tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "table.yaml").write_text(text)
    with pytest.raises(WorkflowError, match=error):
        slurm.read_cluster(ExecutorSettings(partition_table=str(tmp_path / "table.yaml")))


def test_a_cluster_that_reports_nothing_is_left_to_its_own_default(programs: Path) -> None:
    program(programs, "sinfo", "echo down >&2; exit 1")
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
    programs: Path, config: str, needs_srun: bool
) -> None:
    program(programs, "scontrol", f"echo '{config}'")
    assert slurm.read_cluster(ExecutorSettings(partition="short")).needs_srun is needs_srun


def test_a_place_that_slurm_refuses_is_one_line_with_what_there_is(programs: Path) -> None:
    program(programs, "sbatch", "echo 'sbatch: error: invalid partition specified: moon' >&2; exit 1")
    with pytest.raises(
        WorkflowError, match=r"rule a: Slurm refuses --partition=moon: .*specified: moon; partitions: short, long, gpu"
    ):
        slurm.check_place({"partition": "moon"}, "rule a")
    program(programs, "sbatch", "echo 'Unable to contact slurm controller' >&2; exit 1")
    slurm.check_place({"partition": "moon"}, "rule a")  # the submission waits for Slurm, and then says so


@pytest.mark.parametrize(
    ("text", "value"),
    [("30", 30), ("30:30", 30.5), ("2:00:00", 120), ("1-12", 2160), ("1-00:30:00", 1470), ("infinite", math.inf)],
)
def test_time_limits_are_read_as_slurm_writes_them(text: str, value: float) -> None:
    assert minutes(text) == value
