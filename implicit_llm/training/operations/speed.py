"""How fast training goes, measured from one report to the next; the device is not asked to wait for it."""

from __future__ import annotations

import time

import torch

from implicit_llm.training.operations.device_peak import peak_flops
from implicit_llm.training.totals import Totals
from implicit_llm_contracts.config.training import Runtime


class SpeedMeter:
    """Rates over all ranks since the last report."""

    def __init__(self, precision: str, runtime: Runtime, device: torch.device, world_size: int) -> None:
        self._device = device
        self._peak: float | None = None
        if device.type == "cuda":
            of_one = peak_flops(torch.cuda.get_device_name(device), precision, tf32=runtime.tf32)
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
