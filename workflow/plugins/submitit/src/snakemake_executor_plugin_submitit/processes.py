"""Find the processes of a job, and send them the signals to stop.

Slurm sends SIGUSR2 before the time limit (`--signal`) and, if the cluster is configured so, before a preemption.
SIGTERM comes with scancel and with a preemption. The ProctrackType determines which processes Slurm signals: with
`cgroup` submitit's own process and the tasks of further `srun` steps, with `linuxproc` all processes of a step.
`Relay` signals each process with a handler once, except Snakemake and srun. Snakemake and its shell must live until the
training run has written its checkpoint.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from snakemake_executor_plugin_submitit.store import STATUS_VARIABLE, JobFiles, Record

# In increasing severity: SIGUSR2, write a checkpoint and stop; SIGTERM, Slurm waits no longer; SIGINT, submitit's local
# controller kills the process a second later.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def start_ticks(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot, or None if it has ended.

    A process that has ended but is not yet removed (a zombie) counts as ended. Together with the pid, this number
    identifies a process on this machine. psutil's start in seconds would change with the clock.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the command before the state may contain any character
    return None if fields[0] == "Z" else int(fields[19])


def controller(record: Record) -> int | None:
    """Return the pid of a local job's submitit controller, or None if it has ended, even if its pid is in use again."""
    pid = int(record.job_id)
    return pid if record.started is not None and start_ticks(pid) == record.started else None


def is_local_job_alive(files: JobFiles, record: Record) -> bool:
    """Return whether a local job runs, even if its controller was killed."""
    return controller(record) is not None or files.is_running_here()


def descendants(root: int) -> list[psutil.Process]:
    """Return `root` and its descendants, parents first."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    return []


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether the process has a handler for the signal."""
    with suppress(OSError):
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


def with_environment(**wanted: str | None) -> list[psutil.Process]:
    """Return the processes that were started with these values of environment variables; None means not set."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            given = process.environ()
            if given and all(given.get(name) == value for name, value in wanted.items()):
                found.append(process)
    return found


def of_job(root: int | None, status: Path, **environment: str | None) -> list[psutil.Process]:
    """Return `root`, its descendants, and all processes whose environment has the job's status file, such as orphans.

    environment: further variables that the processes with the status file must have; None means not set.
    """
    below = [] if root is None else descendants(root)
    return list(dict.fromkeys(below + with_environment(**{STATUS_VARIABLE: str(status)}, **environment)))


def kill(found: Iterable[psutil.Process], number: signal.Signals = signal.SIGKILL) -> None:
    for process in found:
        with suppress(psutil.Error):
            process.send_signal(number)


def is_manager(process: psutil.Process) -> bool:
    """Return whether this is a Snakemake, which only waits for its job, or srun, whose tasks Slurm itself signals."""
    with suppress(psutil.Error):
        command = process.cmdline()
        names = [os.path.basename(word) for word in command[:2]]
        return names[:1] == ["srun"] or "snakemake" in names or command[1:3] == ["-m", "snakemake"]
    return False


class StopSignals:
    """A context that catches stop signals and stores the most severe one in `asked`.

    At its end, the previous handlers are restored. first_s: when the first signal came, by `time.monotonic`; -inf
    without one.
    """

    asked: signal.Signals | None = None
    first_s: float = -math.inf

    @property
    def is_ended(self) -> bool:
        return self.asked == signal.SIGINT

    def __enter__(self) -> StopSignals:
        self.previous = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.first_s = time.monotonic()
        received = signal.Signals(number)
        self.asked = max(received, self.asked or received, key=STOP_SIGNALS.index)


def sentinel() -> subprocess.Popen[bytes]:
    """Start a process that does nothing until its input is closed.

    If a signal killed it, Slurm sent this signal to all processes of the step.
    """
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


@dataclass
class Relay:
    """A relay of stop signals: each process of a job gets one if it has a handler, even a handler installed late.

    root: the first process. status: the job's status file. watched: a sentinel.
    """

    root: int
    status: Path
    watched: subprocess.Popen[bytes]
    _signalled: set[psutil.Process] = field(default_factory=set)
    _is_first: bool = True

    def members(self) -> list[psutil.Process]:
        """Return the job's processes and orphans, without the tasks of further steps, which Slurm itself signals."""
        return of_job(self.root, self.status, SLURM_STEP_ID=os.environ.get("SLURM_STEP_ID"))

    def send(self, number: signal.Signals) -> None:
        """Signal each process that has a handler and has not yet received a signal, except Snakemake and srun.

        If Slurm itself has sent the first signal to all processes, the first call sends nothing and only records the
        processes as signalled. The first call waits up to 0.5 s to find this out.
        """
        is_sent_to_all = False
        if self._is_first:
            self._is_first = False
            with suppress(subprocess.TimeoutExpired):  # the sentinel may get the signal slightly later
                is_sent_to_all = self.watched.wait(0.5) == -number
        for process in self.members():
            if process in self._signalled or not catches(process.pid, number) or is_manager(process):
                continue
            self._signalled.add(process)
            if not is_sent_to_all:
                kill([process], number)

    def is_awaited(self) -> bool:
        """Return whether a signalled process still runs."""
        return any(process.is_running() and start_ticks(process.pid) is not None for process in self._signalled)


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how often the kernel killed a process of this control group (version 1 or 2) for lack of memory.

    The number is 0 if it is unknown.
    """
    with suppress(OSError, ValueError, LookupError):
        entries = [line.split(":", 2) for line in proc.read_text().splitlines()]
        paths = {controller: path.lstrip("/") for _, names, path in entries for controller in names.split(",")}
        if "memory" in paths:
            file = root / "memory" / paths["memory"] / "memory.oom_control"
        else:
            file = root / paths[""] / "memory.events"
        return int(dict(line.split(" ", 1) for line in file.read_text().splitlines())["oom_kill"])
    return 0
