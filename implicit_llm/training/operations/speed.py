"""How fast training goes, measured from one report to the next; the device is not asked to wait for it.

The model FLOPs utilisation compares it with the peak rates of accelerators; a device that is not listed has none.
"""

import re
import time

import torch

from implicit_llm.training.metrics import Totals


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
