"""MLflow beside a running stage: a thread that brings the journal to the store every few seconds.

Nothing depends on it. Without MLflow, or while the store fails, the stage goes on after one warning, and its points
wait in the journal.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from implicit_llm_contracts.runs.logs import without_password
from implicit_llm_jobs.tracking.kept_runs import KeptRuns
from implicit_llm_jobs.tracking.machine import MachineMonitor
from implicit_llm_jobs.tracking.mlflow_bridge import Bridge, is_complete
from implicit_llm_jobs.tracking.mlflow_store import TrackingError, initialise, prepare_environment
from implicit_llm_jobs.tracking.tracked_run import TrackedInput, TrackedRun

__all__ = ["MlflowWriter", "TrackedInput", "TrackedRun", "TrackingError", "catch_up", "initialise", "open_run"]

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
WAIT_S = 30.0  # for the store at the end of a stage
STOP_WAIT_S = 5.0  # when the stage was asked to stop: the time it has left is for others to use


@dataclass(frozen=True)
class _Request:
    status: str | None
    is_served: threading.Event = field(default_factory=threading.Event)


class MlflowWriter:
    """The thread of one stage; made by `open_run`."""

    def __init__(self, bridge: Bridge | None, machine: MachineMonitor | None = None) -> None:
        self._bridge = bridge
        self._machine = machine
        self._requests: queue.Queue[_Request] = queue.Queue()
        self._has_warned = False
        self._is_late = False
        if bridge is not None:
            # A daemon: a store that does not answer must not keep the process from ending.
            threading.Thread(target=self._serve, name="mlflow-writer", daemon=True).start()

    @property
    def run_id(self) -> str | None:
        """The MLflow run, None as long as there is none."""
        return self._bridge.run_id if self._bridge else None

    def sync(self, wait_s: float = WAIT_S) -> None:
        """Bring everything that is in the journal now, as far as that is possible within `wait_s`."""
        self._ask(None, wait_s)

    def finish(self, status: str) -> None:
        """Bring the rest, set the run's status (FINISHED, FAILED, KILLED, SCHEDULED) and end the threads."""
        if self._machine is not None:
            self._machine.stop()
        self._ask(status, WAIT_S if status in ("FINISHED", "FAILED") else STOP_WAIT_S)

    def _ask(self, status: str | None, wait_s: float) -> None:
        if self._bridge is None:
            return
        request = _Request(status)
        self._requests.put(request)
        # After one wait in vain the next would be one too.
        if not request.is_served.wait(0.0 if self._is_late else wait_s):
            self._is_late = True
            self._warn(self._bridge, f"no answer within {wait_s:g} s")

    def _serve(self) -> None:
        assert self._bridge is not None
        request: _Request | None = None
        has_looked_back = False
        while True:
            try:
                self._bridge.bring(request.status if request else None)
                if request is None and not has_looked_back:
                    self._bring_late_inputs(self._bridge.run)
                    has_looked_back = True
            except Exception as error:  # whatever it is: the tracker stops no run
                reason = without_password(f"{type(error).__name__}: {error}")  # MLflow's errors hold the address
                self._warn(self._bridge, reason.partition("\n")[0][:300])
            if request is not None:
                request.is_served.set()
                if request.status is not None:
                    return
            try:
                request = self._requests.get(timeout=INTERVAL_S)
            except queue.Empty:
                request = None

    def _bring_late_inputs(self, run: TrackedRun) -> None:
        """The store is there: bring what finished runs that this one reads could not bring when it was not."""
        for late in late_inputs(run):
            if not self._requests.empty():  # this run comes first
                return
            Bridge(late).bring("FINISHED")

    def _warn(self, bridge: Bridge, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("MLflow: %s; the run goes on, its metrics wait in %s", reason, bridge.run.journal)


def open_run(run: TrackedRun) -> MlflowWriter:
    """Start bringing the journal of `run` to its MLflow run, the same as before if it was begun before."""
    prepare_environment()
    try:
        # Here and not in the thread: a stage that imports torch at the same time must not meet a half-made module.
        import mlflow  # noqa: F401
    except ImportError:
        log.info("mlflow is not installed; metrics stay in %s", run.journal)
        return MlflowWriter(None)
    machine = MachineMonitor(run.machine_journal)
    machine.start()
    return MlflowWriter(Bridge(run), machine)


def catch_up(run: TrackedRun) -> None:
    """Bring what an earlier process of a finished run could not bring."""
    if is_complete(run.work):
        return
    prepare_environment()
    with suppress(ImportError):
        import mlflow  # noqa: F401

        MlflowWriter(Bridge(run)).finish("FINISHED")


def late_inputs(run: TrackedRun) -> Iterator[TrackedRun]:
    """The finished runs that this one reads, those that these read included, with journals not wholly brought."""
    kept = KeptRuns(run.config_dir)
    for given in run.inputs.values():
        if is_complete(given.work) or given.manifest is None:
            continue
        late = kept.run_in(given.work)
        if late is not None:
            yield from late_inputs(late)
            yield late
