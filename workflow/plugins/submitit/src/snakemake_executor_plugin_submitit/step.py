"""What runs within a job: the Snakemake that carries out the rule, started again by submitit when it was stopped."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snakemake_executor_plugin_submitit import attempts, failure, processes, usage
from snakemake_executor_plugin_submitit.job_files import (
    STATUS_VARIABLE,
    JobFiles,
    put_logs_aside,
    put_logs_back,
    read_json,
    write_json,
)
from snakemake_executor_plugin_submitit.stop_signals import Relay, Sentinel, StopSignals
from snakemake_executor_plugin_submitit.usage import Usage

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

LOOK_EVERY_S = 0.2
KILL_WITHIN_S = 0.8  # submitit's local controller kills this process after a second
UNFRUITFUL_LIMIT = 2


@dataclass(frozen=True)
class JobStep:
    """One submission of a job; submitit pickles it and calls it on the node, again after a requeue.

    `command` is a line of shell; `logs`: of the rule, relative to `workdir`; `setup`: lines of shell before it;
    `venv`: a virtual environment, `container`: an Apptainer image, "" for none; `gpus`: of this node.
    """

    files: JobFiles
    number: int
    command: str
    workdir: str
    logs: tuple[str, ...]
    limit_s: float
    signal_delay_s: float
    requeue_limit: int
    setup: str = ""
    venv: str = ""
    container: str = ""
    gpus: int = 0

    def __call__(self) -> None:
        """Run the job once. Does not return when it is to be started again (submitit ends the process)."""
        if is_superseded(self):
            return
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's: pickles this step again and requeues
        with self.files.hold_running():
            end = run_attempt(self)
        if end is None:
            return
        outcome = decide(self, end)
        if outcome is None and callable(requeue):
            try:
                requeue(signal.SIGUSR2, None)
            except (OSError, subprocess.SubprocessError) as error:
                outcome = _outcome(end, "preempted", f"could not be requeued: {error}")
        write_json(self.files.outcome(self.number), outcome)

    def checkpoint(self) -> DelayedSubmission:
        """What submitit starts after a requeue: the same; what the job has done so far is in its own files."""
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self)


def is_superseded(step: JobStep) -> bool:
    """Whether another submission of the job counts: of two that Slurm accepted, or of a later one by the driver."""
    current, own = read_json(step.files.record), job_id()
    is_other = bool(current.get("job_id")) and bool(own) and current["job_id"] != own
    if current and (current.get("number") != step.number or is_other):
        message = f"job {own} ends: {current.get('job_id')} (submission {current.get('number')}) has taken its place\n"
        with open(step.files.output_log, "a", encoding="utf-8") as output:
            output.write(message)
        return True
    return False


def run_attempt(step: JobStep) -> attempts.End | None:
    """Start the job, hand signals on, wait for its end.

    Returns: None when this process is being killed too, so that nothing can be said or decided here.
    """
    files, attempt, before = step.files, len(attempts.starts(step.files.attempts)) + 1, _progress(step)
    _clear_status(step, before)
    files.outcome(step.number).unlink(missing_ok=True)  # of an attempt after which Slurm itself requeued the job
    logs = [os.path.join(step.workdir, log) for log in step.logs]
    if attempt > 1:
        put_logs_aside(logs, files.kept_logs)
    begin, kills = time.monotonic(), usage.oom_kills()
    with StopSignals() as signals, Sentinel() as sentinel, open(files.output_log, "ab") as output:
        offset = output.tell()
        process = subprocess.Popen(
            ["bash", "-c", script(step)],
            cwd=step.workdir,
            env=environment(step),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        attempts.add(files.attempts, _start(step, attempt, process.pid, before))
        with Usage(process.pid, str(files.status), step.gpus) as used:
            relay = Relay(process.pid, str(files.status), sentinel)
            code = wait(process, signals, relay, step.signal_delay_s, used.sample)
            figures = used.figures()
        put_logs_back(logs, files.kept_logs)
        seconds = time.monotonic() - begin
        if code != 0:
            code = failure.exit_code_of_command(_output_since(step, offset)) or (code if code > 0 else 128 - code)
        if usage.oom_kills() > kills and code == 137:
            _say(step, "oom", "killed by the kernel for want of memory")
        asked = signal.SIGINT if signals.is_ended else signals.asked
        is_limit = asked is not None and attempts.is_time_limit(seconds, step.limit_s, step.signal_delay_s)
        name, now = asked.name if asked else None, round(time.time(), 1)
        end = attempts.End(attempt, code, name, round(seconds, 1), is_limit, _progress(step), now, figures)
        attempts.add(files.attempts, end)
    return None if signals.is_ended else end


def wait(
    process: subprocess.Popen[bytes],
    signals: StopSignals,
    relay: Relay,
    patience_s: float,
    look: Callable[[], None] = lambda: None,
) -> int:
    """Wait for the end of the job, telling its processes of a signal, and then for those that were told.

    A shell may die of a signal before the training below it has written its checkpoint, hence the patience with it.
    Returns: as Popen does.
    """
    ended: float | None = None
    while process.poll() is None or relay.is_awaited():
        if process.returncode is not None:
            ended = ended or time.monotonic()
            if time.monotonic() - ended > patience_s:
                break
        if signals.is_ended:
            kill_all(process, relay)
            return process.wait()
        if signals.asked is not None:
            relay.tell(signals.asked)
        look()
        if process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_EVERY_S)
        else:
            time.sleep(LOOK_EVERY_S)
    return process.returncode


def kill_all(process: subprocess.Popen[bytes], relay: Relay) -> None:
    """Kill the job's processes, also those that are started meanwhile."""
    deadline = time.monotonic() + KILL_WITHIN_S
    while (left := relay.members()) and time.monotonic() < deadline:
        processes.kill(left)
        process.poll()
        time.sleep(0.02)


