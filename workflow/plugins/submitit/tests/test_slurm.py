"""Reading Slurm's answers, with programs that answer in place of a Slurm."""

import logging
from pathlib import Path

import pytest
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.slurm import (
    NO_ANSWER,
    UNKNOWN,
    NoAnswer,
    SlurmQueue,
    check_place,
    find_by_name,
    signals_steps_first,
    time_limits,
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


@pytest.mark.parametrize(
    ("config", "is_so"),
    [
        ("PreemptType = preempt/none", False),
        ("PreemptType = preempt/qos\nPreemptParameters = send_user_signal", False),
        ("PreemptType = preempt/qos\nPreemptParameters = (null)", True),
    ],
)
def test_some_clusters_signal_only_the_steps_of_srun_before_a_preemption(
    programs: Programs, config: str, is_so: bool
) -> None:
    programs.answer("scontrol", config)
    assert signals_steps_first() is is_so
    programs.answer("scontrol", error=AWAY)
    with pytest.raises(NoAnswer, match=AWAY):
        signals_steps_first()


def test_a_place_that_slurm_refuses_is_one_line_with_what_there_is(programs: Programs) -> None:
    programs.answer("sinfo", "short", "long", "gpu")
    programs.answer("sbatch", error="sbatch: error: invalid partition specified: moon")
    with pytest.raises(
        WorkflowError, match=r"Slurm refuses --partition=moon: .*specified: moon; partitions: short, long, gpu$"
    ):
        check_place({"partition": "moon"})
    programs.answer("sbatch", error="allocation failure: Invalid feature specification")
    with pytest.raises(WorkflowError, match=r"Slurm refuses --partition=gpu --constraint=lava: .*Invalid feature"):
        check_place({"partition": "gpu", "constraint": "lava"})
    programs.answer("sbatch", error=AWAY)
    check_place({"partition": "moon"})  # the submission waits for Slurm, and then says so


def test_the_time_limits_of_partitions_are_minutes_and_that_of_the_default_one_has_no_name(programs: Programs) -> None:
    programs.answer("sinfo", "short*|20:00", "day|1-00:00:00", "long|2:30:00", "free|infinite")
    assert time_limits() == {"short": 20, "": 20, "day": 1440, "long": 150}
    programs.answer("sinfo", error=AWAY)
    with pytest.raises(NoAnswer, match=AWAY):
        time_limits()
