"""Milliseconds that the sum of the gradients over two or more GPUs adds to a training step, on random data.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.gradient_sums llama3-130m-explicit --bucket-mib 25 128
    NCCL_MAX_CTAS=4 torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.gradient_sums llama3-130m-explicit

A step is that of `training_step`, in one CUDA graph, on every GPU at the same time: first without sums, then with
buckets of each size. With `--after` the sums run after the graph. The median is over the steps of rank 0. A profile of
one step gives the milliseconds in which NCCL's kernels run (`sums_ms`), in which nothing else runs beside them
(`alone_ms`), and of all other kernels together (`compute_ms`), which share the GPU with NCCL's. `sm_mhz` and `watts`
are the median clock and power of the GPU during 40 more steps.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.training.distributed import join_world
from implicit_llm.training.gradients import GradientReducer
from implicit_llm.training.model import apply_runtime
from implicit_llm_contracts.config.training import Runtime
from tests.measuring import DEVICE, card, keep, milliseconds, options_of, show, spread

WARM_UP = 3


def main() -> None:
    arguments = {
        "configs": {"nargs": "+", "help": "of implicit_llm.list_configs()"},
        "--bucket-mib": {"nargs": "*", "type": int, "default": [25]},
        "--batch": {"type": int, "default": 8},
        "--length": {"type": int, "default": 2048},
        "--steps": {"type": int, "default": 20},
        "--after": {"action": "store_true", "help": "sum after the graph, not in it"},
    }
    options = options_of(__doc__, arguments)
    if torch.cuda.device_count() < 2:
        sys.exit("needs two GPUs")
    device = join_world(DEVICE)
    torch.set_float32_matmul_precision("high")
    rows = []
    for config in options.configs:
        for mib in (None, *options.bucket_mib):
            rows.append({"config": config, "bucket_mib": mib, **measure(config, mib, options, device)})
            rows[-1]["added_ms"] = rows[-1]["ms"] - next(row["ms"] for row in rows if row["config"] == config)
            if dist.get_rank() == 0:
                show(rows[-1:], config)
                keep(
                    options.out,
                    rows,
                    after=options.after,
                    ctas=os.environ.get("NCCL_MAX_CTAS"),
                    devices=dist.get_world_size(),
                )
    if dist.get_rank() == 0:
        show(rows, f"{dist.get_world_size()} x {card()}, torch {torch.__version__}")
    dist.destroy_process_group()


def measure(name: str, mib: int | None, options: Any, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    config = implicit_llm.load_config(name)
    model: Any = AutoModelForCausalLM.from_config(config).to(device).train()
    apply_runtime(model, Runtime(), name)
    reducer = None if mib is None else GradientReducer(model, torch.float32, mib * 2**20)
    model.base.runner.reducer = None if options.after else reducer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(config.vocab_size, (options.batch, options.length), device=device)

    def step() -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = model(input_ids=tokens, labels=tokens, return_logits=False)
        with nullcontext() if reducer is None else reducer.over_ranks():
            out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    times_ms = []
    for _ in range(WARM_UP + options.steps):
        dist.all_reduce(torch.zeros(1))  # over gloo, so that all GPUs begin together
        times_ms.append(milliseconds(step))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    found = {**spread(times_ms[WARM_UP:], "ms"), **shares(profiler), **clock_and_power(step, device)}
    model.base.runner.step = None
    torch.cuda.empty_cache()
    return found


def clock_and_power(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    fields = "clocks.sm,power.draw"
    how = [
        "nvidia-smi",
        "-i",
        str(device.index),
        f"--query-gpu={fields}",
        "--format=csv,noheader,nounits",
        "-lms",
        "100",
    ]
    with subprocess.Popen(how, stdout=subprocess.PIPE, text=True) as watch:
        for _ in range(40):
            step()
        torch.cuda.synchronize()
        watch.terminate()
        lines = watch.communicate()[0].splitlines()
    mhz, watts = zip(*(map(float, line.split(",")) for line in lines if line.count(",") == 1), strict=True)
    return {"sm_mhz": median(mhz), "watts": median(watts)}


def shares(profiler: Any) -> dict[str, float]:
    """Return the milliseconds of NCCL's kernels, of those in which nothing else ran, and of all other kernels."""
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = {
        is_sum: [(e.time_range.start, e.time_range.end) for e in kernels if ("nccl" in e.name) == is_sum]
        for is_sum in (True, False)
    }
    busy, both, others = (length_ms(found) for found in (spans[True], spans[True] + spans[False], spans[False]))
    return {"sums_ms": busy, "alone_ms": both - others, "compute_ms": others}


def length_ms(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans in microseconds, in milliseconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


if __name__ == "__main__":
    main()
