"""Run one job on its node: start the Snakemake that executes the rule, pass signals on, and record how it ended.

After a requeue, submitit runs the same step again.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from snakemake_executor_plugin_submitit import processes
from snakemake_executor_plugin_submitit.processes import Relay, StopSignals, oom_kills, sentinel
from snakemake_executor_plugin_submitit.store import (
    CLASSES,
    PREEMPTED_EXIT,
    STATUS_VARIABLE,
    UNFRUITFUL_LIMIT,
    End,
    JobFiles,
    Record,
    add_attempt,
    load,
    read_attempts,
    read_json,
    tail,
    write_json,
)

LOOK_EVERY_S = 0.2
KILL_WITHIN_S = 0.8  # submitit's local controller kills this process a second after SIGINT
SIGNAL_EARLY_S = 60  # Slurm sends the signal of --signal up to a minute early
ENV_EXIT = 96  # the exit code of `script` if the setup of the environment fails
# 137: killed from outside the job. If memory is known to have run out, the class in the status file counts instead.
EXIT_CLASSES = {PREEMPTED_EXIT: "preempted", 2: "user", ENV_EXIT: "env", 128 + 9: "node_fail"}
COMMAND_EXIT = re.compile(r"returned non-zero exit status (\d+)|died with <Signals\.\w+: (\d+)>")
MAIN = "from snakemake_executor_plugin_submitit.step import main; main()"  # python -c MAIN FOLDER


def main() -> None:
    """Create the link to the job's pickle that submitit expects, whose name has the job's id, and run submitit."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # otherwise it would kill us until submitit installs a handler
    sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]  # otherwise submitit imports it, which takes 0.1 s

    from submitit.core.job_environment import JobEnvironment
    from submitit.core.submission import process_job

    folder = Path(sys.argv[1])
    # By itself, submitit renames the pickle in the driver after sbatch. If that driver is killed in between, the job
    # finds no pickle.
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    with suppress(FileExistsError):  # after a requeue, submitit's own pickle exists
        pickle = pickle_path(folder, 0 if is_local() else int(os.environ.get("SLURM_ARRAY_TASK_ID", "0")))
        JobEnvironment().paths.submitted_pickle.symlink_to(pickle)
    process_job(folder)


def pickle_path(folder: Path, task: int) -> Path:
    return folder / f"task_{task}.pkl"


@dataclass(frozen=True)
class JobStep:
    """The work of a job, pickled for each submission; submitit calls it on the node, and again after a requeue.

    command: a shell command. setup: shell commands that run before it. venv: a virtual environment; container: an
    Apptainer image; "" for none.
    """

    files: JobFiles
    record: Record
    command: str
    workdir: str
    signal_delay_s: float
    requeue_limit: int
    setup: str = ""
    venv: str = ""
    container: str = ""

    def __call__(self) -> None:
        """Run the job once and write how it ended, or requeue it, which ends this process.

        Nothing is written if another job replaces this one, or if the process is being killed.
        """
        if is_superseded(self):
            return
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's handler pickles this step again and requeues the job
        with self.files.hold_running():
            end = run_attempt(self)
        if end is None:
            return
        outcome = decide(self, end)
        if outcome is None:
            assert callable(requeue)
            try:
                requeue(signal.SIGUSR2, None)
                return
            except (OSError, subprocess.SubprocessError) as error:
                outcome = _outcome(end, "preempted", f"could not be requeued: {error}")
        if not (outcome.is_provisional and self.files.end(self.record.number)):  # the driver has recorded its scancel
            write_json(self.files.outcome(self.record.number), outcome._asdict())

    def checkpoint(self) -> object:
        """Return this step, which submitit runs after a requeue; the job's own files have its progress."""
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self)


