"""What is submitted and what is taken over, with programs that answer like Slurm's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snakemake_executor_plugin_submitit import store
from snakemake_executor_plugin_submitit.executor import batches
from snakemake_executor_plugin_submitit.monitor import Tracked
from snakemake_executor_plugin_submitit.request import prepare
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm import SlurmQueue
from snakemake_executor_plugin_submitit.store import private_folder, write_json
from snakemake_executor_plugin_submitit.submission import Dispatcher, SubmissionError, submit_to_slurm, visible_gpus

LOG = logging.getLogger("test")
SBATCH = """\
#!/bin/bash
echo x >> {root}/submissions
grep -o 'job-name=.*' "$2" | cut -d= -f2 > {root}/name
sleep {seconds}
{answer}
"""
ACCEPT = "echo 100"
ACCEPT_AND_FAIL = "echo 'Socket timed out on send/recv operation' >&2; exit 1"


@dataclass
class Job:
    """A job of Snakemake, as far as it matters."""

    outputs: Sequence[str]
    params: Sequence[Any] = ()
    resources: dict[str, Any] = field(default_factory=dict)
    input: Sequence[str] = ()
    name: str = "train"
    threads: int = 1
    log: Sequence[str] = ()
    wildcards_dict: dict[str, str] = field(default_factory=dict)

    @property
    def output(self) -> Sequence[str]:
        return self.outputs

    @property
    def rule(self) -> Any:
        return SimpleNamespace(name=self.name, shellcmd="train {output}")

    def is_group(self) -> bool:
        return False


@dataclass
class Slurm:
    root: Path

    def answers(self, program: str, text: str) -> None:
        path = self.root / "bin" / program
        path.write_text(text)
        path.chmod(0o755)

    def sbatch(self, answer: str, seconds: float = 0) -> None:
        self.answers("sbatch", SBATCH.format(root=self.root, answer=answer, seconds=seconds))

    def state(self, state: str) -> None:
        """Of job 100; it also has the name that was submitted last."""
        row = f"100|{state}|0:0|n1"
        self.answers("sacct", f"#!/bin/bash\n[[ $* == *JobName* ]] || echo '{row}'\n")
        by_name = f'if [[ $* == *--name* ]]; then echo "100|$(cat {self.root}/name)"; '
        self.answers("squeue", f"#!/bin/bash\n{by_name}else echo '100|{state}||n1|'; fi\n")

    @property
    def submissions(self) -> int:
        path = self.root / "submissions"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    programs = Slurm(tmp_path)
    programs.answers("srun", "#!/bin/bash\n")
    programs.sbatch(ACCEPT)
    programs.state("RUNNING")
    return programs


def driver(slurm: Slurm, **changes: Any) -> Dispatcher:
    settings = ExecutorSettings(**changes)
    return Dispatcher(settings, private_folder(slurm.root / "folder"), SlurmQueue(1, LOG), LOG)


def dispatch(driver: Dispatcher, *jobs: Job, is_forced: bool = False) -> tuple[list[Tracked], list[Any]]:
    prepared = [prepare(job, "true", driver.folder, driver.settings, is_forced) for job in jobs]
    return driver.dispatch(prepared, driver.known(prepared))


def make_output(name: str) -> None:
    Path(name).write_text("made")


def test_what_was_submitted_is_taken_over_by_the_next_driver(slurm: Slurm) -> None:
    (first,), _ = dispatch(driver(slurm), Job(["a"]))
    (second,), _ = dispatch(driver(slurm), Job(["a"]))
    assert first.record == second.record
    assert first.record.job_id == "100"
    assert slurm.submissions == 1


def test_the_record_is_there_before_sbatch_is_called(slurm: Slurm) -> None:
    slurm.sbatch(f"cp {slurm.root}/folder/jobs/*/record.json {slurm.root}/before.json; echo 100")
    dispatch(driver(slurm), Job(["a"]))
    assert '"state": "submitting"' in (slurm.root / "before.json").read_text()


def test_a_job_whose_driver_died_within_sbatch_is_found_by_its_name(slurm: Slurm) -> None:
    (first,), _ = dispatch(driver(slurm), Job(["a"]))
    store.save(first.files, replace(first.record, state=store.SUBMITTING, job_id=""))
    (second,), _ = dispatch(driver(slurm), Job(["a"]))
    assert second.record.job_id == "100"
    assert slurm.submissions == 1


def test_a_job_that_was_accepted_although_sbatch_failed_is_found_by_its_name(slurm: Slurm) -> None:
    slurm.sbatch(ACCEPT_AND_FAIL)
    (tracked,), failed = dispatch(driver(slurm), Job(["a"]))
    assert tracked.record.job_id == "100"
    assert not failed
    assert slurm.submissions == 1


def test_a_refused_job_fails_with_what_sbatch_said(slurm: Slurm) -> None:
    slurm.sbatch("echo 'invalid partition specified: moon' >&2; exit 1")
    slurm.answers("squeue", "#!/bin/bash\n")
    tracked, ((_, why),) = dispatch(driver(slurm), Job(["a"]))
    assert not tracked
    assert "invalid partition specified: moon" in why
    assert slurm.submissions == 1


def test_two_drivers_at_the_same_time_submit_once(slurm: Slurm) -> None:
    slurm.sbatch(ACCEPT, seconds=0.5)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(dispatch(driver(slurm), Job(["a"])))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tracked[0].record.job_id for tracked, _ in results] == ["100"] * 3
    assert slurm.submissions == 1


def finish(job: Tracked, exit_code: int, kind: str | None) -> None:
    write_json(job.files.outcome(job.record.number), {"exit_code": exit_code, "failure_class": kind})


def test_a_finished_job_is_taken_over_if_its_outputs_are_there(slurm: Slurm) -> None:
    (first,), _ = dispatch(driver(slurm), Job(["a"]))
    finish(first, 0, None)
    make_output("a")
    dispatch(driver(slurm), Job(["a"]))
    assert slurm.submissions == 1
    dispatch(driver(slurm), Job(["a"]), is_forced=True)
    assert slurm.submissions == 2


def test_a_finished_job_without_its_outputs_or_with_newer_inputs_is_submitted_again(slurm: Slurm) -> None:
    import os

    make_output("input")
    job = Job(["a"], input=["input"])
    (first,), _ = dispatch(driver(slurm), job)
    finish(first, 0, None)
    (second,), _ = dispatch(driver(slurm), job)
    assert second.record.number == 2
    finish(second, 0, None)
    make_output("a")
    os.utime("a", (1, 1))
    dispatch(driver(slurm), job)
    assert slurm.submissions == 3


@pytest.mark.parametrize("state", [store.REPORTED, store.CANCELLED])
def test_a_job_that_snakemake_knows_the_end_of_is_not_taken_over(slurm: Slurm, state: str) -> None:
    (first,), _ = dispatch(driver(slurm), Job(["a"]))
    store.save(first.files, replace(first.record, state=state))
    dispatch(driver(slurm), Job(["a"]))
    assert slurm.submissions == 2


def test_a_job_that_failed_or_was_killed_meanwhile_is_submitted_again(slurm: Slurm) -> None:
    (first,), _ = dispatch(driver(slurm), Job(["a"]))
    finish(first, 1, "bug")
    (second,), _ = dispatch(driver(slurm), Job(["a"]))
    assert second.record.number == 2
    slurm.state("CANCELLED")
    dispatch(driver(slurm), Job(["a"]))
    assert slurm.submissions == 3


def test_while_slurm_does_not_answer_a_job_counts_as_alive(slurm: Slurm) -> None:
    dispatch(driver(slurm), Job(["a"]))
    for program in ("sacct", "squeue"):
        slurm.answers(program, "#!/bin/bash\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    (second,), _ = dispatch(driver(slurm), Job(["a"]))
    assert second.record.job_id == "100"
    assert slurm.submissions == 1


def test_other_parameters_are_refused_while_the_job_runs_and_submitted_after_it(slurm: Slurm) -> None:
    dispatch(driver(slurm), Job(["a"], params=[0.1]))
    _, ((_, why),) = dispatch(driver(slurm), Job(["a"], params=[0.2]))
    assert "job 100 still makes these outputs with other parameters" in why
    assert "scancel 100" in why
    slurm.state("FAILED")
    dispatch(driver(slurm), Job(["a"], params=[0.2]))
    assert slurm.submissions == 2


def test_other_resources_are_the_same_job(slurm: Slurm) -> None:
    dispatch(driver(slurm), Job(["a"], resources={"runtime": 5}))
    dispatch(driver(slurm), Job(["a"], resources={"runtime": 50}, threads=4))
    assert slurm.submissions == 1


def test_a_retry_asks_for_more_memory_away_from_the_nodes_that_failed(slurm: Slurm) -> None:
    one = driver(slurm)
    (first,), _ = dispatch(one, Job(["a"], resources={"mem_mb": 1000, "exclude": "n7"}))
    one.submit_again(first, "node_fail", ["n[1-2]"])
    again = one.submit_again(first, "oom", ["n3"])
    script = (Path(again.record.folder) / "submission.sh").read_text()
    assert "--mem=1500M" in script
    assert "--exclude=n7,n3" in script
    assert again.record.retries == {"oom": 1}


def test_short_jobs_of_one_rule_make_an_array_and_others_do_not(slurm: Slurm) -> None:
    one = driver(slurm, array_size=3)
    short = {"runtime": 10}
    jobs = [Job([f"a{i}"], resources=short) for i in range(4)] + [Job(["b"], name="other", resources=short)]
    jobs += [
        Job(["c"], resources={**short, "nodes": 2}),
        *(Job([f"long{i}"], resources={"runtime": 11}) for i in (1, 2)),
    ]
    prepared = [prepare(job, "true", one.folder, one.settings) for job in jobs]
    assert sorted(len(batch) for batch in batches(prepared, 3)) == [1, 1, 1, 1, 1, 3]
    assert all(len(batch) == 1 for batch in batches(prepared, 0))
    tracked, _ = one.dispatch(prepared[:3], one.known(prepared[:3]))
    assert [job.record.job_id for job in tracked] == ["100_0", "100_1", "100_2"]
    assert slurm.submissions == 1
    assert "#SBATCH --array=0-2" in (Path(tracked[0].record.folder) / "submission.sh").read_text()


def test_local_jobs_get_gpus_of_their_own(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert visible_gpus() == [2, 3, 5]
    one = driver(slurm, cluster="local")
    assert one._take_gpus(2) == (2, 3)
    assert one._take_gpus(1) == (5,)
    assert one._take_gpus(1) == (2,)  # shared


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_folder(tmp_path / "own").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="--submitit-folder"):
        private_folder(tmp_path / "own")


def test_the_key_of_a_job_does_not_change_from_one_process_to_the_next() -> None:
    first = store.content_key("train", ["a"], [object(), {"b", "a"}, Path("p")])
    assert first == store.content_key("train", ["a"], [object(), {"a", "b"}, Path("p")])
    assert first != store.content_key("train", ["a"], [object(), {"a", "c"}, Path("p")])


def test_sbatch_is_not_called_again_while_nobody_can_say_whether_the_job_was_accepted(tmp_path: Path) -> None:
    from snakemake_executor_plugin_submitit.slurm import NoAnswer

    slurm = Slurm(tmp_path)
    (tmp_path / "bin").mkdir()
    slurm.sbatch(ACCEPT_AND_FAIL)
    answers: list[Any] = [NoAnswer("squeue failed"), NoAnswer("squeue failed"), "100"]

    def find() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    (tmp_path / "submission.sh").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
        assert submit_to_slurm(tmp_path, find, pauses_s=(0, 0, 0)).job_id == "100"
        assert slurm.submissions == 1
        answers[:] = [NoAnswer("squeue failed")] * 4
        with pytest.raises(SubmissionError, match="whether the job was accepted is unknown"):
            submit_to_slurm(tmp_path, find, pauses_s=(0, 0, 0))
        assert slurm.submissions == 2
