"""Collect one view of each job for all commands: its result and the state of its last attempt.

The view comes from the run directory, the last submission and, for jobs that may still run, Slurm. The inspection
writes nothing and waits for no lock, so commands may inspect jobs at any time.
"""

import math
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.text import Text

from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.atomic import read_object
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import (
    JOURNAL,
    LOG,
    MLFLOW,
    PROVENANCE,
    WORK,
    committed,
    work_directory,
)
from implicit_llm_workflow.estimates import UNKNOWN, Cost
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import Status
from implicit_llm_workflow.text import time_text
from snakemake_executor_plugin_submitit import records
from snakemake_executor_plugin_submitit.records import Submitted
from snakemake_executor_plugin_submitit.store import tail as end_of

State = Literal["running", "queued", "failed", "stopped", "stale", "waiting", "done"]
STATES: dict[str, str] = {  # each with its style in a terminal
    "running": "bold cyan",
    "queued": "cyan",
    "failed": "bold red",
    "stopped": "magenta",
    "stale": "yellow",
    "waiting": "dim",
    "done": "green",
}
TAIL_BYTES = 1 << 18
STAGE_EVENTS = ("stage_started", "stage_finished", "stage_failed", "stage_stopped", "stage_preempted")
STARTING, NO_MESSAGE = "starting", "ended without a message"
SILENT_S = 600  # a job on another machine counts as ended after it has written nothing for this long
LOCKS = Path("/proc/locks")
_LOG_LINE = re.compile(r"\S+ (?P<level>[A-Z]+) [\w.]+: (?P<message>.*)")
# A line is "1: FLOCK  ADVISORY  WRITE 708 08:01:131 0 EOF"; that of a waiting process has "->" before FLOCK.
_LOCK = re.compile(r"^\d+: FLOCK +\S+ +\S+ +(-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", re.M)
_HOLDER = re.compile(r"process (\d+) on (\S+)(?: in Slurm job (\S+))?\s*")
NEVER = Submitted("", "", "ended", "", "", "", 0.0, None, "", Path())  # for jobs that were never submitted


def state_text(state: str) -> Text:
    """Return the name of a state in its style."""
    return Text(state, STATES[state])


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names.

    `is_alive`: whether it still holds the lock; None if it is on another machine, because that is not visible here.
    """

    pid: int
    host: str
    is_alive: bool | None
    slurm_job: str = ""


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training job: its global step, the first and last step of its phase, and its present speed.

    steps_per_s, remaining_s: measured in this attempt; None if the job is not running or has fewer than two points.
    """

    step: int | None = None
    start_step: int | None = None
    end_step: int | None = None
    steps_per_s: float | None = None
    remaining_s: float | None = None

    @property
    def share(self) -> float | None:
        if self.step is None or self.start_step is None or self.end_step is None:
            return None
        return (self.step - self.start_step) / max(self.end_step - self.start_step, 1)


@dataclass(frozen=True)
class CodeChange:
    """A change of the code behind a stage, between two digests.

    `files`: the changed modules and files, as `changed_files` names them; None if the old code was not recorded.
    """

    module: str
    old: str
    new: str
    files: tuple[str, ...] | None


@dataclass(frozen=True)
class JobView:
    """The view of one job.

    `result`: how the job's result compares with the wanted one. `why`: the reason for the state; empty if no reason is
    known or needed. `metrics`: the last known values by name. `unix_s`: when the job last wrote something, in seconds
    since 1970. `doing`, `where`: the last log line and the nodes of a running job. Only `explain` sets the
    following. `runs`: whether the next run includes the job. `code`: the code that has changed. `cost`: the cost of the
    job, or of its result if that is fresh.
    """

    node: Node
    result: Status
    state: State
    why: str = ""
    failure_class: str | None = None
    progress: TrainingProgress = TrainingProgress()
    metrics: Mapping[str, float] = field(default_factory=dict)
    unix_s: float | None = None
    mlflow_run_id: str | None = None
    submitted: Submitted | None = None
    doing: str = ""
    where: str = ""
    runs: bool = False
    code: CodeChange | None = None
    cost: Cost = UNKNOWN

    @property
    def has_result(self) -> bool:
        """Whether the wanted result exists."""
        return self.result.state == "fresh"

    @property
    def age_s(self) -> float | None:
        """The seconds since the job last wrote something."""
        return None if self.unix_s is None else max(0.0, time.time() - self.unix_s)


