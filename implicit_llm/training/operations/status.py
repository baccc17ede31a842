"""What a person sees while a phase trains: log lines at growing intervals, or a bar."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm

from implicit_llm.training.distributed import is_main

FIRST_LINE_S, LAST_INTERVAL_S = 5.0, 600.0
_INTERVAL_SHARE = 0.1  # of the time so far: a line every 6 s after a minute, every 6 minutes after an hour
_SHOWN = (
    ("loss", "loss {:.4f}"),
    ("accuracy_last10", "last-10 {:.3f}"),
    ("accuracy", "accuracy {:.3f}"),
    ("f_evaluations", "f-evaluations {:.1f}"),
    ("tokens_per_s", "{:,.0f} tokens/s"),
    ("mfu", "mfu {:.1%}"),
)
# Of a line in the log; a bar has no room for them.
_SHOWN_IN_LINES = (
    ("residual", "residual {:.2g}"),
    ("unconverged_share", "unconverged {:.0%}"),
    ("mode_gap", "mode gap {:+.3f}"),
    ("spectral_radius", "spectral radius {:.3f}"),
    ("grad_norm", "gradient {:.2g}"),
    ("learning_rate", "rate {:.2g}"),
    ("memory_gib", "{:.1f} GiB"),
)


class StatusLine:
    """Shows progress from numbers that were logged anyway, so that it never waits for the device.

    values: the metrics logged last; the owner keeps them up to date.
    """

    def __init__(self, name: str, log: logging.Logger, *, bar: bool) -> None:
        self.values: Mapping[str, float] = {}
        self._name = name
        self._log = log
        self._bar_wanted = bar
        self._bar: Any = None
        self._first, self._end_step = (0, 0.0), 0
        self._shown_at = 0.0

    def start(self, step: int, end_step: int) -> None:
        """Begin after `step` finished steps."""
        self._shown_at = time.monotonic()
        self._first, self._end_step = (step, self._shown_at), end_step
        if self._bar_wanted and is_main():
            self._bar = tqdm(total=end_step, initial=step, desc=self._name, unit="step")

    def update(self, step: int) -> None:
        """Show the progress after `step`, if it is time to."""
        if self._bar is not None:
            self._bar.update(1)
        now = time.monotonic()
        if now - self._shown_at < self._interval_s(now) or not is_main():
            return
        self._shown_at = now
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(shown(self.values)))
        else:
            self._log.info("%s", self.line(step, now))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _interval_s(self, now: float) -> float:
        if self._bar is not None:
            return FIRST_LINE_S
        return min(max(FIRST_LINE_S, _INTERVAL_SHARE * (now - self._first[1])), LAST_INTERVAL_S)

    def line(self, step: int, now: float) -> str:
        """The state of affairs after `step` at the time `now` (of time.monotonic)."""
        first_step, started = self._first
        rate = (step - first_step) / max(now - started, 1e-9)
        left_s = (self._end_step - step) / rate if rate else float("inf")
        speed = f"{rate:.1f} steps/s" if rate >= 1 or not rate else f"{1 / rate:.1f} s/step"
        parts = [*shown(self.values, _SHOWN + _SHOWN_IN_LINES), speed, f"{duration(left_s)} left"]
        return f"{self._name}: step {step}/{self._end_step}, {', '.join(parts)}"


def shown(values: Mapping[str, float], wanted: Sequence[tuple[str, str]] = _SHOWN) -> list[str]:
    """The metrics worth a place in one line."""
    return [text.format(values[key]) for key, text in wanted if key in values]


def duration(seconds: float) -> str:
    """For example 45 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min" if seconds < 1e7 else "a long time"
