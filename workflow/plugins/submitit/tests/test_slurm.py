"""Reading Slurm's answers, with programs that answer in place of a Slurm."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.request import sbatch_request
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm import (
    NO_ANSWER,
    UNKNOWN,
    Cluster,
    SlurmQueue,
    check_place,
    find_by_name,
    read_cluster,
)
from toy_project import write_program

LOG = logging.getLogger("test")
AWAY = "Unable to contact slurm controller"


class Programs:
    """A folder that is first on PATH, with programs that know of nothing; `asked` in it lists the calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for program in ("sacct", "squeue"):
            self.answer(program)

    def answer(self, program: str, *lines: str, error: str = "") -> None:
        fail = [f"echo '{error}' >&2", "exit 1"] if error else []
        write_program(
            self.folder, program, f"echo {program} >> {self.folder}/asked", "cat <<'END'", *lines, "END", *fail
        )

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().split()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return Programs(tmp_path / "bin")


SILENCE = dict.fromkeys(("7", "8_0", "8_1", "8_2", "8_3"), "")
ARRAY = ["7|RUNNING||n1|None", "8_[0-1,3%2]|PENDING|||Priority", "8_2|RUNNING||n2|None"]


@pytest.mark.parametrize(
    ("squeue", "error", "sacct", "found"),
    [
        (ARRAY, "", [], {"7": "RUNNING", **dict.fromkeys(("8_0", "8_1", "8_3"), "PENDING"), "8_2": "RUNNING"}),
        # no end is believed while squeue does not answer
        ([], AWAY, ["7|PREEMPTED|0:0|n1", "8_0|RUNNING|0:0|n2"], SILENCE | {"8_0": "RUNNING"}),
        ([], "slurm_load_jobs error: Invalid job id specified", [], {}),  # it has forgotten all of them
        *(([], "", [f"7|{unknown}|0:0|n1"], {}) for unknown in ("UNKNOWN", "", "?", "COMPLETEDISH")),
    ],
)
def test_the_states_of_all_jobs_take_one_question_to_squeue_and_one_to_the_accounting_if_jobs_are_missing(
    programs: Programs, squeue: list[str], error: str, sacct: list[str], found: dict[str, str]
) -> None:
    programs.answer("squeue", *squeue, error=error)
    programs.answer("sacct", *sacct)
    states = SlurmQueue(1, LOG).ask(["7", *(f"8_{task}" for task in range(4))])
    assert {job: state.state for job, state in states.items() if state != UNKNOWN} == found
    assert programs.asked == (["squeue"] if squeue else ["squeue", "sacct"])


def test_the_accounting_is_asked_about_jobs_that_squeue_has_forgotten(programs: Programs) -> None:
    programs.answer("squeue", "7|PENDING|||BeginTime")
    programs.answer("sacct", "7|PREEMPTED|0:0|n1", "8|CANCELLED by 1000|0:15|n2")
    found = SlurmQueue(1, LOG).ask(["7", "8"])
    assert found["7"].state == "PENDING"  # between its end and its requeue, sacct shows the end
    assert (found["8"].state, found["8"].exit_code, found["8"].nodes) == ("CANCELLED", "0:15", "n2")
    assert [found[job].is_alive for job in ("7", "8")] == [True, False]


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        ("Slurm accounting storage is disabled", ["squeue", "sacct", "squeue"]),
        ("Problem talking to the database", ["squeue", "sacct", "squeue", "sacct"]),
    ],
)
def test_a_cluster_without_accounting_is_asked_for_it_once(programs: Programs, error: str, asked: list[str]) -> None:
    programs.answer("sacct", error=error)
    programs.answer("squeue", "7|FAILED||n1|NonZeroExitCode")
    queue = SlurmQueue(1, LOG)
    for states in (queue.ask(["7", "8"]), queue.ask(["7", "8"])):
        assert (states["7"].state, states["8"]) == ("FAILED", UNKNOWN)
    assert programs.asked == asked


def test_questions_become_rare_while_nobody_answers(programs: Programs) -> None:
    for program in ("sacct", "squeue"):
        programs.answer(program, error=AWAY)
    now = 0.0
    queue = SlurmQueue(10, LOG, lambda: now)
    pauses = []
    for _ in range(8):
        assert queue.ask(["7"]) == {"7": NO_ANSWER}
        since = now
        while not queue.is_due():
            now += 10
        pauses.append(now - since)
    assert pauses == [20, 40, 80, 160, 320, 600, 600, 600]
    programs.answer("sacct", "7|RUNNING|0:0|n1")
    queue.ask(["7"])
    now += 10
    assert queue.is_due()


def test_a_job_is_found_by_its_name_in_the_queue(programs: Programs) -> None:
    line = "12|RUNNING|None|n1|train-abc-1-00000000"
    programs.answer("squeue", line, line)  # two tasks of an array
    assert find_by_name("train-abc-1-00000000") == "12"
    assert find_by_name("train-abc-2-00000000", tries=1) is None


SINFO = """\
short*|up|1:00:00|32|64000|10|(null)|skylake
long|up|7-00:00:00|32|64000|10|(null)|skylake,avx512
long|up|7-00:00:00|64|512000|2|(null)|epyc
gpu|up|2-00:00:00|48|256000|4|gpu:v100:4(S:0-1)|v100
gpu|up|2-00:00:00|96|1000000|2|gpu:h100:8|h100
old|down|infinite|8|16000|4|(null)|"""
TABLE = "partitions:\n  long: {max_runtime: 1-00:00:00}\n  gpu: {max_gpu: 2, available_gpu_models: [h100]}\n"


