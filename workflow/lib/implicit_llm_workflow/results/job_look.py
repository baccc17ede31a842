"""One look at one job: its state, its progress and its numbers, from its run directory and its last submission."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import PROVENANCE, WORK, work_directory
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.recorded import MLFLOW, read_object
from implicit_llm_workflow.planning.staleness import Status
from implicit_llm_workflow.results.journals import JOURNAL, Point, Tail, read_tail
from implicit_llm_workflow.results.lock_holder import holder_of

if TYPE_CHECKING:
    from snakemake_executor_plugin_submitit.records import Submitted

State = Literal["running", "queued", "failed", "stopped", "stale", "waiting", "done"]
STATES: tuple[State, ...] = get_args(State)
LOG = "job.log"
STARTING, NO_WORD = "starting", "ended without a word"
SILENT_S = 600  # a job of another machine that nobody answers for, and that has written nothing for so long, has ended
_LOG_LINE = re.compile(r"\S+ (?P<level>[A-Z]+) [\w.]+: (?P<message>.*)")


@dataclass(frozen=True)
class Progress:
    """Of a job with steps: the global step, and the first and last one of the phase. Rates are of this attempt."""

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
class Observed:
    """One job. `why`: of what is neither done nor waiting; `metrics`: the last ones that are known, by their names in
    the journal; `unix_s`: when it last wrote something; `doing`: the last line in the log of a running job.
    """

    node: Node
    state: State
    why: str = ""
    failure_class: str | None = None
    progress: Progress = Progress()
    metrics: Mapping[str, float] = field(default_factory=dict)
    unix_s: float | None = None
    mlflow_run_id: str | None = None
    submitted: Submitted | None = None
    recorded: Manifest | None = None
    doing: str = ""
    where: str = ""


class JobLook:
    """One look at one job. `ready_since`: when a driver that lives began, if all that the job reads is there."""

    def __init__(
        self, plan: Plan, node: Node, status: Status, submitted: Submitted | None, ready_since: float | None
    ) -> None:
        self.node, self.status, self.submitted, self.ready_since = node, status, submitted, ready_since
        self.run_dir, self.wanted = plan.run_dir(node), plan.identities[node.key]
        self.identity_file = plan.identity_file(node)

    def observed(self) -> Observed:
        recorded = self.status.recorded
        if self.status.state == "fresh" and recorded is not None:
            return self._of_result("done", self.status.why, recorded)
        work = self._work()
        tail = read_tail(work / JOURNAL)
        state, why, failure_class = self._state(tail)
        if state == "stale" and recorded is not None:
            return self._of_result(state, why, recorded)
        is_running = state == "running"
        is_at_work = is_running and (tail.is_open or self._is_held)
        return Observed(
            self.node,
            state,
            why,
            failure_class,
            _progress(self.node, tail, is_running=is_at_work),
            tail.last.values if tail.last is not None else {},
            tail.unix_s or (_modified(self.run_dir / LOG) if state in ("failed", "running", "stopped") else None),
            _mlflow_run_id(work),
            self.submitted,
            recorded,
            last_message(self.run_dir / LOG) if is_at_work else STARTING if is_running else "",
            self._where(tail) if is_running else "",
        )

    def _of_result(self, state: State, why: str, recorded: Manifest) -> Observed:
        """By the result that is there."""
        work = work_directory(self.run_dir, recorded.fingerprint)
        return Observed(
            self.node,
            state,
            why,
            progress=_final_progress(recorded),
            metrics=_numbers(recorded.summary.get("metrics")),
            unix_s=_finished(work) or _modified(self.run_dir / MANIFEST),
            mlflow_run_id=_mlflow_run_id(work),
            submitted=self.submitted,
            recorded=recorded,
        )

    def _work(self) -> Path:
        """Of the wanted result; of former settings while a job still makes that."""
        wanted = work_directory(self.run_dir, self.wanted.fingerprint)
        if wanted.is_dir() or not self._is_held:
            return wanted
        journals = sorted(self.run_dir.glob(f"{WORK}/*/{JOURNAL}"), key=lambda path: _modified(path) or 0.0)
        return journals[-1].parent if journals else wanted

    @property
    def _is_held(self) -> bool:
        holder = holder_of(self.run_dir / WORK / ".lock")
        return holder is not None and holder.is_alive is True

    def _state(self, tail: Tail) -> tuple[State, str, str | None]:
        """The state, why, and the class of a failure."""
        submitted = self.submitted
        if self._is_held or (submitted is not None and submitted.state == "running"):
            is_wanted = work_directory(self.run_dir, self.wanted.fingerprint).is_dir() or not self._is_held
            return "running", "" if is_wanted else "with settings or code of before", None
        if submitted is not None and submitted.state == "queued":
            return "queued", submitted.reason, None
        if self._runs_elsewhere(tail):
            return "running", "", None
        if submitted is not None and submitted.state is None and tail.event is None:
            return "queued", f"{'Slurm' if submitted.cluster == 'slurm' else 'its machine'} gives no answer", None
        is_made = (
            work_directory(self.run_dir, self.wanted.fingerprint) / MANIFEST
        ).is_file()  # the next job publishes it
        ended = None if is_made else self._how_it_ended(tail)
        if ended is not None and not self._is_tried_again(tail):
            return ended
        if self.status.state == "stale":
            return "stale", self.status.why, None
        return ("queued", "", None) if self.ready_since is not None else ("waiting", "", None)

    def _is_tried_again(self, tail: Tail) -> bool:
        """Whether a driver that lives has begun since the last attempt ended: its turn is still to come."""
        ended = max(tail.unix_s or 0.0, self.submitted.submitted_unix_s if self.submitted is not None else 0.0)
        return self.ready_since is not None and self.ready_since > ended

    def _runs_elsewhere(self, tail: Tail) -> bool:
        """Whether a job of another machine, which nobody here can look at, has lately written something."""
        holder = holder_of(self.run_dir / WORK / ".lock")
        if not tail.is_open or holder is None or holder.is_alive is not None:
            return False
        if self.submitted is not None and self.submitted.state == "ended":
            return False
        signs = [tail.unix_s or 0.0, _modified(self.run_dir / LOG) or 0.0]
        return time.time() - max(signs) < SILENT_S

    def _how_it_ended(self, tail: Tail) -> tuple[State, str, str | None] | None:
        """The last attempt at the wanted result, None if there was none or it finished."""
        kind, message = self._outcome()
        event = tail.event or {}
        if self._is_submitted_since(tail):
            return ("stopped" if kind in (None, "preempted") else "failed"), message or NO_WORD, kind
        error = " ".join(str(event.get("error") or "").split())
        match event.get("name"):
            case "stage_failed":
                return "failed", error, event.get("failure_class") or kind
            case "stage_preempted" | "stage_stopped" if kind in (None, "preempted"):
                return "stopped", error, None
            case "stage_started" | "stage_finished" if kind is None or kind == "preempted":
                return "stopped", message or NO_WORD, None
        if kind is not None:
            return ("stopped" if kind == "preempted" else "failed"), message, kind
        line = last_message(self.run_dir / LOG, level="ERROR") if tail.event is None and self._is_log_of_this() else ""
        return ("failed", line, None) if line else None

    def _outcome(self) -> tuple[str | None, str]:
        """Class and message of the last submission, if it ended badly and was for the wanted result."""
        if self.submitted is None or not self._is_submission_of_this:
            return None, ""
        return self.submitted.failure_class, self.submitted.message

    def _is_submitted_since(self, tail: Tail) -> bool:
        """Whether the last submission ended before it wrote into the journal, which tells of an earlier one."""
        is_newer = self.submitted is not None and self.submitted.submitted_unix_s > (tail.unix_s or 0.0)
        return is_newer and tail.event is not None and self._is_submission_of_this

    @property
    def _is_submission_of_this(self) -> bool:
        """Whether the last submission has ended, and was made after the wanted result was first asked for."""
        submitted, known = self.submitted, _modified(self.identity_file)
        if submitted is None or submitted.state != "ended" or known is None:
            return False
        return known <= submitted.submitted_unix_s + 1

    def _is_log_of_this(self) -> bool:
        """Whether the log was written after the wanted result was first asked for."""
        known, written = _modified(self.identity_file), _modified(self.run_dir / LOG)
        return known is not None and written is not None and written >= known

    def _where(self, tail: Tail) -> str:
        if self.submitted is not None and self.submitted.nodes:
            return self.submitted.nodes
        return str((tail.event or {}).get("host") or "")


def last_message(log: Path, level: str | None = None) -> str:
    """The last whole line of a job's log without time and module; "" if it has another level than `level`."""
    for line in reversed(last_lines(log, 40)):
        match = _LOG_LINE.match(line)
        if match is not None:
            return match["message"] if level in (None, match["level"]) else ""
    return ""


