"""Record stop signals of Slurm, submitit or Ctrl-C, so that training can commit its state before it stops."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType

from implicit_llm_contracts.runs import faults, signals
from implicit_llm_contracts.runs.launched import LaunchFolder

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
LEAVE_LAST_S = 10.0
LEAVE_LAST_LAUNCHED_S = 60.0  # other nodes see a new file with a delay


class StopRequest:
    """A context in which stop signals only set a flag; afterwards, the previous handlers are restored.

    After a first signal, a Ctrl-C (SIGINT) raises KeyboardInterrupt: the user does not want to wait for the step.
    On entry, the context announces to the launcher, if there is one, that this process now handles signals.
    Outside of the main thread, the context does nothing. received: the name of the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._another = threading.Event()
        self._previous: dict[signal.Signals, object] = {}

    def __bool__(self) -> bool:
        return self.received is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # the only thread with signal handlers
            # A shell makes its background jobs ignore Ctrl-C, which is meant for the job in the foreground.
            is_in_background = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            heard = [number for number in SIGNALS if not (number == signal.SIGINT and is_in_background)]
            self._previous = {number: signals.handle(number, self._receive) for number in heard}
            folder = LaunchFolder.of_this_process()
            if folder is not None:
                folder.announce()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signals.restore(number, handler)

    def let_main_end_first(self) -> None:
        """Make a rank above 0 wait until rank 0 has recorded why all ranks end early, or until a time limit.

        When the first rank exits, the launcher or torchrun kills the others. Torchrun does not report that rank 0 has
        exited. Under torchrun, the wait therefore ends with the signal that torchrun sends after this exit.
        """
        folder = LaunchFolder.of_this_process()
        if folder is None:
            self._another.clear()
            self._another.wait(LEAVE_LAST_S)
            return
        deadline = time.monotonic() + LEAVE_LAST_LAUNCHED_S
        while not folder.has_ended(0) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        faults.point("stop.received")
        self._another.set()
        if self.received is None:
            self.received = signal.Signals(number).name
            again = " (press Ctrl-C again to stop at once)" if number == signal.SIGINT else ""
            log.warning("%s received: training stops after the next step that can be committed%s", self.received, again)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