def observe(plan: Plan, keys: Iterable[str] | None = None) -> dict[str, JobView]:
    """Return the views of the jobs with these keys, or of all jobs of the plan if `keys` is None."""
    statuses, driver = plan.look(), holder_of(plan.driver_lock)
    wanted = list(plan.nodes if keys is None else keys)
    unfinished = (plan.nodes[key] for key in wanted if statuses[key].state != "fresh")
    submitted = submitted_jobs(plan, {node.key: plan.outputs(node).values() for node in unfinished})
    starts_jobs = driver is not None and driver.is_alive and not plan.is_driver_stopping
    since = _modified(plan.driver_lock) if starts_jobs else 0.0
    return {key: _Job(plan, key, statuses, submitted.get(key), since).observed() for key in wanted}


def submitted_jobs(plan: Plan, outputs: Mapping[str, Iterable[str | Path]]) -> dict[str, Submitted]:
    """Return the last submission of each job, without jobs that were never submitted. `outputs`: by any key of the job.

    Slurm is queried at most once, and only if a job may still run.
    """
    folder = plan.root.parent.parent.absolute() / records.DEFAULT_FOLDER
    keys = {name: records.job_key(map(os.path.abspath, paths)) for name, paths in outputs.items()}
    found = records.read_jobs(folder, set(keys.values()))
    return {name: found[job] for name, job in keys.items() if job in found}


@dataclass(frozen=True)
class FailedPreflight:
    """A failed preflight, which blocks the jobs of its hardware class.

    `why`: the executor's message, such as that Slurm refused the job; empty if there is none.
    """

    hardware: str
    log: Path
    why: str


def failed_preflights(plan: Plan) -> list[FailedPreflight]:
    """Return the failed preflights; if a job failed before its command started, `log` is the executor's log."""
    logs = [log for log in sorted((plan.root / ".preflight").glob("*.log")) if not log.with_suffix(".json").exists()]
    submitted = submitted_jobs(plan, {log.stem: [log.with_suffix(".json")] for log in logs})
    found = []
    for log in logs:
        last = submitted.get(log.stem)
        if last is None:  # Snakemake ran it without our executor
            found += [FailedPreflight(log.stem, log, "")] if last_lines(log, 1) else []
        elif last.has_failed:  # otherwise it was interrupted, or runs without a driver
            is_its_own = last_lines(log, 1) and _modified(log) >= last.submitted_unix_s
            found.append(FailedPreflight(log.stem, log if is_its_own else last.output_log, last.message))
    return found


def holder_of(path: Path) -> Holder | None:
    """Return the holder that a lock file names as "process 123 on HOST in Slurm job 7", or None if it names none.

    A command such as `gc`, which is named before its process, is none.
    This does not try to acquire the lock, which would block a job that starts at the same time.
    """
    try:
        match = _HOLDER.fullmatch(path.read_text(encoding="utf-8", errors="replace"))
        about = path.stat()
    except OSError:
        return None
    if match is None:
        return None
    pid, host = int(match[1]), match[2]
    return Holder(pid, host, _is_locked(pid, about) if host == socket.gethostname() else None, match[3] or "")


def _is_locked(pid: int, file: os.stat_result) -> bool:
    """Return whether /proc/locks lists a lock on this file; the pid alone may belong to another process by now.

    A listed lock must have the file's inode, which files on other devices can share. It must also have the file's
    device or the pid, because some file systems, such as Btrfs, report another device than /proc/locks. Without
    /proc/locks, return whether the process exists.
    """
    try:
        locks = _LOCK.findall(LOCKS.read_text(encoding="utf-8"))
    except OSError:
        return psutil.pid_exists(pid)
    device = (os.major(file.st_dev), os.minor(file.st_dev))
    return any(
        int(inode) == file.st_ino and (int(owner) == pid or (int(major, 16), int(minor, 16)) == device)
        for owner, major, minor, inode in locks
    )


@dataclass(frozen=True)
class Tail:
    """The end of a journal.

    `event`: the last start or end of the stage; empty only if no line is valid. `points`: the valid points of the last
    attempt; if it has none, the last point before it. `unix_s`: the time of the last line, in seconds since 1970.
    """

    event: Mapping[str, Any] = field(default_factory=dict)
    points: tuple[journal.Point, ...] = ()
    unix_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the stage has started and recorded no end; a killed stage records none."""
        return self.event.get("name") == "stage_started"

    @property
    def last(self) -> journal.Point | None:
        return self.points[-1] if self.points else None


def read_tail(path: Path) -> Tail:
    """Read the last lines of a journal and skip damaged ones; the result is empty if no valid line is found."""
    found: list[dict[str, Any]] = []
    for line in end_of(path, TAIL_BYTES).split("\n")[:-1]:
        with suppress(journal.JournalError):  # the first line may be incomplete
            found.append(journal.parse_line(line.encode(), str(path)))
    if not found:
        return Tail()
    # If these lines contain no event, the stage started before them: only a start can follow an end.
    events = [record for record in found if record.get("name") in STAGE_EVENTS] or [{"name": "stage_started"}]
    since = max((at for at, record in enumerate(found) if record.get("name") == "stage_started"), default=0)
    points = journal.points_of(found[since:]) or journal.points_of(found)[-1:]
    return Tail(events[-1], tuple(points), unix_s(found[-1]["time"]))


def unix_s(time: str) -> float:
    """Return a time of the journal in seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()


