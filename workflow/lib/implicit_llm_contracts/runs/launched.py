"""Report the progress and failure of a job to the executor, and the end of its processes to their launcher.

The processes of a job report in a folder on a file system that all nodes share:

    ready-<node>-<rank>     the id of a process that can handle stop signals
    end-<rank>.json         why a process fails or stops, recorded by the process itself
    deaths-<node>.json      the processes of a node that ended with an error, recorded by their launcher

The executor reads the progress of a job and the reason of its failure from the file that SUBMITIT_JOB_STATUS names:

    {"progress": 1200, "failure_class": "quota", "message": "cannot write ..."}

Without the variable there is no such file. No result depends on it.
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
_PR_SET_PDEATHSIG = 1  # as in linux/prctl.h
# Failure classes that do not show the cause: such a process may have ended because another process ended, or because a
# user or the launcher stopped it.
_UNSPECIFIC = (None, "bug", "preempted")


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a process or of the job.

    failure_class: "" for success, None if only the exit code is known or the process was interrupted. time_s: seconds
    since 1970 by the clock of the process's node, for the order of ends.
    """

    rank: int
    code: int
    failure_class: str | None
    message: str
    time_s: float = 0.0


@dataclass(frozen=True)
class Death:
    """A process that ended with an error. `code`: its exit code, or the negative number of the signal that ended it."""

    rank: int
    code: int
    host: str

    def end(self) -> ProcessEnd:
        """Return the end of this process, as far as it is known without a record by the process itself."""
        process = f"rank {self.rank} on {self.host}"
        if self.code > 0:
            return ProcessEnd(self.rank, self.code, None, f"{process} ended with code {self.code}; its output says why")
        what = f"{process} was ended by signal {-self.code}; if by want of memory, give the job more mem_mb"
        return ProcessEnd(self.rank, 128 - self.code, "node_fail", what)


@dataclass(frozen=True)
class LaunchFolder:
    """The folder `path`, in which the processes of a job and their launchers exchange messages."""

    path: Path

    @classmethod
    def of_this_process(cls) -> LaunchFolder | None:
        """Return the folder of the launcher that started this process; None if there is no launcher."""
        path = os.environ.get(FOLDER_VARIABLE)
        return LaunchFolder(Path(path)) if path and "RANK" in os.environ else None

    def announce(self) -> None:
        """Record that this process can handle stop signals from now on."""
        name = f"ready-{os.environ.get(NODE_VARIABLE, '0')}-{os.environ['RANK']}"
        write_atomic(self.path / name, str(os.getpid()))

    def announced(self, node: int) -> set[int]:
        """Return the ids of a node's processes that can handle stop signals; they are valid only on that node."""
        return {int(path.read_text()) for path in self.path.glob(f"ready-{node}-*")}

    def record_end(self, error: BaseException, rank: int | None = None) -> None:
        """Record why this process ends; ignore storage errors.

        `rank`: by default the rank of this process; below 0 for the agent of a node, which starts processes.
        """
        code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", None)
        code = code if isinstance(code, int) and code else 1  # sys.exit also takes a message
        rank = int(os.environ["RANK"]) if rank is None else rank
        message = " ".join(str(error).split()) or type(error).__name__
        with suppress(OSError):  # the job fails anyway
            write_json(self._end(rank), ProcessEnd(rank, code, failure_class_of(error), message, time.time()))

    def has_ended(self, rank: int) -> bool:
        """Return whether a process has recorded why it ends."""
        return self._end(rank).exists()

    def record_deaths(self, node: int, deaths: list[Death]) -> None:
        write_json(self.path / f"deaths-{node}.json", deaths)

    def verdict(self, code: int) -> ProcessEnd:
        """Return why the job ended, from all records in this folder and the launcher's exit code (0 for success)."""
        ends = [ProcessEnd(**json.loads(path.read_bytes())) for path in self.path.glob("end-*.json")]
        told = sorted(self.path.glob("deaths-*.json"))
        deaths = [Death(**item) for path in told for item in json.loads(path.read_bytes())]
        return judge(code, sorted(ends, key=lambda end: (end.time_s, end.rank)), deaths)

    def _end(self, rank: int) -> Path:
        return self.path / f"end-{rank}.json"


def die_with(parent: int) -> None:
    """Make Linux kill this process as soon as its parent, the process `parent`, ends for any reason."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has ended already
            os.kill(os.getpid(), signal.SIGKILL)


def judge(code: int, ends: list[ProcessEnd], deaths: list[Death]) -> ProcessEnd:
    """Return the one reason for the end of a job, which decides whether the job is retried.

    If one process ends, the other processes fail with lost connections. So the first choice is the preemption of rank
    0, then a specific error that a process recorded, then a process that was killed, and only then any other error.
    code: the launcher's exit code, 0 for success. ends: in the order of time.
    """
    if code == 0:
        return ProcessEnd(0, 0, "", "")
    stopped = [end for end in ends if end.rank == 0 and end.code == Preempted.exit_code]
    specific = [end for end in ends if end.failure_class not in _UNSPECIFIC]
    told = {end.rank for end in ends}
    # The launcher ends the remaining processes by SIGTERM, so this signal is not the reason.
    unsaid = [death.end() for death in deaths if death.rank not in told and death.code != -signal.SIGTERM]
    killed = [end for end in unsaid if end.failure_class is not None]
    unknown = ProcessEnd(-1, code if code > 0 else 128 - code, None, f"the processes ended with code {code}")
    return [*stopped, *specific, *killed, *ends, *unsaid, unknown][0]


def start_attempt() -> None:
    """Delete an earlier attempt's failure from the status file, but keep its progress."""
    _change(lambda values: {key: value for key, value in values.items() if key == "progress"})


def report_progress(progress: Any) -> None:
    """Report the progress of the job as any JSON value that changes when the job advances."""
    _change(lambda values: {**values, "progress": progress})


def report_failure(error: BaseException) -> None:
    """Write to the status file why the job fails, unless it has a reason already.

    Errors without a failure class (`failure_class_of`) are ignored. A process with a launcher records its end for the
    launcher instead, whatever the error is.
    """
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
        with suppress(OSError):  # a job must not fail because its progress cannot be reported
            write_json(path, changed)