def decide(step: JobStep, end: attempts.End) -> dict[str, Any] | None:
    """The outcome of the submission, or None to be started again."""
    status = read_json(step.files.status)
    if end.exit_code == 0:
        return _outcome(end, None, "")
    stated, message = status.get("failure_class"), str(status.get("message") or "")
    kind = failure.class_of_exit(end.exit_code, stated)
    if kind == "bug" and stated is None and end.asked is not None:
        # it was asked to stop and did, in its own way; without a checkpoint the next time limit would come as this one
        kind = "timeout" if end.is_time_limit and end.progress is None else "preempted"
    if kind != "preempted":
        return _outcome(end, kind, message)
    if attempts.unfruitful(step.files.attempts, end.progress) >= UNFRUITFUL_LIMIT:
        return _outcome(end, "timeout", f"{UNFRUITFUL_LIMIT} attempts in a row without progress")
    if end.asked == "SIGTERM":
        # scancel, or a preemption after which Slurm itself may requeue: the driver waits to see which
        return _outcome(end, "preempted", "stopped by SIGTERM")
    done = end.attempt - 1
    if done >= step.requeue_limit:
        return _outcome(end, "timeout" if end.is_time_limit else "preempted", f"requeued {done} times, the limit")
    return None


def script(step: JobStep) -> str:
    """The job's shell script: a set-up that fails is told from a job that fails by its exit code."""
    lines = []
    if step.setup or step.venv or step.container:
        lines.append(f"trap 'exit {failure.ENV_EXIT}' ERR")
        lines.extend(step.setup.splitlines())
    if step.venv:
        path = shlex.quote(os.path.join(step.workdir, os.path.expanduser(step.venv)))
        lines.append(f"[ -x {path}/bin/python ] || {{ echo {path}: no virtual environment here >&2; false; }}")
        lines.append(f'export VIRTUAL_ENV={path} PATH={path}/bin:"$PATH"')
    if step.container:
        lines.append("command -v apptainer > /dev/null || { echo apptainer: not on PATH of this node >&2; false; }")
    if lines:
        lines.append("trap - ERR")
    # Snakemake and its shell would die of the signal; ignored, it is so for what they start, until that has a handler
    return "\n".join(["trap '' USR2", *lines, in_container(step) if step.container else step.command])


def in_container(step: JobStep) -> str:
    """The command, run in the image by the `python` there; the working directory and the job's files are visible."""
    command = step.command.replace(sys.executable, "python")
    image = step.container if "://" in step.container else os.path.join(step.workdir, step.container)
    binds = dict.fromkeys([step.workdir, str(step.files.path.parent.parent)])
    gpu_options = ["--nv", "--rocm"] if step.gpus else []  # each does nothing but warn where its driver is not there
    options = [*gpu_options, *(f"--bind={path}" for path in binds), f"--pwd={step.workdir}"]
    return shlex.join(["apptainer", "exec", *options, image, "bash", "-c", command])


def environment(step: JobStep) -> dict[str, str]:
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    further = {"SRUN_CPUS_PER_TASK": cpus} if cpus else {}  # else a step within the job gets one CPU, since Slurm 22.05
    return {**os.environ, **further, STATUS_VARIABLE: str(step.files.status)}


def job_id() -> str:
    """Of the job that this process belongs to, as submitit writes it."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID") or ""


def _start(step: JobStep, attempt: int, pid: int, progress: Any) -> attempts.Start:
    nodes, now = os.environ.get("SLURM_JOB_NODELIST", ""), time.time()
    since = [float(read_json(step.files.record).get("submitted_unix_s") or now)]
    since += [float(end["unix_s"]) for end in attempts.ends(step.files.attempts)[-1:]]
    return attempts.Start(
        attempt,
        step.number,
        job_id(),
        socket.gethostname(),
        nodes,
        pid,
        progress,
        round(now, 1),
        round(max(0.0, now - max(since)), 1),
    )


def _outcome(end: attempts.End, kind: str | None, message: str) -> dict[str, Any]:
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    return {"exit_code": end.exit_code, "failure_class": kind, "message": message, "asked": end.asked, "nodes": nodes}


def _progress(step: JobStep) -> Any:
    return read_json(step.files.status).get("progress")


def _clear_status(step: JobStep, progress: Any) -> None:
    """Forget why the last attempt failed, not how far it came."""
    if step.files.status.exists():
        write_json(step.files.status, {} if progress is None else {"progress": progress})


def _say(step: JobStep, kind: str, message: str) -> None:
    status = read_json(step.files.status)
    write_json(step.files.status, {**status, "failure_class": kind, "message": message})


def _output_since(step: JobStep, offset: int, limit_bytes: int = 1 << 20) -> str:
    path = Path(step.files.output_log)
    with open(path, "rb") as file:
        file.seek(max(offset, path.stat().st_size - limit_bytes))
        return file.read().decode("utf-8", "replace")
