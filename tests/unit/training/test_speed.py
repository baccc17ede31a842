"""Rates, and the utilisation of devices whose peak is known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from implicit_llm.training.metrics import Totals
from implicit_llm.training.operations.speed import SpeedMeter, peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-SXM2-32GB", "fp32", 15.7),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("NVIDIA A1000", "bf16", None),
    ],
)
def test_the_peak_of_a_device(name: str, precision: str, tera: float | None) -> None:
    found = peak_flops(name, precision)
    assert found == (None if tera is None else pytest.approx(tera * 1e12))


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("implicit_llm.training.operations.speed.time.monotonic", lambda: clock.now)
    return clock


def test_rates_are_since_the_last_report(clock: Clock) -> None:
    meter = SpeedMeter("bf16", torch.device("cpu"), 1)
    meter.start(Totals(tokens=1000, flops=5e9))
    clock.now += 2.0
    assert meter.read(Totals(tokens=1500, flops=9e9)) == {"tokens_per_s": 250.0, "flops_per_s": 2e9}
    clock.now += 1.0
    assert meter.read(Totals(tokens=1600, flops=9e9)) == {"tokens_per_s": 100.0, "flops_per_s": 0.0}


def test_utilisation_is_a_share_of_the_peak_of_all_devices(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(get_device_name=lambda device: "NVIDIA H200", max_memory_allocated=lambda device: 3 * 2**30)
    monkeypatch.setattr("implicit_llm.training.operations.speed.torch.cuda", cuda)
    meter = SpeedMeter("bf16", torch.device("cuda", 0), 4)
    meter.start(Totals())
    clock.now += 1.0
    values = meter.read(Totals(tokens=1, flops=4 * 989.4e12 * 0.3))
    assert values["mfu"] == pytest.approx(0.3)
    assert values["memory_gib"] == 3.0
