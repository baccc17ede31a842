"""Report the progress of a job: a bar on a terminal, lines in the log."""

import logging
import time
from collections.abc import Callable

from tqdm.auto import tqdm

from implicit_llm_contracts.runs.logs import FILE_ONLY, wants_bar

log = logging.getLogger(__name__)

FIRST_LINE_S, LAST_INTERVAL_S = 5.0, 600.0
INTERVAL_SHARE = 0.1  # of the elapsed time: a line every 6 s after a minute, every 6 minutes after an hour
LINE = "{desc}: {unit} {n}/{total}{postfix}, {rate_fmt}, {remaining} left"


class ProgressLog:
    """A log of progress at growing intervals and at the end; if there is a bar, the terminal shows only the last line.

    where: the text at the start of each line. unit: the unit that is counted to `total`, starting from `first`. shown:
    the setting `progress` of the runtime: "auto", "bar" or "log".
    """

    def __init__(self, where: str, unit: str, total: int, first: int = 0, shown: str = "auto") -> None:
        self._about = {"total": total, "initial": first, "unit": unit}
        self._where, self._total, self._has_bar = where, total, wants_bar(shown)
        self._bar = tqdm(desc=where, disable=not self._has_bar, **self._about)
        self._began_s = self._told_s = time.monotonic()

    def tell(self, done: int, words: Callable[[], str]) -> None:
        """Report that `done` units are finished; `words` returns the text of a line, called only if one is due."""
        self._bar.update(done - self._bar.n)
        now, is_last = time.monotonic(), done >= self._total
        elapsed_s = now - self._began_s
        if not is_last and now - self._told_s < min(max(FIRST_LINE_S, INTERVAL_SHARE * elapsed_s), LAST_INTERVAL_S):
            return
        self._told_s, text = now, words()
        self._bar.set_postfix_str(text)
        if is_last:
            self._bar.close()
        line = tqdm.format_meter(
            done, elapsed=elapsed_s, prefix=self._where, postfix=text, bar_format=LINE, **self._about
        )
        log.info("%s", " ".join(line.split()), extra=FILE_ONLY if self._has_bar and not is_last else None)
