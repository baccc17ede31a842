"""What is submitted and what is taken over, with programs that answer like Slurm's."""

import logging
import os
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snakemake_executor_plugin_submitit import store, submission
from snakemake_executor_plugin_submitit.records import read_jobs
from snakemake_executor_plugin_submitit.request import Job, prepare
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm import NoAnswer, SlurmQueue
from snakemake_executor_plugin_submitit.store import digest, private_folder, write_json
from snakemake_executor_plugin_submitit.submission import Dispatcher, NotSubmitted, batches, submit_script, visible_gpus
from toy_project import write_program

LOG = logging.getLogger("test")
AWAY = "echo 'Unable to contact slurm controller' >&2; exit 1"
ACCEPT_AND_FAIL = "echo 'Socket timed out on send/recv operation' >&2; exit 1"
REFUSE = "echo 'invalid partition specified: moon' >&2; exit 1"


def job(name: str = "train", **changes: Any) -> Any:
    """A job of Snakemake, as far as it matters."""
    rule = SimpleNamespace(name=name, shellcmd="train {output}")
    fields = {
        "output": ["a"],
        "params": [],
        "resources": {},
        "input": [],
        "threads": 1,
        "log": [],
        "wildcards_dict": {},
    }
    return SimpleNamespace(**{"name": name, "rule": rule, "is_group": lambda: False, **fields, **changes})