class _Job:
    """The inspection of one job, which determines its state.

    driven_since: when the driver that still starts jobs began; 0 if there is none. ready_since: the same time, but 0
    also if an input of the job is not fresh.
    """

    def __init__(
        self,
        plan: Plan,
        key: str,
        statuses: Mapping[str, Status],
        submitted: Submitted | None,
        driven_since: float,
    ) -> None:
        self.node, self.status = plan.nodes[key], statuses[key]
        self.submitted, self.last = submitted, submitted or NEVER
        is_ready = all(statuses[item].state == "fresh" for item in self.node.upstream.values())
        self.ready_since = driven_since if is_ready else 0.0
        self.run_dir, self.wanted = plan.run_dir(self.node), Path(plan.work[key])
        self.log = self.wanted / LOG
        self.holder = holder_of(self.run_dir / WORK / ".lock")
        self.is_held = self.holder is not None and self.holder.is_alive is True
        job = self.holder.slurm_job if self.holder is not None and self.is_held else ""
        is_other_job = job not in ("", self.last.job_id) and self.last.cluster != "local"
        if self.is_held and (is_other_job or not self.wanted.is_dir()):
            # Another job, often with former settings, holds the lock; `submitted` waits for it or failed because of it.
            former = replace(NEVER, job_id=job, cluster="slurm", state="running") if job else None
            self.submitted, self.last = former, former or NEVER

    def observed(self) -> JobView:
        recorded = self.status.recorded
        if self.status.state == "fresh" and recorded is not None:
            return self._of_result("done", self.status.why, recorded)
        work = self._work()
        tail = read_tail(work / JOURNAL)
        state, why, failure_class = self._state(tail)
        if state == "stale" and recorded is not None:
            return self._of_result(state, why, recorded)
        is_running = state == "running"
        is_at_work = is_running and (tail.is_open or self.is_held)
        written = _modified(self.log) if state in ("failed", "running", "stopped") else 0.0
        values = tail.last.values if tail.last is not None else {}
        return JobView(
            self.node,
            self.status,
            state,
            why,
            failure_class,
            _progress(self.node, tail, is_running=is_at_work),
            {key: value for key, value in values.items() if math.isfinite(value)},
            tail.unix_s or written or None,
            read_object(work / MLFLOW).get("run_id"),
            self.submitted,
            last_message(self.log) if is_at_work else STARTING if is_running else "",
            self.last.nodes or str(tail.event.get("host") or "") if is_running else "",
        )

    def _of_result(self, state: State, why: str, recorded: Manifest) -> JobView:
        """Return the view of a job from the result that `recorded` describes, which may be stale."""
        work = work_directory(self.run_dir, recorded.fingerprint)
        finished = _modified(committed(work) or work)
        # The recorded time is preferred, because copying a file changes its modification time.
        with suppress(KeyError, ValueError, TypeError):
            finished = unix_s(read_object(work / PROVENANCE)["finished"])
        phase, metrics = recorded.config.get("phase") or {}, recorded.summary.get("metrics") or {}
        return JobView(
            self.node,
            self.status,
            state,
            why,
            progress=TrainingProgress(
                recorded.summary.get("global_step"), phase.get("start_step"), phase.get("end_step")
            ),
            metrics={key: float(value) for key, value in metrics.items() if isinstance(value, int | float)},
            unix_s=finished or None,
            mlflow_run_id=read_object(work / MLFLOW).get("run_id"),
            submitted=self.submitted,
        )

    def _work(self) -> Path:
        """Return the work folder of the wanted result, or the folder in which a job with former settings still runs."""
        journals = [] if self.wanted.is_dir() or not self.is_held else [*self.run_dir.glob(f"{WORK}/*/{JOURNAL}")]
        return max(journals, key=_modified).parent if journals else self.wanted

    def _state(self, tail: Tail) -> tuple[State, str, str | None]:
        """Return the state, the reason for it, and the class of a failure."""
        if self.is_held or self.last.state == "running":
            is_wanted = self.wanted.is_dir() or not self.is_held
            return "running", "" if is_wanted else "with former settings or code", None
        if self.last.state == "queued":
            return "queued", self.last.reason, None
        if self._runs_elsewhere(tail):
            return "running", "", None
        if self.last.state is None and not tail.event:
            return "queued", f"{'Slurm' if self.last.cluster == 'slurm' else 'its machine'} gives no answer", None
        ended = self._how_it_ended(tail)
        # A driver that started after the last submission and the last line of the journal will still start the job.
        is_tried_again = self.ready_since > max(tail.unix_s, self.last.submitted_unix_s)
        if ended is not None and not is_tried_again:
            return ended
        if self.status.state == "stale":
            return "stale", self.status.why, None
        return "queued" if self.ready_since else "waiting", "", None

    def _runs_elsewhere(self, tail: Tail) -> bool:
        """Return whether the job seems to run on another machine, where its processes are not visible.

        It seems to run if it recorded no end and wrote something recently.
        """
        is_elsewhere = self.holder is not None and self.holder.is_alive is None
        has_ended = self.submitted is not None and self.submitted.state == "ended"
        is_silent = time.time() - max(tail.unix_s, _modified(self.log)) > SILENT_S
        return tail.is_open and is_elsewhere and not has_ended and not is_silent

    def _silent_holder(self) -> str:
        """Return a text that names the lock's holder on another machine if it may still run; else ""."""
        has_ended = self.submitted is not None and self.submitted.state == "ended"
        if self.holder is None or self.holder.is_alive is not None or has_ended:
            return ""
        job = f" in Slurm job {self.holder.slurm_job}" if self.holder.slurm_job else ""
        who = f"process {self.holder.pid} on {self.holder.host}{job}"
        return f"{who} is silent for over {time_text(SILENT_S)}; does it run?"

    def _how_it_ended(self, tail: Tail) -> tuple[State, str, str | None] | None:
        """Return state, reason and failure class of the last attempt, or None if nothing shows that it ended."""
        last = self.last if self.last.state == "ended" else NEVER
        kind, message, event = last.failure_class, last.message, tail.event
        is_stop = not last.has_failed
        stopped: State = "stopped" if is_stop else "failed"
        is_submitted_since = last.submitted_unix_s > tail.unix_s  # the journal is from an earlier submission
        if committed(self.wanted) is not None and (is_stop or not is_submitted_since):
            return None  # the attempt finished; the next job publishes its result, or computes a forced one again
        if event and is_submitted_since:
            return stopped, message or NO_MESSAGE, kind
        error = " ".join(str(event.get("error") or "").split())
        match event.get("name"):
            case "stage_failed":
                return "failed", error, event.get("failure_class") or kind
            case "stage_preempted" | "stage_stopped" if is_stop:
                return "stopped", error, None
            case "stage_started" | "stage_finished" if is_stop:
                return "stopped", message or self._silent_holder() or NO_MESSAGE, None
        if kind is not None:
            return stopped, message, kind
        line = "" if event else last_message(self.log, level="ERROR")
        return ("failed", line, None) if line else None