def last_lines(log: Path, number: int, limit_bytes: int = 1 << 16) -> list[str]:
    """The last lines of a text file that are not empty."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - limit_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-number:]


def _progress(node: Node, tail: Tail, *, is_running: bool) -> Progress:
    phase = node.config.get("phase") or {}
    start, end = phase.get("start_step"), phase.get("end_step")
    last = tail.last
    if last is None:
        return Progress(None, start, end)
    rate = _rate(tail.points) if is_running else None
    remaining = None if rate is None or end is None else max(0, end - last.step) / rate
    return Progress(last.step, start, end, rate, remaining)


def _rate(points: tuple[Point, ...]) -> float | None:
    """Steps a second over the later half of the points, at least two: the first steps of a job are slow."""
    recent = points[min(len(points) // 2, len(points) - 2) :] if len(points) > 1 else ()
    if not recent:
        return None
    steps, seconds = recent[-1].step - recent[0].step, recent[-1].unix_s - recent[0].unix_s
    return steps / seconds if steps > 0 and seconds > 0 else None


def _final_progress(recorded: Manifest) -> Progress:
    phase = recorded.config.get("phase")
    phase = phase if isinstance(phase, Mapping) else {}
    step = recorded.summary.get("global_step")
    return Progress(step, phase.get("start_step"), phase.get("end_step"))


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {key: float(value) for key, value in values.items() if isinstance(value, int | float)}


def _mlflow_run_id(work: Path) -> str | None:
    return read_object(work / MLFLOW).get("run_id")


def _finished(work: Path) -> float | None:
    """When the job said that it finished: the time of a file changes when it is copied."""
    try:
        return datetime.fromisoformat(read_object(work / PROVENANCE)["finished"]).timestamp()
    except (ValueError, KeyError, TypeError):
        return None


def _modified(path: Path) -> float | None:
    """When the file was last written, in seconds since 1970."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
