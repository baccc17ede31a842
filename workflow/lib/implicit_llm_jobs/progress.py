"""Progress of an evaluation: a bar on a terminal, lines in the log."""

import logging
import time
from collections.abc import Callable

from tqdm.auto import tqdm

from implicit_llm_contracts.runs import FILE_ONLY, wants_bar

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0


class Progress:
    """One log line every few seconds, and one at the end; beside a bar only the last of them goes to the terminal."""

    def __init__(self, where: str, num_samples: int) -> None:
        self._where, self._num_samples = where, num_samples
        self._next_s = time.monotonic() + PROGRESS_EVERY_S
        self._has_bar = wants_bar()
        self._bar = tqdm(total=num_samples, desc=where, unit="row", disable=not self._has_bar)

    def tell(self, done: int, words: Callable[[], str]) -> None:
        """`words` says how it stands after `done` samples; it is called only when a line is due."""
        self._bar.update(done - self._bar.n)
        is_last = done >= self._num_samples
        if not is_last and time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PROGRESS_EVERY_S
        shown = words()
        self._bar.set_postfix_str(shown)
        if is_last:
            self._bar.close()
        where = FILE_ONLY if self._has_bar and not is_last else None
        log.info("%s: %d/%d samples, %s", self._where, done, self._num_samples, shown, extra=where)