class Slurm:
    """A Slurm with one job, 100, which has the name that was submitted last."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sbatch("echo 100")
        self.state("RUNNING")

    def answers(self, program: str, *lines: str) -> None:
        write_program(self.root / "bin", program, *lines)

    def sbatch(self, *lines: str) -> None:
        name = f"printf '%s\\n' \"$@\" | grep -o 'job-name=.*' | cut -d= -f2 > {self.root}/name"
        self.answers("sbatch", f"echo x >> {self.root}/submissions", name, *lines)

    def state(self, state: str, reason: str = "None", nodes: str = "n1") -> None:
        self.answers("sacct", f"[[ $* == *JobName* ]] || echo '100|{state}|0:0|{nodes}'")
        by_name = f'if [[ $* == *--name* ]]; then echo "100|{state}|{reason}|{nodes}|$(cat {self.root}/name)"; '
        self.answers("squeue", f"{by_name}else echo '100|{state}||{nodes}|{reason}'; fi")

    @property
    def submissions(self) -> int:
        return len((self.root / "submissions").read_text().split())

    def driver(self, **settings: Any) -> Dispatcher:
        return Dispatcher(ExecutorSettings(**settings), private_folder(self.root / "folder"), SlurmQueue(1, LOG), LOG)

    def start(self, *, is_forced: bool = False, **changes: Any) -> Job:
        """A job, by a driver of its own."""
        (tracked,), failed = dispatch(self.driver(), job(**changes), is_forced=is_forced)
        assert not failed
        return tracked

    def fail(self, **changes: Any) -> str:
        """Why a driver of its own can neither submit the job nor take it over."""
        tracked, ((_, why),) = dispatch(self.driver(), job(**changes))
        assert not tracked
        return why


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return Slurm(tmp_path)


def prepared(driver: Dispatcher, *jobs: Any, is_forced: bool = False) -> list[Job]:
    return [prepare(job, "true", driver.folder, driver.settings, is_forced) for job in jobs]


def dispatch(driver: Dispatcher, *jobs: Any, is_forced: bool = False) -> tuple[list[Job], list[Any]]:
    done = list(driver.dispatch(prepared(driver, *jobs, is_forced=is_forced)))
    return [given for given, why in done if not why], [(given, why) for given, why in done if why]


def finish(tracked: Job, exit_code: int, kind: str | None) -> None:
    write_json(tracked.files.outcome(tracked.record.number), {"exit_code": exit_code, "failure_class": kind})


def test_what_was_submitted_is_taken_over_by_the_next_driver_also_with_other_resources(slurm: Slurm) -> None:
    first = slurm.start(resources={"runtime": 5})
    assert first.record.job_id == "100"
    assert slurm.start(resources={"runtime": 50}, threads=4).record == first.record
    assert slurm.submissions == 1


@pytest.mark.parametrize(("state", "waits"), [("COMPLETING", True), ("RUNNING", True), ("CANCELLED", False)])
def test_a_job_starts_after_the_end_of_the_cancelled_one_which_may_still_save(
    slurm: Slurm, state: str, waits: bool
) -> None:
    first = slurm.start()
    finish(first, 1, "cancelled")
    first.save(is_open=False)  # as a driver does at Ctrl-C
    slurm.state(state)
    second = slurm.start()
    script = Path(second.record.folder) / "submission.sh"
    assert ("--dependency=afterany:100 " in script.read_text()) == waits
    assert slurm.submissions == 2


def test_the_record_is_there_before_sbatch_is_called(slurm: Slurm) -> None:
    slurm.sbatch(f"cp {slurm.root}/folder/jobs/*/record.json {slurm.root}/before.json; echo 100")
    slurm.start()
    assert '"job_id": ""' in (slurm.root / "before.json").read_text()


def test_a_job_whose_driver_died_within_sbatch_is_found_by_its_name(slurm: Slurm) -> None:
    first = slurm.start()
    store.save(first.files, replace(first.record, job_id=""))
    assert slurm.start().record.job_id == "100"
    assert slurm.submissions == 1


def test_a_job_whose_driver_died_within_sbatch_and_that_slurm_has_forgotten_is_found_by_its_own_files(
    slurm: Slurm,
) -> None:
    first = slurm.start()
    store.save(first.files, replace(first.record, job_id=""))
    store.add_attempt(first.files.attempts, "start", submission=1, job_id="100")
    finish(first, 0, None)
    slurm.answers("squeue")
    Path("a").touch()
    assert slurm.start().record.job_id == "100"
    assert slurm.submissions == 1


@pytest.mark.parametrize("answer", [ACCEPT_AND_FAIL, "echo mumble"], ids=["error", "nonsense"])
def test_a_job_that_was_accepted_although_sbatch_failed_is_found_by_its_name(slurm: Slurm, answer: str) -> None:
    slurm.sbatch(answer)
    assert slurm.start().record.job_id == "100"
    assert slurm.submissions == 1


def test_a_refused_job_has_ended_for_other_programs_and_is_submitted_by_the_next_driver(slurm: Slurm) -> None:
    slurm.sbatch(REFUSE)
    slurm.answers("squeue")
    assert "invalid partition specified: moon" in slurm.fail()
    assert slurm.submissions == 1
    (found,) = read_jobs(slurm.root / "folder").values()
    assert (found.state, found.failure_class) == ("ended", "user")
    assert found.message.startswith("not submitted: sbatch failed with exit code 1: invalid partition specified: moon")
    slurm.sbatch("echo 100")
    assert slurm.start().record.job_id == "100"
    (found,) = read_jobs(slurm.root / "folder").values()
    assert found.failure_class is None


def test_a_job_whose_second_submission_slurm_refuses_keeps_the_class_of_its_failure(slurm: Slurm) -> None:
    driver = slurm.driver()
    (tracked,), _ = dispatch(driver, job())
    slurm.sbatch(REFUSE)
    slurm.answers("squeue")
    with pytest.raises(NotSubmitted, match="moon"):
        driver.submit_again(tracked, "oom", "n1")
    (found,) = read_jobs(slurm.root / "folder").values()
    assert (found.state, found.failure_class) == ("ended", "oom")
    assert found.message.startswith("not submitted again: sbatch failed")


def test_the_record_that_slurm_keeps_of_a_refused_job_is_no_acceptance(slurm: Slurm) -> None:
    slurm.sbatch(REFUSE)
    slurm.state("FAILED", "BadConstraints", nodes="")
    assert "invalid partition specified: moon" in slurm.fail()
    assert slurm.submissions == 1
    assert slurm.fail()  # nor for the next driver, if this one had died within sbatch
    assert slurm.submissions == 2


def test_a_job_for_whose_record_there_is_no_space_fails_in_one_line_and_others_go_on(
    slurm: Slurm,
) -> None:
    one = slurm.driver()
    (kept,), _ = dispatch(one, job())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        _, ((_, why),) = dispatch(one, job(output=["b"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.fullmatch(r"--submitit-folder: \S+: File too large; free some space there, or name another folder", why)
    assert list(one.jobs.values()) == [kept]
    assert slurm.submissions == 1


def test_two_drivers_at_the_same_time_submit_once(slurm: Slurm) -> None:
    slurm.sbatch("sleep 0.5; echo 100")
    with ThreadPoolExecutor() as pool:
        started = [pool.submit(slurm.start) for _ in range(3)]
    assert [tracked.result().record.job_id for tracked in started] == ["100"] * 3
    assert slurm.submissions == 1


def test_two_drivers_that_wait_for_a_job_submit_it_again_once(slurm: Slurm) -> None:
    one, other = slurm.driver(), slurm.driver()
    ((first,), _), ((second,), _) = dispatch(one, job()), dispatch(other, job())
    slurm.sbatch("echo 101")
    again = one.submit_again(first, "oom", "n1")
    assert other.submit_again(second, "oom", "n1").record == again.record
    assert again.record.job_id == "101"
    assert slurm.submissions == 2


@pytest.mark.parametrize("text", ["", "{", '{"number": 1, "of_another_version": 1, "is_open": true}'])
def test_a_job_whose_record_cannot_be_read_is_not_submitted_beside_the_one_that_may_run(
    slurm: Slurm, text: str
) -> None:
    files = slurm.start().files
    store.add_attempt(files.attempts, "start", submission=1)
    files.record.write_text(text)
    why = slurm.fail()
    assert re.fullmatch(rf"{files.record}: .*; when no job makes these outputs any more, delete it, .*", why)
    assert slurm.submissions == 1
    assert files.attempts.exists()
    files.record.write_text('{"of_another_version": 1, "is_open": false}')
    slurm.start()
    assert slurm.submissions == 2


def test_a_finished_job_is_taken_over_if_its_outputs_are_there_and_newer_than_its_inputs(slurm: Slurm) -> None:
    Path("input").touch()
    finish(slurm.start(input=["input"]), 0, None)
    finish(slurm.start(input=["input"]), 0, None)
    assert slurm.submissions == 2  # without outputs
    Path("a").touch()
    slurm.start(input=["input"])
    assert slurm.submissions == 2
    os.utime("a", (1, 1))
    finish(slurm.start(input=["input"]), 0, None)
    assert slurm.submissions == 3
    Path("a").touch()
    slurm.start(input=["input"], is_forced=True)
    assert slurm.submissions == 4


def test_a_job_that_failed_was_killed_or_reported_is_submitted_again(slurm: Slurm) -> None:
    finish(slurm.start(), 1, "bug")
    second = slurm.start()
    assert second.record.number == 2
    store.save(second.files, replace(second.record, is_open=False))
    assert slurm.start().record.number == 3
    slurm.state("CANCELLED")
    assert slurm.start().record.number == 4
    assert slurm.submissions == 4


def test_while_slurm_does_not_answer_a_job_counts_as_alive(slurm: Slurm) -> None:
    slurm.start()
    for program in ("sacct", "squeue"):
        slurm.answers(program, AWAY)
    assert slurm.start().record.job_id == "100"
    assert slurm.submissions == 1


def test_other_parameters_are_refused_while_the_job_runs_and_submitted_after_it(slurm: Slurm) -> None:
    slurm.start(params=[0.1])
    why = slurm.fail(params=[0.2])
    assert "job 100 still makes these outputs with other parameters; wait for it or type `scancel 100`" in why
    slurm.state("FAILED")
    slurm.start(params=[0.2])
    assert slurm.submissions == 2


def test_a_retry_asks_for_more_memory_away_from_the_nodes_that_failed(slurm: Slurm) -> None:
    one = slurm.driver()
    (first,), _ = dispatch(one, job(resources={"mem_mb": 1000, "exclude": "n7"}))
    again = one.submit_again(one.submit_again(first, "node_fail", "n[1-2]"), "oom", "n3")
    script = (Path(again.record.folder) / "submission.sh").read_text()
    assert "--mem=1500M" in script
    assert "'--exclude=n7,n[1-2]'" in script
    assert again.record.retries == {"node_fail": 1, "oom": 1}
    (other,), _ = dispatch(one, job(output=["b"], resources={"slurm_extra": "--mem=2G"}))
    again = one.submit_again(other, "oom", "")
    assert "--mem=3G" in (Path(again.record.folder) / "submission.sh").read_text()


def test_short_jobs_of_one_rule_make_an_array_and_others_do_not(slurm: Slurm) -> None:
    one, short = slurm.driver(array_size=3), {"runtime": 10}
    jobs = [job(output=[f"a{i}"], resources=short) for i in range(4)]
    jobs += [job("other", output=["b"], resources=short), job(output=["c"], resources={**short, "nodes": 2})]
    jobs += [job(output=[f"long{i}"], resources={"runtime": 11}) for i in (1, 2)]
    given = prepared(one, *jobs)
    assert sorted(len(batch) for batch in batches(given, 3)) == [1, 1, 1, 1, 1, 3]
    assert all(len(batch) == 1 for batch in batches(given, 0))
    tracked = [found for found, _ in one.dispatch(given[:3])]
    assert [found.record.job_id for found in tracked] == ["100_0", "100_1", "100_2"]
    assert slurm.submissions == 1
    assert "--array=0-2" in (Path(tracked[0].record.folder) / "submission.sh").read_text()


def test_long_jobs_start_by_srun_where_slurm_signals_its_steps_first(slurm: Slurm) -> None:
    one = slurm.driver()
    scripts = []
    for runtime in (10, 11):
        given = job(output=[f"{runtime}"], resources={"runtime": runtime})
        ((tracked, _),) = one.dispatch([prepare(given, "true", one.folder, one.settings, False, needs_srun=True)])
        scripts.append((Path(tracked.record.folder) / "submission.sh").read_text())
    assert ["exec srun" in script for script in scripts] == ["--signal=USR2" in script for script in scripts]
    assert ["exec srun" in script for script in scripts] == [False, True]


def test_local_jobs_get_gpus_of_their_own(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    one = slurm.driver(cluster="local")
    monkeypatch.setattr(submission, "start_locally", lambda *given: SimpleNamespace(pid=os.getpid()))
    jobs = [
        dispatch(one, job(output=[f"{index}"], resources={"gpus": count}))[0][0]
        for index, count in enumerate((2, 1, 1))
    ]
    assert [tracked.record.gpus for tracked in jobs] == [["2", "3"], ["5"], ["2"]]  # the last one is shared
    assert one.submit_again(jobs[1], "lost", "").record.gpus == ["5"]


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("2, 3,5", ["2", "3", "5"]),
        ("GPU-8932f937-d72c,MIG-GPU-8932f937/1/2,MIG-41b9", ["GPU-8932f937-d72c", "MIG-GPU-8932f937/1/2", "MIG-41b9"]),
        ("1,-1,0", ["1"]),  # CUDA ignores what comes after a name that it does not know
        ("-1", []),
        ("NoDevFiles", []),  # by Slurm, for jobs without GPUs
        ("", []),
    ],
)
def test_the_gpus_of_this_machine_are_those_that_cuda_would_use(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, visible: str, gpus: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == gpus
    monkeypatch.setattr(submission, "start_locally", lambda *given: SimpleNamespace(pid=os.getpid()))
    (tracked,), _ = dispatch(slurm.driver(cluster="local"), job(resources={"gpus": 3}))
    assert tracked.record.gpus == gpus


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_folder(tmp_path / "own").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="--submitit-folder"):
        private_folder(tmp_path / "own")


def test_the_key_of_a_job_does_not_change_from_one_process_to_the_next() -> None:
    first = digest([object(), {"b", "a"}, Path("p")])
    assert first == digest([object(), {"a", "b"}, Path("p")]) != digest([object(), {"a", "c"}, Path("p")])


def test_sbatch_is_not_called_again_while_nobody_can_say_whether_the_job_was_accepted(slurm: Slurm) -> None:
    slurm.sbatch(ACCEPT_AND_FAIL)
    answers = ["", "", "100", *[""] * 4]

    def find() -> str:
        answer = answers.pop(0)
        if not answer:
            raise NoAnswer("squeue failed")
        return answer

    assert submit_script(["sbatch"], find, pauses_s=(0, 0, 0)) == "100"
    assert slurm.submissions == 1
    with pytest.raises(NotSubmitted, match="whether the job was accepted is unknown"):
        submit_script(["sbatch"], find, pauses_s=(0, 0, 0))
    assert slurm.submissions == 2


def test_an_sbatch_that_fails_in_passing_is_called_again(slurm: Slurm) -> None:
    slurm.sbatch("[ -e failed ] && { echo 101; exit; }", "touch failed", AWAY)
    assert submit_script(["sbatch"], lambda: None, pauses_s=(0,)) == "101"
    assert slurm.submissions == 2
