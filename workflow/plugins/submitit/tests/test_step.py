"""What runs within a job, without a scheduler around it."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil
import pytest

from snakemake_executor_plugin_submitit import processes
from snakemake_executor_plugin_submitit import step as step_module
from snakemake_executor_plugin_submitit.processes import Relay, sentinel
from snakemake_executor_plugin_submitit.step import JobStep, job_id
from snakemake_executor_plugin_submitit.store import (
    End,
    JobFiles,
    Record,
    add_attempt,
    read_attempts,
    read_json,
    save,
    write_json,
)
from toy_project import write_program

Requeued = type("Requeued", (Exception,), {})


def make_step(path: Path, command: str, gpus: int = 0, **changes: Any) -> JobStep:
    files = JobFiles(path / "job")
    files.path.mkdir(exist_ok=True)
    requested = {"runtime": 60, "gpu": gpus}
    record = Record("key", "name", 1, "slurm", str(files.submission(1)), requested=requested)
    values = {"signal_delay_s": 60.0, "requeue_limit": 5, **changes}
    return JobStep(files, record, command, str(path), **values)


@contextmanager
def requeue_raises(error: Exception) -> Iterator[None]:
    """In place of submitit's handler, which ends the process."""

    def requeue(number: int, frame: object) -> None:
        raise error

    previous = signal.signal(signal.SIGUSR2, requeue)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, previous)


@pytest.fixture
def requeues() -> Iterator[None]:
    with requeue_raises(Requeued()):
        yield


def run(step: JobStep) -> dict[str, object]:
    step()
    return read_json(step.files.outcome(1))


def failing(path: Path, code: int) -> str:
    """A program that fails like a Snakemake whose rule ended with `code`."""
    script = path / "snakemake_of_the_job.py"
    script.write_text(f"import sys\nsys.exit({code} and 'Command x returned non-zero exit status {code}.')\n")
    return f"{sys.executable} {script}"


@pytest.mark.parametrize(
    ("said", "code", "kind"),
    [
        ("", 0, None),
        ("", 1, "bug"),
        ("", 2, "user"),
        ("", 96, "env"),
        ("", 137, "node_fail"),
        ("", 143, "bug"),
        ('{"failure_class": "non_finite", "message": "loss is nan"}', 1, "non_finite"),
        ("[1, ", 2, "user"),  # nonsense
    ],
)
def test_what_the_job_says_of_itself_decides_on_the_class_else_the_exit_code_of_its_command(
    tmp_path: Path, said: str, code: int, kind: str | None
) -> None:
    outcome = run(make_step(tmp_path, f"echo '{said}' > $SUBMITIT_JOB_STATUS; {failing(tmp_path, code)}"))
    assert (outcome["failure_class"], outcome["exit_code"]) == (kind, code)
    assert outcome["message"] == ("loss is nan" if kind == "non_finite" else "")


@pytest.mark.parametrize("image", ["image.sif", "~/image.sif"])
def test_a_job_runs_in_a_container_with_its_folders_and_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str
) -> None:
    """With a stand-in for Apptainer, which runs the command outside of any image."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    note_words = f'while [ "$1" != bash ]; do echo "$1" >> {tmp_path}/words; shift; done'
    write_program(tmp_path / "bin", "apptainer", note_words, 'exec "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    command = f"{sys.executable} -c 'print(\"it is\", 6 * 7)'"
    assert run(make_step(tmp_path, command, container=image, gpus=1))["exit_code"] == 0
    assert (tmp_path / "job" / "output.log").read_text() == "it is 42\n"
    words = (tmp_path / "words").read_text().split()
    assert words[:3] == ["exec", "--nv", "--rocm"]
    assert {f"--bind={tmp_path}", f"--pwd={tmp_path}"} <= set(words)
    assert words[-1] == str(tmp_path / "image.sif")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"setup": "no_such_program"}, "no_such_program: command not found"),
        ({"venv": "nowhere"}, "/nowhere: no virtual environment here"),
        ({"container": "docker://alpine"}, "apptainer: not on PATH of this node"),
    ],
)
def test_an_environment_that_cannot_be_set_up_has_its_own_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], said: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert run(make_step(tmp_path, "echo started > started", **changes))["failure_class"] == "env"
    assert said in (tmp_path / "job" / "output.log").read_text()
    assert not (tmp_path / "started").exists()


@pytest.mark.usefixtures("requeues")
def test_exit_code_75_asks_to_be_started_again_up_to_the_requeue_limit(tmp_path: Path) -> None:
    step = make_step(tmp_path, failing(tmp_path, 75), requeue_limit=2)
    for _ in range(2):
        with pytest.raises(Requeued):
            step()
        assert not step.files.outcome(1).exists()
    outcome = run(step)
    assert outcome["failure_class"] == "preempted"
    assert "requeued 2 times, the limit" in str(outcome["message"])


def test_a_job_that_cannot_be_requeued_leaves_that_to_the_driver(tmp_path: Path) -> None:
    with requeue_raises(subprocess.CalledProcessError(1, ["scontrol", "requeue"])):
        outcome = run(make_step(tmp_path, failing(tmp_path, 75)))
    assert outcome["failure_class"] == "preempted"
    assert "could not be requeued" in str(outcome["message"])


def in_background(step: JobStep, is_so: Callable[[], bool], number: signal.Signals) -> None:
    """Run the step and send this process a signal as soon as something is so."""

    def send() -> None:
        deadline = time.monotonic() + 20
        while not is_so() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        step()
    finally:
        thread.join()


def slurm_signals(found: Callable[[], list[psutil.Process]], number: signal.Signals, ready: Path) -> Callable[[], bool]:
    """Return a test of whether the file is there, which then sends a signal to these processes too."""

    def is_there() -> bool:
        if ready.exists():
            processes.kill(found(), number)
        return ready.exists()

    return is_there


HANDLES = """\
import pathlib, signal, sys, time
pathlib.Path("python-is-there").touch()
{before}
got = []
signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
pathlib.Path("handler-is-there").touch()
while not got:
    time.sleep(0.05)