@pytest.fixture
def cluster(programs: Programs) -> Callable[..., Cluster]:
    """Reads a cluster, with a table of partitions if its text is given."""
    programs.answer("sinfo", SINFO)
    programs.answer("scontrol", "PreemptType = preempt/none")

    def read(table: str = "", **settings: str) -> Cluster:
        path = programs.folder / "table.yaml"
        path.write_text(table)
        return read_cluster(ExecutorSettings(partition_table=str(path) if table else None, **settings))

    return read


@pytest.mark.parametrize(
    ("resources", "partition"),
    [
        ({}, "short"),
        ({"runtime": 61}, "long"),
        ({"mem_mb": 100_000}, "long"),
        ({"cpus_per_task": 64}, "long"),
        ({"cpus_per_task": 65}, "gpu"),
        ({"cpus_per_task": 33, "tasks_per_node": 2}, "gpu"),
        ({"nodes": 11}, "long"),
        ({"gpus": 1}, "gpu"),
        ({"gpus": 8, "gpu_model": "h100"}, "gpu"),
        ({"constraint": "avx512|epyc"}, "long"),
        ({"slurm_partition": "old"}, "old"),
        ({"slurm_extra": "--partition=old"}, "old"),
    ],
)
def test_a_job_gets_the_default_if_it_fits_then_the_shortest_and_no_gpu_node_without_need(
    cluster: Callable[..., Cluster], resources: dict[str, Any], partition: str
) -> None:
    found = sbatch_request({"runtime": 30, **resources}, 1, ExecutorSettings(), cluster().partitions)
    assert found["partition"] == partition


@pytest.mark.parametrize(
    ("table", "resources", "error"),
    [
        ("", {"gpus": 9}, "runtime=30, threads=1, nodes=1, gpu=9: short has at most gpu 0; long .*; gpu has .* gpu 8$"),
        ("", {"gpus": 1, "gpu_model": "a100"}, "gpu has at most GPUs v100,h100$"),
        ("", {"constraint": "moon"}, "long has at most features skylake,avx512,epyc; gpu has"),
        (TABLE, {"gpus": 3}, "long has at most gpu 0; gpu has at most gpu 2$"),
    ],
)
def test_a_job_that_no_partition_takes_is_told_the_limits(
    cluster: Callable[..., Cluster], table: str, resources: dict[str, Any], error: str
) -> None:
    with pytest.raises(WorkflowError, match=rf"^no partition accepts .*{error}"):
        sbatch_request({"runtime": 30, **resources}, 1, ExecutorSettings(), cluster(table).partitions)


def test_a_table_names_the_candidates_and_its_limits_come_before_those_of_slurm(
    programs: Programs, cluster: Callable[..., Cluster]
) -> None:
    long, gpu = cluster(TABLE).partitions
    assert (long.name, long.max_runtime, long.max_threads, long.max_gpu) == ("long", 1440, 64, 0)
    assert (gpu.name, gpu.max_runtime, gpu.max_gpu, gpu.available_gpu_models) == ("gpu", 2880, 2, ("h100",))
    programs.answer("sinfo", error=AWAY)
    assert [(found.max_threads, found.max_gpu) for found in cluster(TABLE).partitions] == [
        (math.inf, math.inf),
        (math.inf, 2),
    ]
    assert cluster().partitions == ()  # Slurm uses its own default
    assert cluster(TABLE, partition="gpu").partitions == ()


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ("partitions: {moon: {}}", "Slurm has no partition moon; there are short, long, gpu"),
        ("partitions: {gpu: {max_gpus: 2}}", "partition gpu: no such limit: max_gpus; there are max_runtime"),
        ("partitions: {gpu: {max_gpu: many}}", "not a table of partitions"),
        ("gpu: {max_gpu: 2}", "not a table of partitions"),
    ],
)
def test_a_wrong_table_is_refused(cluster: Callable[..., Cluster], table: str, error: str) -> None:
    with pytest.raises(WorkflowError, match=error):
        cluster(table)


@pytest.mark.parametrize(
    ("text", "value"),
    [("30", 30), ("30:30", 30.5), ("2:00:00", 120), ("1-12", 2160), ("1-00:30:00", 1470), ("infinite", math.inf)],
)
def test_time_limits_are_read_as_slurm_writes_them(cluster: Callable[..., Cluster], text: str, value: float) -> None:
    assert cluster(f"partitions: {{gpu: {{max_runtime: {text}}}}}").partitions[0].max_runtime == value


@pytest.mark.parametrize(
    ("config", "is_so"),
    [
        ("PreemptType = preempt/none", False),
        ("PreemptType = preempt/qos\nPreemptParameters = send_user_signal", False),
        ("PreemptType = preempt/qos\nPreemptParameters = (null)", True),
    ],
)
def test_some_clusters_signal_only_the_steps_of_srun_before_a_preemption(
    programs: Programs, cluster: Callable[..., Cluster], config: str, is_so: bool
) -> None:
    programs.answer("scontrol", config)
    assert cluster().needs_srun is is_so
    programs.answer("scontrol", error=AWAY)
    assert not cluster().needs_srun


def test_a_place_that_slurm_refuses_is_one_line_with_what_there_is(programs: Programs) -> None:
    programs.answer("sinfo", SINFO)
    programs.answer("sbatch", error="sbatch: error: invalid partition specified: moon")
    with pytest.raises(
        WorkflowError, match=r"Slurm refuses --partition=moon: .*specified: moon; partitions: short, long, gpu$"
    ):
        check_place({"partition": "moon"})
    programs.answer("sbatch", error=AWAY)
    check_place({"partition": "moon"})  # the submission waits for Slurm, and then says so
