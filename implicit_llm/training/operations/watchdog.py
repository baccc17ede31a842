"""End a process that hangs, for example in a collective call that another rank does not join, or in a file read."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from pathlib import Path
from typing import NoReturn

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs import launched

log = logging.getLogger(__name__)

EXIT_CODE = 1
_FOR_EVER_S = 1e9  # thirty years
# The watchdog's thread needs the interpreter lock. If a call never releases the lock, faulthandler writes the stacks to
# stderr and ends the process after this multiple of the limit.
_LAST_RESORT = 1.5
_STDERR = 2


class Hang(UserError):
    """The process made no progress for too long."""

    exit_code = EXIT_CODE
    failure_class = "hang"


class Watchdog:
    """A context that ends the process after `limit_s` without a `beat`, and first writes the stacks of all threads.

    The stacks go to a file in `directory`. The training loop calls `beat` after every micro-batch, step, save and
    report. With `limit_s` 0, there is practically no limit.
    """

    def __init__(self, limit_s: float, directory: Path) -> None:
        self._limit_s = limit_s or _FOR_EVER_S
        self._stacks = directory / f"stacks-rank{os.environ.get('RANK', '0')}.txt"
        self._beat_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()

    def beat(self) -> None:
        """Record that the process made progress."""
        self._beat_s = time.monotonic()
        faulthandler.dump_traceback_later(self._limit_s * _LAST_RESORT, exit=True, file=_STDERR)

    def _watch(self) -> None:
        while not self._end.wait(self._beat_s + self._limit_s - time.monotonic()):
            if self._beat_s + self._limit_s <= time.monotonic():
                self._stop()

    def _stop(self) -> NoReturn:
        error = Hang(
            f"no progress for {self._limit_s:g} s; the stacks of all threads are in {self._stacks}, and --hang-s gives "
            "more time where steps or saves take that long"
        )
        try:
            log.error("%s", error)
            with open(self._stacks, "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            launched.report_failure(error)
        finally:
            os._exit(EXIT_CODE)  # only this ends a process whose main thread hangs