time.sleep(0.6)
pathlib.Path("got").write_text(str(len(got)))
sys.exit("Command x returned non-zero exit status 75.")
"""


@pytest.mark.usefixtures("requeues")
@pytest.mark.parametrize("when", ["handler-is-there", "python-is-there"])
def test_a_signal_reaches_the_training_once_also_before_it_is_ready(tmp_path: Path, when: str) -> None:
    (tmp_path / "train.py").write_text(HANDLES.format(before="time.sleep(0.5)"))
    step = make_step(tmp_path, f"true; {sys.executable} train.py")  # `true;`: the shell stays there, and survives
    with pytest.raises(Requeued):
        in_background(step, (tmp_path / when).exists, signal.SIGUSR2)
    assert (tmp_path / "got").read_text() == "1"
    (attempt,) = read_attempts(step.files.attempts)
    assert (attempt["asked"], attempt["exit_code"], attempt["is_time_limit"]) == ("SIGUSR2", 75, False)


def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    step = make_step(tmp_path, f"{sys.executable} -c 'import time; time.sleep(100)' & echo $! > pid; wait")
    in_background(step, lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()), signal.SIGINT)
    assert processes.start_ticks(int((tmp_path / "pid").read_text())) is None
    assert not step.files.outcome(1).exists()


@pytest.mark.parametrize(
    ("command", "is_manager"),
    [
        ("/env/bin/python -m snakemake --snakefile x", True),
        ("/env/bin/python /env/bin/snakemake", True),
        ("/usr/bin/srun python train.py", True),
        ("/env/bin/python /env/bin/implicit-llm train", False),
        ("", False),
    ],
)
def test_snakemake_and_srun_are_not_told(command: str, is_manager: bool) -> None:
    process: Any = SimpleNamespace(cmdline=command.split)
    assert processes.is_manager(process) is is_manager


def test_a_process_without_a_handler_is_left_alone() -> None:
    with sentinel() as watched, subprocess.Popen(["sleep", "100"]) as process:
        relay = Relay(process.pid, Path("nowhere"), watched)
        relay.send(signal.SIGUSR2)
        assert not relay.is_awaited()
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize(
    ("before", "end", "is_stuck"),
    [
        ([None, 3], 5, False),
        ([None, 3], 3, False),
        ([None, 3, 3], 3, True),
        ([3, 3, 4], 4, False),
        ([3, 3], 4, False),
        ([3], 3, False),
        ([None, None], None, False),
    ],
)
@pytest.mark.parametrize("is_time_limit", [True, False])  # preemptions do not count
def test_a_job_is_stuck_after_two_attempts_up_to_the_time_limit_without_progress(
    tmp_path: Path, before: list[object], end: object, is_stuck: bool, is_time_limit: bool
) -> None:
    """Attempts that began with each of `before`, the last one ending with `end`."""
    files = JobFiles(tmp_path)
    for progress in before:
        add_attempt(files.attempts, "start", progress=progress)
        add_attempt(files.attempts, "end", is_time_limit=is_time_limit)
    write_json(files.status, {"progress": end})
    assert files.is_unfruitful() is (is_stuck and is_time_limit)


def test_a_status_file_keeps_its_progress_not_its_failure(tmp_path: Path) -> None:
    step = make_step(tmp_path, "cat $SUBMITIT_JOB_STATUS")
    write_json(step.files.status, {"progress": 4, "failure_class": "bug", "message": "of the attempt before"})
    assert run(step)["failure_class"] is None
    assert json.loads((tmp_path / "job" / "output.log").read_text()) == {"progress": 4}


@pytest.mark.usefixtures("requeues")
@pytest.mark.parametrize(("late", "is_time_limit"), [("handler-is-there", True), ("got", False)])
def test_a_signal_is_one_of_the_time_limit_if_it_came_when_that_was_near_however_long_the_checkpoint_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str, is_time_limit: bool
) -> None:
    """The clock goes forward by almost an hour, the time limit, when there is the file `late`."""
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + 3590 * (tmp_path / late).exists())
    for module in (processes, step_module):
        monkeypatch.setattr(module, "time", clock)
    (tmp_path / "train.py").write_text(HANDLES.format(before=""))
    step = make_step(tmp_path, f"{sys.executable} train.py")
    with pytest.raises(Requeued):
        in_background(step, (tmp_path / "handler-is-there").exists, signal.SIGUSR2)
    (attempt,) = read_attempts(step.files.attempts)
    assert (attempt["asked"], attempt["is_time_limit"]) == ("SIGUSR2", is_time_limit)


def test_an_attempt_is_read_although_a_crash_truncated_the_line_before_it(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    add_attempt(path, "start", submission=1)
    path.write_bytes(path.read_bytes() + b'{"event": "en')
    add_attempt(path, "start", submission=2)
    add_attempt(path, "end", exit_code=0)
    first, second = read_attempts(path)
    assert (first["submission"], second["submission"], second["exit_code"]) == (1, 2, 0)
    assert "exit_code" not in first


@pytest.mark.usefixtures("requeues")
def test_a_signal_that_slurm_sent_to_all_processes_is_not_sent_again(tmp_path: Path) -> None:
    """With ProctrackType=proctrack/linuxproc; neither Snakemake nor the shell, here `bash`, may die of it."""
    (tmp_path / "train.py").write_text(HANDLES.format(before=""))
    step = make_step(tmp_path, f"bash -c 'true; {sys.executable} train.py'")
    to_all = slurm_signals(
        lambda: processes.descendants(os.getpid())[1:], signal.SIGUSR2, tmp_path / "handler-is-there"
    )
    with pytest.raises(Requeued):
        in_background(step, to_all, signal.SIGUSR2)
    assert (tmp_path / "got").read_text() == "1"


@pytest.mark.usefixtures("requeues")
def test_a_checkpoint_is_waited_for_although_the_shell_has_died(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANDLES.format(before="").replace("SIGUSR2", "SIGTERM"))
    step = make_step(tmp_path, f"true; {sys.executable} train.py")
    to_shell = slurm_signals(
        lambda: processes.descendants(read_attempts(step.files.attempts)[0]["pid"]),
        signal.SIGTERM,
        tmp_path / "handler-is-there",
    )
    in_background(step, to_shell, signal.SIGTERM)
    assert (tmp_path / "got").exists()
    assert read_json(step.files.outcome(1))["failure_class"] == "preempted"


def test_a_cancelled_job_stays_cancelled_when_it_has_stopped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANDLES.format(before="").replace("SIGUSR2", "SIGTERM"))
    step = make_step(tmp_path, f"{sys.executable} train.py")

    def is_cancelled() -> bool:
        if (tmp_path / "handler-is-there").exists():
            write_json(step.files.outcome(1), End("cancelled")._asdict())
        return step.files.outcome(1).exists()

    in_background(step, is_cancelled, signal.SIGTERM)
    assert (tmp_path / "got").exists()
    assert step.files.end(1) == End("cancelled")


def test_a_local_job_inside_an_allocation_has_its_own_id(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "99")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert job_id() == "6_1"
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    assert job_id() == "99"


def test_locks_are_those_that_nfs_grants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS 4 refuses a shared lock on a file that is not open for reading, and an exclusive one without writing."""

    def flock(file: IO[str], operation: int) -> None:
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        refused = os.O_WRONLY if operation & fcntl.LOCK_SH else os.O_RDONLY
        if mode == refused:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, operation)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    files = make_step(tmp_path, "true").files
    assert not files.is_running_here()
    with files.lock(), files.hold_running():
        assert files.is_running_here()
    assert not files.is_running_here()


@pytest.mark.parametrize(
    ("current", "runs"),
    [
        ({"number": 1, "job_id": ""}, True),  # its driver has not yet heard of the id
        ({"number": 1, "job_id": "7"}, True),
        ({"number": 1, "job_id": "8"}, False),  # two were accepted
        ({"number": 2, "job_id": "7"}, False),
    ],
)
def test_of_two_submissions_only_the_one_on_record_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: dict[str, object], runs: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    step = make_step(tmp_path, "touch ran")
    save(step.files, replace(step.record, **current))  # type: ignore[arg-type]
    step()
    assert (tmp_path / "ran").exists() is runs
    assert step.files.outcome(1).exists() is runs
