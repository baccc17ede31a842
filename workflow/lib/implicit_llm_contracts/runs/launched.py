"""How a job reports to what started it: the executor, and the launcher of its processes through a shared folder.

    ready-<node>-<rank>     made by a process that can be told to stop; holds its process id
    end-<rank>.json         how a process ended that failed or was stopped
    deaths-<node>.json      processes that a node's launcher saw end badly

The folder is on a file system that all nodes share.

The executor learns of progress, and why the job failed, from the file that the environment names:

    {"progress": 1200, "failure_class": "quota", "message": "cannot write ..."}

Without the variable nothing is written. The file is never needed for correctness.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_llm_contracts.errors import Preempted, failure_class_of
from implicit_llm_contracts.runs.atomic import read_object, write_atomic, write_json

FOLDER_VARIABLE, NODE_VARIABLE = "IMPLICIT_LLM_LAUNCH_FOLDER", "IMPLICIT_LLM_LAUNCH_NODE"
WORLD_VARIABLE = "IMPLICIT_LLM_LAUNCH_WORLD_SIZE"
STATUS_VARIABLE = "SUBMITIT_JOB_STATUS"
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# What a process fails with when another one went away, or when it was asked to.
_UNSPECIFIC = (None, "bug", "preempted")


@dataclass(frozen=True)
class ProcessEnd:
    """How a process, or the job, ended. `time_s`: of the clock of its node, to put ends in order.

    failure_class: None where the exit code is all that is known.
    """

    rank: int
    code: int
    failure_class: str | None
    message: str
    time_s: float = 0.0


@dataclass(frozen=True)
class Death:
    """A process that ended with a code other than 0, minus the signal's number where a signal ended it."""

    rank: int
    code: int
    host: str

    def end(self) -> ProcessEnd:
        """How it ended, for a process that could not say it itself."""
        process = f"rank {self.rank} on {self.host}"
        if self.code > 0:
            return ProcessEnd(self.rank, self.code, None, f"{process} ended with code {self.code}; its output says why")
        what = f"{process} was ended by signal {-self.code}; if by want of memory, give the job more mem_mb"
        return ProcessEnd(self.rank, 128 - self.code, "node_fail", what)


@dataclass(frozen=True)
class LaunchFolder:
    """The folder at `path`: what a process leaves there for the others and the launcher, and reads of theirs."""

    path: Path

    @classmethod
    def of_this_process(cls) -> LaunchFolder | None:
        """The folder of the launcher that started this process; None if no launcher did."""
        path = os.environ.get(FOLDER_VARIABLE)
        return LaunchFolder(Path(path)) if path and "RANK" in os.environ else None

    def announce(self) -> None:
        """Say that this process can be told to stop from now on."""
        name = f"ready-{os.environ.get(NODE_VARIABLE, '0')}-{os.environ['RANK']}"
        write_atomic(self.path / name, str(os.getpid()))

    def announced(self, node: int) -> set[int]:
        """Process ids on a node that can be told to stop. To be read on that node."""
        return {int(path.read_text()) for path in self.path.glob(f"ready-{node}-*")}

    def record_end(self, error: BaseException, rank: int | None = None) -> None:
        """Say why this process ends; `rank`: of another one, below 0 for what is none."""
        code = getattr(error, "exit_code", None) or getattr(error, "code", None) or 1
        rank = int(os.environ["RANK"]) if rank is None else rank
        message = " ".join(str(error).split()) or type(error).__name__
        with suppress(OSError):  # the job fails in any case
            write_json(self._end(rank), ProcessEnd(rank, code, failure_class_of(error), message, time.time()))

    def has_ended(self, rank: int) -> bool:
        """Whether a process has said why it ends."""
        return self._end(rank).exists()

    def record_deaths(self, node: int, deaths: list[Death]) -> None:
        write_json(self.path / f"deaths-{node}.json", deaths)

    def verdict(self, code: int) -> ProcessEnd:
        """Why the job ended whose launcher ended with `code`, of all that is known here; code 0 for what is done."""
        ends = [ProcessEnd(**json.loads(path.read_bytes())) for path in self.path.glob("end-*.json")]
        told = sorted(self.path.glob("deaths-*.json"))
        deaths = [Death(**item) for path in told for item in json.loads(path.read_bytes())]
        return judge(code, sorted(ends, key=lambda end: (end.time_s, end.rank)), deaths)

    def _end(self, rank: int) -> Path:
        return self.path / f"end-{rank}.json"


def die_with(parent: int) -> None:
    """Have this process killed as soon as its parent, the process `parent`, ends for any reason. Linux only."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it is gone already
            os.kill(os.getpid(), signal.SIGKILL)


def judge(code: int, ends: list[ProcessEnd], deaths: list[Death]) -> ProcessEnd:
    """The one reason for the end of a job, by which it is started again or not.

    One process that ends takes the others with it, which then complain of lost connections. So first comes a commit of
    rank 0, then what a process could say itself, then a process that was killed, and only then any other error.
    ends: in the order of time.
    """
    if code == 0:
        return ProcessEnd(0, 0, "", "")
    stopped = [end for end in ends if end.rank == 0 and end.code == Preempted.exit_code]
    specific = [end for end in ends if end.failure_class not in _UNSPECIFIC]
    told = {end.rank for end in ends}
    # The launcher ends those that are left by SIGTERM.
    unsaid = [death.end() for death in deaths if death.rank not in told and death.code != -signal.SIGTERM]
    killed = [end for end in unsaid if end.failure_class is not None]
    unknown = ProcessEnd(-1, code if code > 0 else 128 - code, None, f"the processes ended with code {code}")
    return [*stopped, *specific, *killed, *ends, *unsaid, unknown][0]


def start_attempt() -> None:
    """Forget why an earlier attempt failed; its progress stays."""
    _change(lambda values: {key: value for key, value in values.items() if key == "progress"})


def report_progress(progress: Any) -> None:
    """Say how far the job is, in any JSON that changes when it is further."""
    _change(lambda values: {**values, "progress": progress})


def report_failure(error: BaseException) -> None:
    """Report once why the job fails. One of several processes reports to its launcher, which sees how others ended."""
    if folder := LaunchFolder.of_this_process():
        folder.record_end(error)
    elif failure_class := failure_class_of(error):
        told = {"failure_class": failure_class, "message": " ".join(str(error).split())[:500]}
        _change(lambda values: {**told, **values})


def _change(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    if not os.environ.get(STATUS_VARIABLE):
        return
    path = Path(os.environ[STATUS_VARIABLE])
    values = read_object(path)
    if (changed := change(values)) != values:
        with suppress(OSError):  # a job that works does not end because nobody hears of it
            write_json(path, changed)
