"""Report on a phase while it trains: metrics as text, speeds, and warnings about the solver.

Speeds are measured from one report to the next, without synchronising the device. The model FLOPs utilisation is the
FLOP/s divided by the peak of all the job's devices, which is known only for the devices listed here.
"""

import logging
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from implicit_llm.training.metrics import Totals
from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.metrics import METRICS

log = logging.getLogger(__name__)


def shown(values: Mapping[str, float]) -> str:
    """Return the most important metrics as one line; those that a narrow terminal must show come first."""
    return ", ".join(f"{it.head} {it.text(values[key])}" for key, it in METRICS.items() if it.head and key in values)


class SpeedMeter:
    """A meter of the speed of all ranks since the last report."""

    def __init__(self, precision: str, device: torch.device, world_size: int) -> None:
        self._device, name = device, torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = (peak_flops(name, precision) or 0.0) * world_size
        self.start(Totals())

    def start(self, totals: Totals) -> None:
        """Start a measurement at these totals."""
        self._before = (totals.tokens, totals.flops, time.monotonic())

    def read(self, totals: Totals) -> dict[str, float]:
        """Return tokens_per_s, flops_per_s, mfu if the device's peak is known, and on a GPU memory_gib.

        memory_gib: the most memory that was allocated so far on this GPU. The call starts the next measurement. Read
        the metrics first, so that the device has finished the counted work.
        """
        tokens, flops, then = self._before
        seconds = max(time.monotonic() - then, 1e-9)
        rate = (totals.flops - flops) / seconds
        values = {"tokens_per_s": (totals.tokens - tokens) / seconds, "flops_per_s": rate}
        if self._peak:
            values["mfu"] = rate / self._peak
        if self._device.type == "cuda":
            values["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        self.start(totals)
        return values


# Dense TFLOP/s from the data sheets; the first pattern that occurs in the device's name applies.
_PEAKS: dict[str, dict[str, float]] = {
    r"H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "fp32": 51.2},
    r"H100 NVL": {"bf16": 835.0, "fp16": 835.0, "fp32": 60.0},
    r"\bG?H[12]00\b": {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9},
    r"\bA100\b": {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5},
    r"\bV100-PCIE": {"fp16": 112.0, "fp32": 14.0},
    r"\bV100\b": {"fp16": 125.0, "fp32": 15.7},
    r"\bMI300X\b": {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4},
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the device's peak FLOP/s in matrix products of `precision` (fp32, bf16, fp16), or None if unknown."""
    peaks = next((peaks for pattern, peaks in _PEAKS.items() if re.search(pattern, device_name)), {})
    return 1e12 * peaks[precision] if precision in peaks else None


# A warning is logged if the share of unconverged tokens or the residual, each averaged over ALARM_STEPS steps, exceeds
# its limit. The limits are above what word-problem models that learn reach in training: a share of 0.65 and a residual
# of 0.61. A solver with too few iterations exceeds the first: with 8 for 256 tokens, the share is 0.99.
ALARM_STEPS = 200
ALARM_LIMITS = {"unconverged_share": 0.9, "residual": 0.8}
_QUIET_WINDOWS = 10  # the pause after the first alarm, in units of ALARM_STEPS; each later pause is twice as long


class SolverAlarm:
    """An alarm that logs a warning and an event `solver_alarm` if solver metrics are too high over many steps."""

    def __init__(self, journal: Journal) -> None:
        self._rows: deque[Mapping[str, float]] = deque(maxlen=ALARM_STEPS)
        self._journal = journal
        self._quiet_until = 0
        self._pause_steps = _QUIET_WINDOWS * ALARM_STEPS

    def observe(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Add the metrics of the steps up to `step`, and warn if a mean is too high.

        In explicit and unrolled phases, the metrics of ALARM_LIMITS are NaN or 0, so there is never a warning.
        """
        self._rows.extend(rows)
        if len(self._rows) < ALARM_STEPS or step < self._quiet_until:
            return
        means = {key: sum(row[key] for row in self._rows) / len(self._rows) for key in ALARM_LIMITS}
        found = {key: mean for key, mean in means.items() if mean > ALARM_LIMITS[key]}  # false for NaN
        if not found:
            return
        self._quiet_until, self._pause_steps = step + self._pause_steps, 2 * self._pause_steps
        log.warning(
            "step %d: the solver does not converge: over the last %d steps %s; raise solver.max_iter or solver.tol, "
            "or lower the learning rate (training goes on)",
            step,
            len(self._rows),
            " and ".join(f"{key} is {mean:.3g} (limit {ALARM_LIMITS[key]:g})" for key, mean in found.items()),
        )
        self._journal.event("solver_alarm", step=step, window_steps=len(self._rows), **found)
