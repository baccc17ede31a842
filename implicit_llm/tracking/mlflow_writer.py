"""MLflow beside a running stage: a thread that brings the journal to the store every few seconds.

Nothing depends on it. Without MLflow, or while the store fails, the stage goes on after one warning, and its points
wait in the journal.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path

from implicit_llm.tracking.mlflow_bridge import Bridge, BridgeState, TrackedRun, is_complete
from implicit_llm.tracking.mlflow_store import TrackingError, initialise

__all__ = ["MlflowWriter", "TrackedRun", "TrackingError", "catch_up", "initialise", "open_run", "run_id_of"]

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

    def __init__(self, bridge: Bridge | None) -> None:
        self._bridge = bridge
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
        """Bring the rest, set the run's status (FINISHED, FAILED, KILLED, SCHEDULED) and end the thread."""
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
        while True:
            try:
                self._bridge.bring(request.status if request else None)
            except Exception as error:  # whatever it is: the tracker stops no run
                self._warn(self._bridge, f"{type(error).__name__}: {error}".partition("\n")[0][:300])
            if request is not None:
                request.is_served.set()
                if request.status is not None:
                    return
            try:
                request = self._requests.get(timeout=INTERVAL_S)
            except queue.Empty:
                request = None

    def _warn(self, bridge: Bridge, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("MLflow: %s; the run goes on, its metrics wait in %s", reason, bridge.run.journal)


def open_run(run: TrackedRun) -> MlflowWriter:
    """Start bringing the journal of `run` to its MLflow run, the same as before if it was begun before."""
    try:
        # Here and not in the thread: a stage that imports torch at the same time must not meet a half-made module.
        import mlflow  # noqa: F401
    except ImportError:
        log.info("mlflow is not installed; metrics stay in %s", run.journal)
        return MlflowWriter(None)
    return MlflowWriter(Bridge(run))


def catch_up(run: TrackedRun) -> None:
    """Bring what an earlier process of a finished run could not bring."""
    if run.journal.exists() and not is_complete(run):
        open_run(run).finish("FINISHED")


def run_id_of(work: Path) -> str | None:
    """The MLflow run of the work directory `work`, None when it never had one."""
    state = BridgeState.read(work)
    return state.run_id if state else None