def is_superseded(step: JobStep) -> bool:
    """Return whether another job replaces this one; if so, write a line about it to the output log.

    This happens if Slurm accepted the submission twice, or the driver submitted again.
    """
    current, own = load(step.files), job_id()
    is_same_job = not current or not current.job_id or own in ("", current.job_id)
    if not current or (current.number == step.record.number and is_same_job):
        return False
    with open(step.files.output_log, "a", encoding="utf-8") as output:
        output.write(f"job {own} ends: {current.job_id} (submission {current.number}) replaces it\n")
    return True


def run_attempt(step: JobStep) -> dict[str, Any] | None:
    """Start the job, relay signals, and wait for its end.

    Returns: the end as `add_attempt` describes it, or None if this process is being killed too and cannot decide
    anything.
    """
    files = step.files
    before = files.progress()
    if files.status.exists():  # forget why the last attempt failed, but not its progress
        write_json(files.status, {} if before is None else {"progress": before})
    files.outcome(step.record.number).unlink(missing_ok=True)  # left by an attempt after which Slurm requeued the job
    begin, kills = time.monotonic(), oom_kills()
    with (
        StopSignals() as signals,
        sentinel() as watched,
        open(files.output_log, "ab") as output,
    ):
        offset = output.tell()
        process = start(step, output)
        add_attempt(
            files.attempts,
            "start",
            submission=step.record.number,
            job_id=job_id(),
            host=socket.gethostname(),
            nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
            pid=process.pid,
            progress=before,
        )
        relay = Relay(process.pid, files.status, watched)
        code = wait(process, signals, relay, step.signal_delay_s)
        seconds = time.monotonic() - begin
        if code != 0:
            code = exit_code_of_command(tail(files.output_log, limit_bytes=1 << 20, since=offset), code)
        if oom_kills() > kills and code == 137:
            killed = {"failure_class": "oom", "message": "killed by the kernel for lack of memory"}
            write_json(files.status, {**read_json(files.status), **killed})
        # A signal before `limit_s` had another cause than the time limit, such as a preemption.
        limit_s = 60 * step.record.requested["runtime"] - step.signal_delay_s - SIGNAL_EARLY_S
        end = add_attempt(
            files.attempts,
            "end",
            exit_code=code,
            asked=signals.asked.name if signals.asked else None,
            seconds=round(seconds, 1),
            is_time_limit=signals.first_s - begin >= limit_s,
            progress=files.progress(),
        )
    return None if signals.is_ended else end


