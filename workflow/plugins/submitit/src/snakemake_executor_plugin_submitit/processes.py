"""The processes of a job: found in /proc, and asked to stop.

psutil does the first part too, but its import costs each job 30 ms, and a start in ticks since boot survives a change
of the clock.

Slurm sends SIGUSR2 before the time limit (`--signal`) and, if the cluster is set up so, before a preemption. SIGTERM
comes with scancel and with a preemption. Which processes Slurm signals depends on its ProctrackType: with `cgroup`
submitit's own and the tasks of further `srun` steps, with `linuxproc` all processes of a step. `Relay` signals each
process with a handler once. The others, such as Snakemake and its shell, must live until the training run has written
its checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from snakemake_executor_plugin_submitit.store import STATUS_VARIABLE

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)  # write a checkpoint and stop
END_SIGNALS = (signal.SIGINT,)  # submitit's local controller kills a second later


class Use(NamedTuple):
    """`rss_mb`: resident memory, shared pages included; `cpu_s`: of the process itself since its start."""

    pid: int
    start_ticks: int
    rss_mb: float
    cpu_s: float


def use_of(pid: int) -> Use | None:
    """None: gone."""
    fields = _stat_fields(pid)
    if fields is None:
        return None
    rss_mb = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Use(pid, int(fields[19]), rss_mb, (int(fields[11]) + int(fields[12])) / TICKS_PER_S)


def all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()]


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; pid and start identify a process. None: gone."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[19])


def is_alive(pid: int, started: int | None) -> bool:
    """Whether this process runs, and not another one with a reused pid."""
    ticks = start_ticks(pid)
    return ticks is not None and (started is None or ticks == started)


def descendants(root: int) -> list[int]:
    """`root` and the processes below it, parents first."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        fields = _stat_fields(pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    found = [root] if (PROC / str(root)).exists() else []
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def children_of(pid: int) -> list[int]:
    """The processes that its threads started, without reading all others; [] on kernels that do not list them."""
    found = []
    with suppress(OSError, ValueError):
        for thread in (PROC / str(pid) / "task").iterdir():
            found += [int(word) for word in (thread / "children").read_text().split()]
    return found


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal."""
    with suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def command_of(pid: int) -> list[str]:
    """Its command line; [] if it is gone."""
    with suppress(OSError):
        raw = (PROC / str(pid) / "cmdline").read_bytes()
        return [part.decode("utf-8", "replace") for part in raw.split(b"\0") if part]
    return []


def with_environment(**wanted: str | None) -> list[int]:
    """The processes that were started with these variables set to these values; None: not set."""
    pairs = {name.encode(): None if value is None else value.encode() for name, value in wanted.items()}
    found = []
    for pid in all_pids():
        with suppress(OSError):
            raw = (PROC / str(pid) / "environ").read_bytes()
            given = dict(entry.partition(b"=")[::2] for entry in raw.split(b"\0") if entry)
            if given and all(given.get(name) == value for name, value in pairs.items()):
                found.append(pid)
    return found


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def is_manager(command: list[str]) -> bool:
    """Whether this is a Snakemake, which only waits for its job, or an srun, whose tasks Slurm signals itself."""
    names = [os.path.basename(word) for word in command[:2]]
    return names[:1] == ["srun"] or "snakemake" in names or command[1:3] == ["-m", "snakemake"]


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the command before it may contain anything. None: gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else fields


class StopSignals:
    """Context in which signals are only noted; afterwards the previous handlers are back."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.is_ended = False
        self.previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS + END_SIGNALS:
            self.previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received in END_SIGNALS:
            self.is_ended = True
        elif self.asked != signal.SIGTERM:  # SIGUSR2 may be followed by SIGTERM, after which Slurm waits no longer
            self.asked = received


class Sentinel:
    """A process that does nothing: if a signal killed it, Slurm sent that signal to all processes of the step."""

    def __enter__(self) -> Sentinel:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def died_of(self, number: signal.Signals, seconds: float = 0.5) -> bool:
        """Whether the signal killed it; it may arrive there a little later than in this process."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds) == -number
        return False


class Relay:
    """Passes a signal on to the processes of a job, once to each that catches it, however late it begins to do so.

    `root`: the first process; `status`: the job's status file, which all its processes have in their environment.
    """

    def __init__(self, root: int, status: str, sentinel: Sentinel) -> None:
        self.root = root
        self.status = status
        self.sentinel = sentinel
        self._signalled: dict[int, int | None] = {}  # pid and start
        self._is_first = True

    def members(self) -> list[int]:
        """The job's processes, also orphans, without the tasks of further steps, which Slurm signals itself."""
        step = {STATUS_VARIABLE: self.status, "SLURM_STEP_ID": os.environ.get("SLURM_STEP_ID")}
        return list(dict.fromkeys(descendants(self.root) + with_environment(**step)))

    def send(self, number: signal.Signals) -> list[int]:
        """Returns: the processes that were signalled now. A process gets one signal in all, whichever comes first."""
        is_known = self._is_first and self.sentinel.died_of(number)
        self._is_first = False
        sent = []
        for pid in self.members():
            started = start_ticks(pid)
            is_done = pid in self._signalled and self._signalled[pid] == started
            if is_done or not catches(pid, number) or is_manager(command_of(pid)):
                continue
            self._signalled[pid] = started
            if not is_known:
                kill([pid], number)
                sent.append(pid)
        return sent

    def is_awaited(self) -> bool:
        """Whether a process that was signalled is still at work."""
        return any(is_alive(pid, started) for pid, started in self._signalled.items())
