"""Signals that ask a job to stop, handed on to those of its processes that know what to do with them.

Slurm sends SIGUSR2 before the time limit (`--signal`) and, where it is set up so, before a preemption; SIGTERM comes
with scancel and at a preemption. Which processes it reaches depends on Slurm's ProctrackType: with `cgroup` submitit's
and the tasks of further `srun` steps, with `linuxproc` all of a step. Here every process with a handler is told, once;
the others, such as Snakemake and its shell, are to live until the training has written its checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from types import FrameType
from typing import Any

from snakemake_executor_plugin_submitit import processes
from snakemake_executor_plugin_submitit.job_files import STATUS_VARIABLE

ASKING = (signal.SIGUSR2, signal.SIGTERM)  # for a checkpoint and an end
ENDING = (signal.SIGINT,)  # submitit's local controller kills a second later


class StopSignals:
    """Context in which the signals are only noted; afterwards they do what they did before."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.is_ended = False
        self.previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in ASKING + ENDING:
            self.previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received in ENDING:
            self.is_ended = True
        elif self.asked != signal.SIGTERM:  # SIGUSR2 may be followed by SIGTERM, which says that nobody will wait
            self.asked = received


class Sentinel:
    """A process that does nothing: if it has died of a signal, that was sent to all processes of the step."""

    def __enter__(self) -> Sentinel:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def died_of(self, number: signal.Signals, seconds: float = 0.5) -> bool:
        """Whether it died of the signal, which may reach it a little later than this process."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds) == -number
        return False


class Relay:
    """Hands a signal on to the processes of a job, once to each that catches it, however late that begins to do so.

    `root`: the first process; `status`: its status file, the mark in the environment of all.
    """

    def __init__(self, root: int, status: str, sentinel: Sentinel) -> None:
        self.root = root
        self.status = status
        self.sentinel = sentinel
        self._told: dict[int, int | None] = {}  # pid and start
        self._is_first = True

    def members(self) -> list[int]:
        """The job's processes, also those whose parent has died, without the tasks of further steps: Slurm has them."""
        step = {STATUS_VARIABLE: self.status, "SLURM_STEP_ID": os.environ.get("SLURM_STEP_ID")}
        return list(dict.fromkeys(processes.descendants(self.root) + processes.with_environment(**step)))

    def tell(self, number: signal.Signals) -> list[int]:
        """Returns: the processes that were told now. A process gets one signal in all, whichever comes first."""
        is_known = self._is_first and self.sentinel.died_of(number)
        self._is_first = False
        told = []
        for pid in self.members():
            started = processes.start_ticks(pid)
            is_told = pid in self._told and self._told[pid] == started
            if is_told or not processes.catches(pid, number) or processes.is_manager(processes.command_of(pid)):
                continue
            self._told[pid] = started
            if not is_known:
                processes.kill([pid], number)
                told.append(pid)
        return told

    def is_awaited(self) -> bool:
        """Whether a process that was told is still at work."""
        return any(processes.is_alive(pid, started) for pid, started in self._told.items())
