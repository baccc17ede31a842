"""What a person is told while a phase trains: log lines at growing intervals or a bar, rates, alarms of the solver.

Rates are from one report to the next; the device is not asked to wait for it. The model FLOPs utilisation compares them
with the peak rates of accelerators; a device that is not listed has none.
"""

import logging
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from implicit_llm.training.distributed import is_main
from implicit_llm.training.metrics import Totals
from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.runs import Journal

log = logging.getLogger(__name__)

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


class SpeedMeter:
    """Rates over all ranks since the last report."""

    def __init__(self, precision: str, device: torch.device, world_size: int) -> None:
        self._device = device
        self._peak: float | None = None
        if device.type == "cuda":
            of_one = peak_flops(torch.cuda.get_device_name(device), precision)
            self._peak = None if of_one is None else of_one * world_size
        self.start(Totals())

    def start(self, totals: Totals) -> None:
        """Begin to measure from here."""
        self._before = (totals.tokens, totals.flops, time.monotonic())

    def read(self, totals: Totals) -> dict[str, float]:
        """tokens_per_s and flops_per_s; mfu where the device's peak is known, the GPU's peak memory where there is one.

        Call it after the metrics were read, when the device has done what is counted.
        """
        tokens, flops, then = self._before
        seconds = max(time.monotonic() - then, 1e-9)
        rate = (totals.flops - flops) / seconds
        values = {"tokens_per_s": (totals.tokens - tokens) / seconds, "flops_per_s": rate}
        if self._peak is not None:
            values["mfu"] = rate / self._peak
        if self._device.type == "cuda":
            values["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        self.start(totals)
        return values


# Dense TFLOP/s of the data sheets: (part of the device's name, of 16-bit formats, of fp32).
# The first name that fits counts.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    (r"H100 PCIe", 756.0, 51.2),
    (r"H100 NVL", 835.0, 60.0),
    (r"\bG?H[12]00\b", 989.4, 66.9),
    (r"\bA100\b", 312.0, 19.5),
    (r"\bV100-PCIE", 112.0, 14.0),
    (r"\bV100\b", 125.0, 15.7),
    (r"\bMI300X\b", 1307.4, 163.4),
)
_HAS_NO_BF16 = re.compile(r"\bV100\b")


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s that the device could do in matrix products of `precision` (fp32, bf16, fp16), or None."""
    for pattern, half, full in _PEAKS:
        if re.search(pattern, device_name):
            if precision == "fp32":
                return 1e12 * full
            if precision == "bf16" and _HAS_NO_BF16.search(device_name):
                return None
            return 1e12 * half
    return None


_QUIET_WINDOWS = 10  # between the first alarm and the second; then each pause is twice the one before


class SolverAlarm:
    """Watches means over a window of steps; speaks now and then, in the log and as the event `solver_alarm`."""

    def __init__(self, runtime: Runtime, journal: Journal) -> None:
        limits = {"unconverged_share": runtime.alarm_unconverged_share, "residual": runtime.alarm_residual}
        self._limits = {key: limit for key, limit in limits.items() if limit is not None}
        self._rows: deque[Mapping[str, float]] = deque(maxlen=runtime.alarm_window_steps)
        self._journal = journal
        self._quiet_until = 0
        self._pause_steps = _QUIET_WINDOWS * runtime.alarm_window_steps

    def observe(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Take the metrics of the steps that end with `step`; those of explicit and unrolled phases say nothing."""
        self._rows.extend(rows)
        if len(self._rows) < (self._rows.maxlen or 0) or step < self._quiet_until:
            return
        means = {key: sum(row[key] for row in self._rows) / len(self._rows) for key in self._limits}
        found = {key: mean for key, mean in means.items() if mean > self._limits[key]}  # never so for NaN
        if not found:
            return
        self._quiet_until, self._pause_steps = step + self._pause_steps, 2 * self._pause_steps
        log.warning(
            "step %d: the solver does not converge: over the last %d steps %s; raise solver.max_iter or solver.tol, "
            "or lower the learning rate (training goes on)",
            step,
            len(self._rows),
            " and ".join(f"{key} is {mean:.3g} (limit {self._limits[key]:g})" for key, mean in found.items()),
        )
        self._journal.event("solver_alarm", step=step, window_steps=len(self._rows), **found)