def last_message(log: Path, level: str | None = None) -> str:
    """Return the last message of a job's log; "" if there is none, or if its level is not the given `level`."""
    match = next(filter(None, map(_LOG_LINE.match, reversed(last_lines(log, 40)))), None)
    return match["message"] if match is not None and level in (None, match["level"]) else ""


def last_lines(log: Path, number: int) -> list[str]:
    """Return the last `number` lines of a text file that are not empty."""
    lines = [line for line in end_of(log).splitlines() if line.strip()]
    return lines[max(0, len(lines) - number) :]


def _progress(node: Node, tail: Tail, *, is_running: bool) -> TrainingProgress:
    """Return the progress; its speed comes from the later half of the points, because the first steps are slow."""
    phase = node.config.get("phase") or {}
    start, end = phase.get("start_step"), phase.get("end_step")
    if tail.last is None or not is_running or len(tail.points) < 2:
        return TrainingProgress(tail.last.step if tail.last is not None else None, start, end)
    first = tail.points[(len(tail.points) - 1) // 2]
    steps, seconds = tail.last.step - first.step, unix_s(tail.last.time) - unix_s(first.time)
    rate = steps / seconds if steps > 0 and seconds > 0 else None
    remaining_s = max(0, end - tail.last.step) / rate if rate and end else None
    return TrainingProgress(tail.last.step, start, end, rate, remaining_s)


def _modified(path: Path) -> float:
    """Return when the file was last written, in seconds since 1970; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
