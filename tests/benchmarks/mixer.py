"""Milliseconds of a Mamba2 mixer between its projections, in bf16 on random data, and of each of its kernels.

    python -m tests.benchmarks.mixer --out mixer.json      # needs a GPU
    IMPLICIT_LLM_KERNELS=mamba_ssm python -m tests.benchmarks.mixer

With other kernels than ours the gate is left out, since mamba_ssm applies it in the norm that follows.

Forward without a gradient, and forward and backward, both replayed from a CUDA graph: median of 30. The shapes are a
layer of Mamba2 130M and one of state tracking. The goals are of one H200.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from implicit_llm.kernels.selection import selected_kernels
from implicit_llm.models.mamba2.causal_conv import causal_conv
from implicit_llm.models.mamba2.chunked_scan import ScanWeights
from implicit_llm.models.mamba2.ssd import gated_scan, ssd
from tests.measuring import card, keep, milliseconds, options_of

SIZES = (64, 1, 128)  # P, G, N
SHAPES = {(8, 2048, 24): (0.12, 0.50), (512, 256, 16): (0.46, None)}  # batch, length, heads: goals in ms


def main() -> None:
    options = options_of(__doc__)
    if card() == "CPU":
        sys.exit("needs a GPU")
    torch.set_float32_matmul_precision("high")
    rows = [measure(*shape, *goals) for shape, goals in SHAPES.items()]
    print(json.dumps(rows, indent=1))
    keep(options.out, rows, kernels=selected_kernels())


def measure(batch: int, length: int, heads: int, forward_ms: float, both_ms: float | None) -> dict[str, Any]:
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

    def forward() -> Tensor:
        if selected_kernels() == "triton":
            return gated_scan(projected_BLE, None, weights, SIZES, None, return_state=False)[0]
        return without_gate(projected_BLE, weights, heads)

    def both() -> None:
        y_BLI = forward()
        torch.autograd.grad(y_BLI, leaves, y_BLI.detach())

    return {
        "shape": f"{batch} x {length} x {heads} heads",
        "forward": {"goal_ms": forward_ms, **replayed(torch.no_grad()(forward))},
        "forward and backward": {"goal_ms": both_ms, **replayed(both)},
    }


def without_gate(projected_BLE: Tensor, weights: ScanWeights, heads: int) -> Tensor:
    """Return convolution and SSD (B, L, H, P) as the layers call them one by one."""
    width, groups, size = SIZES
    inner, state = heads * width, groups * size
    _, xBC, dt_BLH = projected_BLE.split([inner, inner + 2 * state, heads], dim=-1)
    xBC, _ = causal_conv(xBC, weights.conv_CK, weights.conv_bias_C, silu=True)
    x_BLI, *BC = xBC.split([inner, state, state], dim=-1)
    B_BLGN, C_BLGN = (t.unflatten(-1, (groups, size)) for t in BC)
    dt_BLH = F.softplus(dt_BLH.float() + weights.dt_bias_H)
    return ssd(x_BLI.unflatten(-1, (heads, width)), dt_BLH, weights.A_H, B_BLGN, C_BLGN, D_H=weights.D_H)[0]


def replayed(run: Callable[[], object]) -> dict[str, Any]:
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times_ms = [milliseconds(graph.replay) for _ in range(30)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        milliseconds(graph.replay)
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    kernels = {event.key.strip("_")[:40]: event.self_device_time_total / 1e3 for event in events}
    return {"ms": statistics.median(times_ms), "kernels_ms": kernels}


if __name__ == "__main__":
    main()
