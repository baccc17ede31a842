"""Milliseconds of a Mamba2 mixer between its projections, in bf16 on random data, and of each of its kernels.

    python tests/benchmarks/mixer.py --out mixer.json      # needs a GPU

Forward without a gradient, and forward and backward, both replayed from a CUDA graph: median of 30. The shapes are a
layer of Mamba2 130M and one of state tracking. The goals are of one H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from implicit_llm.kernels.operations import ScanWeights, gated_scan

SIZES = (64, 1, 128)  # P, G, N
SHAPES = {"8 x 2048 x 24 heads": (8, 2048, 24), "512 x 256 x 16 heads": (512, 256, 16)}
GOALS = {"8 x 2048 x 24 heads": (0.12, 0.50), "512 x 256 x 16 heads": (0.46, None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        sys.stdout.write("needs a GPU\n")
        return
    torch.set_float32_matmul_precision("high")
    rows = [measure(name, *shape) for name, shape in SHAPES.items()]
    if out:
        content = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def measure(name: str, batch: int, length: int, heads: int) -> dict[str, Any]:
    width, groups, size = SIZES
    inner, channels = heads * width, heads * width + 2 * groups * size
    projected_BLE = torch.randn(batch, length, inner + channels + heads, device="cuda").bfloat16()
    weights = ScanWeights(
        torch.randn(channels, 4, device="cuda").bfloat16() * 0.4,
        torch.randn(channels, device="cuda") * 0.1,
        torch.randn(heads, device="cuda") - 2,
        -1 - 4 * torch.rand(heads, device="cuda"),
        torch.randn(heads, device="cuda"),
    )
    leaves = [t.requires_grad_() for t in (projected_BLE, *weights)]

    def forward() -> None:
        with torch.no_grad():
            gated_scan(projected_BLE, None, weights, SIZES, None, return_state=False)

    def both() -> None:
        y_BLI, _ = gated_scan(projected_BLE, None, weights, SIZES, None, return_state=False)
        torch.autograd.grad(y_BLI, leaves, y_BLI.detach())

    row: dict[str, Any] = {"shape": name}
    for what, run, goal in zip(("forward", "forward and backward"), (forward, both), GOALS[name], strict=True):
        ms, kernels = replayed(run)
        row[what] = {"ms": ms, "goal_ms": goal, "kernels_ms": kernels}
        of_each = ", ".join(f"{kernel} {time:.3f}" for kernel, time in kernels.items())
        sys.stdout.write(f"{name}, {what}: {ms:.3f} ms, goal {goal}: {of_each}\n")
    return row


def replayed(run: Callable[[], None]) -> tuple[float, dict[str, float]]:
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times_ms = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(begin.elapsed_time(end))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    kernels = {event.key.strip("_")[:40]: event.self_device_time_total / 1e3 for event in events}
    return statistics.median(times_ms), kernels


if __name__ == "__main__":
    main()
