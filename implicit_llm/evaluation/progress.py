"""Progress of an evaluation in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0


class Progress:
    """One log line every few seconds, and one at the end."""

    def __init__(self, where: str, num_samples: int) -> None:
        self._where, self._num_samples = where, num_samples
        self._next_s = time.monotonic() + PROGRESS_EVERY_S

    def tell(self, done: int, words: Callable[[], str]) -> None:
        """`words` says how it stands after `done` samples; it is called only when a line is due."""
        if done < self._num_samples and time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PROGRESS_EVERY_S
        log.info("%s: %d/%d samples, %s", self._where, done, self._num_samples, words())
