"""The processes of a job: found, and asked to stop.

Slurm sends SIGUSR2 before the time limit (`--signal`) and, if the cluster is set up so, before a preemption. SIGTERM
comes with scancel and with a preemption. Which processes Slurm signals depends on its ProctrackType: with `cgroup`
submitit's own and the tasks of further `srun` steps, with `linuxproc` all processes of a step. `Relay` signals each
process with a handler once. The others, such as Snakemake and its shell, must live until the training run has written
its checkpoint.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from snakemake_executor_plugin_submitit.store import STATUS_VARIABLE, JobFiles, Record

# Each is graver than those before it: write a checkpoint and stop; Slurm waits no longer; submitit's local controller
# kills a second later.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; pid and start identify it, also to another process. None:
    gone. psutil's start in seconds would move with the clock."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the command before the state may contain anything
    return None if fields[0] == "Z" else int(fields[19])


def controller(record: Record) -> int | None:
    """The pid of submitit's controller of a local job; None if it has ended, also if another process has its pid."""
    pid = int(record.job_id)
    return pid if record.started is not None and start_ticks(pid) == record.started else None


def is_local_job_alive(files: JobFiles, record: Record) -> bool:
    """Whether a job of this machine runs, also if its controller was killed."""
    return controller(record) is not None or files.is_running_here()


def descendants(root: int) -> list[psutil.Process]:
    """`root` and the processes below it, parents first."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    return []


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal."""
    with suppress(OSError):
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


def with_environment(**wanted: str | None) -> list[psutil.Process]:
    """The processes that were started with these variables set to these values; None: not set."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            given = process.environ()
            if given and all(given.get(name) == value for name, value in wanted.items()):
                found.append(process)
    return found


def of_job(root: int | None, status: Path, **environment: str | None) -> list[psutil.Process]:
    """`root`, the processes below it, and those that have the job's status file in their environment, such as orphans;
    `environment`: what else these were started with."""
    below = [] if root is None else descendants(root)
    return list(dict.fromkeys(below + with_environment(**{STATUS_VARIABLE: str(status)}, **environment)))


def kill(found: Iterable[psutil.Process], number: signal.Signals = signal.SIGKILL) -> None:
    for process in found:
        with suppress(psutil.Error):
            process.send_signal(number)


def is_manager(process: psutil.Process) -> bool:
    """Whether this is a Snakemake, which only waits for its job, or an srun, whose tasks Slurm signals itself."""
    with suppress(psutil.Error):
        command = process.cmdline()
        names = [os.path.basename(word) for word in command[:2]]
        return names[:1] == ["srun"] or "snakemake" in names or command[1:3] == ["-m", "snakemake"]
    return False


class StopSignals:
    """Context in which the gravest signal is only noted; afterwards the previous handlers are back."""

    asked: signal.Signals | None = None

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
        received = signal.Signals(number)
        self.asked = max(received, self.asked or received, key=STOP_SIGNALS.index)


def sentinel() -> subprocess.Popen[bytes]:
    """A process that does nothing until its context closes its input: if a signal killed it, Slurm sent that signal to
    all processes of the step."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


@dataclass
class Relay:
    """Passes a signal on to the processes of a job, once to each that catches it, however late it begins to do so.

    `root`: the first process; `status`: the job's status file; `watched`: a sentinel.
    """

    root: int
    status: Path
    watched: subprocess.Popen[bytes]
    _signalled: set[psutil.Process] = field(default_factory=set)
    _is_first: bool = True

    def members(self) -> list[psutil.Process]:
        """The job's processes, also orphans, without the tasks of further steps, which Slurm signals itself."""
        return of_job(self.root, self.status, SLURM_STEP_ID=os.environ.get("SLURM_STEP_ID"))

    def send(self, number: signal.Signals) -> None:
        """Signal those that got no signal yet. A process gets one in all, whichever comes first."""
        is_sent_to_all = False
        if self._is_first:
            self._is_first = False
            with suppress(subprocess.TimeoutExpired):  # it may arrive there a little later than in this process
                is_sent_to_all = self.watched.wait(0.5) == -number
        for process in self.members():
            if process in self._signalled or not catches(process.pid, number) or is_manager(process):
                continue
            self._signalled.add(process)
            if not is_sent_to_all:
                kill([process], number)

    def is_awaited(self) -> bool:
        """Whether a process that was signalled is still at work."""
        return any(process.is_running() and start_ticks(process.pid) is not None for process in self._signalled)


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """How often the kernel killed a process of this control group, of version 2 or 1, for lack of memory.

    0 if that is not known.
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
