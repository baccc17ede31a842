"""Signals that ask a job to stop, handed on to those of its processes that know what to do with them.

Slurm sends SIGUSR2 before the time limit (`--signal`) and, where it is set up so, before a preemption; SIGTERM comes
with scancel and at a preemption. The processes that it reaches are submitit's and the tasks of further `srun` steps,
not what submitit's process started in a session of its own. In that session only a process with a handler is told:
the shell and Snakemake would die of the signal, and Snakemake would then delete outputs while the training still
writes its checkpoint.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from snakemake_executor_plugin_submitit import processes

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


class Relay:
    """Hands a signal on below `root`, once to each process that catches it, however late that begins to do so."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._told: set[tuple[int, int | None]] = set()

    def tell(self, number: signal.Signals) -> list[int]:
        """Returns: the processes that were told now. A process gets one signal in all, whichever comes first."""
        told = []
        for pid in processes.descendants(self.root):
            process = (pid, processes.start_ticks(pid))
            if process in self._told or not processes.catches(pid, number) or is_manager(processes.command_of(pid)):
                continue
            self._told.add(process)
            processes.kill([pid], number)
            told.append(pid)
        return told


def is_manager(command: list[str]) -> bool:
    """Whether this is a Snakemake, which only waits for its job, or an srun, whose tasks Slurm tells by itself."""
    names = {os.path.basename(part) for part in command[:1]}
    is_snakemake = command[1:3] == ["-m", "snakemake"] or any(
        os.path.basename(part) == "snakemake" for part in command[:2]
    )
    return "srun" in names or is_snakemake