def start(step: JobStep, output: IO[bytes]) -> subprocess.Popen[bytes]:
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    further = {"SRUN_CPUS_PER_TASK": cpus} if cpus else {}  # since Slurm 22.05, a step gets one CPU without it
    return subprocess.Popen(
        ["bash", "-c", script(step)],
        cwd=step.workdir,
        env={**os.environ, **further, STATUS_VARIABLE: str(step.files.status)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait(process: subprocess.Popen[bytes], signals: StopSignals, relay: Relay, patience_s: float) -> int:
    """Wait for the end of the job, and up to `patience_s` longer for signalled processes; relay signals meanwhile.

    A signal may kill the shell before the training run in it has written its checkpoint. On SIGINT, all
    processes of the job are killed instead.
    Returns: the exit code as in Popen.
    """
    deadline = math.inf
    while process.poll() is None or (relay.is_awaited() and time.monotonic() < deadline):
        if signals.is_ended:
            kill_all(process, relay)
            return process.wait()
        if signals.asked is not None:
            relay.send(signals.asked)
        if process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_EVERY_S)
        else:
            deadline = min(deadline, time.monotonic() + patience_s)
            time.sleep(LOOK_EVERY_S)
    return process.returncode


def kill_all(process: subprocess.Popen[bytes], relay: Relay) -> None:
    """Kill the job's processes within KILL_WITHIN_S, including those that start meanwhile."""
    deadline = time.monotonic() + KILL_WITHIN_S
    while (left := relay.members()) and time.monotonic() < deadline:
        processes.kill(left)
        process.poll()
        time.sleep(0.02)


def exit_code_of_command(output: str, code: int) -> int:
    """Return the exit code in the last error that the job's Snakemake printed, or else Snakemake's own.

    A death by signal N gives 128 + N. code: Snakemake's exit code as in Popen; not 0.
    """
    errors = COMMAND_EXIT.findall(output)
    if not errors:
        return code if code > 0 else 128 - code
    status, number = errors[-1]
    return int(status) if status else 128 + int(number)


def decide(step: JobStep, end: dict[str, Any]) -> End | None:
    """Return how the submission ended, or None if the job must be requeued."""
    status = read_json(step.files.status)
    if end["exit_code"] == 0:
        return _outcome(end, None)
    stated, message = status.get("failure_class"), str(status.get("message") or "")
    is_class = isinstance(stated, str) and stated in CLASSES  # a job may write any value
    kind = stated if is_class else EXIT_CLASSES.get(end["exit_code"], "bug")
    if kind == "bug" and stated is None and end["asked"] is not None:
        # The job stopped on a signal without reporting a class. Without a checkpoint, the next attempt would reach its
        # time limit too.
        kind = "timeout" if end["is_time_limit"] and end["progress"] is None else "preempted"
    if kind != "preempted":
        return _outcome(end, kind, message)
    if step.files.is_unfruitful():
        return _outcome(end, "timeout", f"{UNFRUITFUL_LIMIT} attempts in a row without progress")
    if end["asked"] == "SIGTERM":
        # After a preemption, Slurm itself may requeue the job; after scancel, it does not. The driver waits until Slurm
        # shows which it was.
        return _outcome(end, "preempted", "stopped by SIGTERM")
    done = len(read_attempts(step.files.attempts)) - 1
    if done >= step.requeue_limit:
        return _outcome(end, "timeout" if end["is_time_limit"] else "preempted", f"requeued {done} times, the limit")
    return None


def script(step: JobStep) -> str:
    """Return the job's shell script, in which a failed setup has its own exit code."""
    lines = []
    if step.setup or step.venv or step.container:
        lines.append(f"trap 'exit {ENV_EXIT}' ERR")
        lines.extend(step.setup.splitlines())
    if step.venv:
        path = shlex.quote(os.path.join(step.workdir, os.path.expanduser(step.venv)))
        lines.append(f"[ -x {path}/bin/python ] || {{ echo {path}: no virtual environment here >&2; false; }}")
        lines.append(f'export VIRTUAL_ENV={path} PATH={path}/bin:"$PATH"')
    if step.container:
        lines.append("command -v apptainer > /dev/null || { echo apptainer: not on PATH of this node >&2; false; }")
    if lines:
        lines.append("trap - ERR")
    # SIGUSR2 would kill Snakemake and its shell; the processes they start also ignore it until they have a handler.
    return "\n".join(["trap '' USR2", *lines, in_container(step) if step.container else step.command])


def in_container(step: JobStep) -> str:
    """Return the job's command in the image, with the image's `python` and the working and submitit folders mounted."""
    command = step.command.replace(sys.executable, "python")
    image = os.path.expanduser(step.container)
    image = image if "://" in image else os.path.join(step.workdir, image)
    binds = dict.fromkeys([step.workdir, str(step.files.path.parent.parent)])
    gpu_options = ["--nv", "--rocm"] if step.record.requested["gpu"] else []  # without a driver, these only warn
    options = [*gpu_options, *(f"--bind={path}" for path in binds), f"--pwd={step.workdir}"]
    return shlex.join(["apptainer", "exec", *options, image, "bash", "-c", command])


def is_local() -> bool:
    """Return whether submitit's local executor started this process, maybe inside an allocation of Slurm."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "local"


def job_id() -> str:
    """Return the id of the job to which this process belongs, in submitit's notation; "" if there is none."""
    if is_local():
        return os.environ.get("SUBMITIT_LOCAL_JOB_ID", "")
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "")


def _outcome(end: dict[str, Any], failure_class: str | None, message: str = "") -> End:
    return End(failure_class, message, end["exit_code"], os.environ.get("SLURM_JOB_NODELIST", ""), end["asked"])
