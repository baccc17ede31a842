"""A request to stop, as Slurm and submitit send it: finish the step, commit, exit as one to be started again."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopRequest:
    """Context in which the stop signals only set a flag; afterwards they do what they did before."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._another = threading.Event()
        self._previous: dict[signal.Signals, object] = {}

    def __bool__(self) -> bool:
        return self.received is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python has no signal handlers
            self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def wait_for_another(self, seconds: float) -> None:
        """Return when a signal arrives from now on, or after `seconds`."""
        self._another.clear()
        self._another.wait(seconds)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._another.set()
        if self.received is None:
            self.received = signal.Signals(number).name
            log.warning("%s received: the step is finished and committed, then training stops", self.received)
