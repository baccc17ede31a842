"""Milliseconds of a full training step against the figures of the published code on an H200, on random data.

    python -m tests.benchmarks.training_step                              # all rows, on a GPU
    python -m tests.benchmarks.training_step state-tracking-free --set block_len=32
    python -m tests.benchmarks.training_step mamba2-130m-explicit --profile 25
    python -m tests.benchmarks.training_step mamba2-1.3b-implicit --set max_iter=24 --gradient-checkpointing

A step is forward, loss, backward, clipping and AdamW, under bf16 autocast with fp32 weights. `state-tracking-free` runs
all 32 iterations in every step, as trained weights make the published solver do; the free phases of language models run
as many as the published code took with random weights. The median is over the steps after warming up; the loss must
fall. Reference, floor and goal are of one H200; on another card compare ratios only. Without a GPU the rows are tiny
and show that it works.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.kernels.selection import selected_kernels
from implicit_llm.training.model import apply_runtime
from implicit_llm_contracts.config.training import Runtime
from tests.measuring import DEVICE, HAS_GPU, card, keep, milliseconds, options_of, show, spread, update

WARM_UP = 3


@dataclass(frozen=True)
class Row:
    """A line of the table, with times in ms on an H200: the published code, the roofline floor, and the goal."""

    config: str
    batch: int
    length: int
    reference_ms: float
    floor_ms: float
    goal_ms: float
    is_aligned: bool = False
    solver: dict[str, Any] = field(default_factory=dict)


UNROLLED = {"mode": "unrolled", "num_unroll": 4}
ALL_ITERATIONS = {"mode": "fixed_point", "max_iter": 32, "phantom_steps": 4, "tol": 1e-6}


def exactly(iterations: int) -> dict[str, Any]:
    """The solver of the configuration, with a tolerance that no step reaches."""
    return {"max_iter": iterations, "tol": 1e-6}


STATE = ("mamba2-state-tracking-implicit", 512, 256)
ROWS = {
    "state-tracking-explicit": Row("mamba2-state-tracking-explicit", 512, 256, 24.4, 1.0, 6, True),
    "state-tracking-unrolled": Row(*STATE, 64.3, 4.0, 20, True, UNROLLED),
    "state-tracking-free": Row(*STATE, 224, 14.5, 45, True, ALL_ITERATIONS),
    "mamba2-130m-explicit": Row("mamba2-130m-explicit", 8, 2048, 125, 17.6, 42),
    "mamba2-130m-pretrain": Row("mamba2-130m-pretrain", 8, 2048, 205, 34.7, 78),
    "mamba2-130m-implicit": Row("mamba2-130m-implicit", 8, 2048, 923, 159, 285, solver=exactly(15)),
    "llama3-130m-explicit": Row("llama3-130m-explicit", 8, 2048, 103, 17.5, 33),
    "llama3-130m-pretrain": Row("llama3-130m-pretrain", 8, 2048, 199, 34.5, 70),
    "llama3-130m-implicit": Row("llama3-130m-implicit", 8, 2048, 962, 192, 290, solver=exactly(21)),
    "mamba2-1.3b-implicit": Row("mamba2-1.3b-implicit", 4, 2048, 1649, 653, 1000, solver=exactly(12)),
    "llama3-1.3b-implicit": Row("llama3-1.3b-implicit", 4, 2048, 5401, 846, 1300, solver=exactly(19)),
}


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    rows = []
    for name in options.rows:
        row = adapted(ROWS[name], options)
        found = measure(name, row, options)
        torch.cuda.empty_cache()
        figures = {"reference_ms": row.reference_ms, "goal_ms": row.goal_ms, "floor_ms": row.floor_ms}
        rows.append({**found, **figures, "ratio": row.reference_ms / found["ms"]})
        show(rows[-1:], name)
        keep(options.out, rows, kernels=selected_kernels())  # a run that is cut off leaves what it has measured
    show(rows, f"{card()}, torch {torch.__version__}, {selected_kernels()} kernels")


# Options of scripts that run training steps: without captured graphs, and the kernels of one step.
OF_STEPS = {
    "--no-graphs": {"dest": "graphs", "action": "store_false", "help": "start every kernel by itself"},
    "--profile": {"type": int, "metavar": "N", "help": "print the N most expensive kernels of one step"},
}


def parse() -> argparse.Namespace:
    arguments = {
        "rows": {"nargs": "*", "default": list(ROWS), "help": "rows to measure; default all"},
        "--steps": {"type": int, "default": 8},
        "--set": {"nargs": "*", "default": [], "metavar": "KEY=VALUE", "help": "fields of the solver"},
        "--gradient-checkpointing": {"action": "store_true", "help": "keep less for the backward pass"},
        "--fp32": {"action": "store_true", "help": "no autocast"},
    }
    options = options_of(__doc__, arguments | OF_STEPS)
    for name in options.rows:
        if name not in ROWS:
            sys.exit(f"no such row: {name}; rows: {', '.join(ROWS)}")
    return options


def adapted(row: Row, options: argparse.Namespace) -> Row:
    changes = {key: json.loads(value) for key, _, value in (item.partition("=") for item in options.set)}
    row = replace(row, solver=row.solver | changes)
    if not HAS_GPU:
        row = replace(row, batch=2, length=64)
    return row


def measure(name: str, row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Train for a few steps on one batch. Raises: SystemExit when the loss does not fall."""
    torch.manual_seed(0)
    config = implicit_llm.load_config(row.config)
    if not HAS_GPU:
        config.num_hidden_layers = 1
    model: Any = AutoModelForCausalLM.from_config(config).to(DEVICE).train()
    if model.solver is not None:
        model.solver = replace(model.solver, **row.solver)
    runtime = Runtime(cuda_graphs=options.graphs, gradient_checkpointing=options.gradient_checkpointing)
    apply_runtime(model, runtime, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=HAS_GPU)
    tokens = torch.randint(config.vocab_size, (row.batch, row.length), device=DEVICE)
    losses, stats = [], []

    def step() -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=not options.fp32):
            # With logits where training logs an accuracy.
            out = model(input_ids=tokens, labels=tokens, aligned=row.is_aligned, return_logits=row.is_aligned)
        update(model, optimizer, out.loss)
        losses.append(out.loss.detach().clone())
        stats[:] = [out.solver_stats]

    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    times_ms = [milliseconds(step) for _ in range(WARM_UP + options.steps)][WARM_UP:]
    first, last = (round(losses[place].item(), 5) for place in (0, -1))
    if not last < first:
        sys.exit(f"{name}: the loss went from {first} to {last}; the step is wrong")
    if options.profile:
        show_profile(step, options.profile)
    return {
        "row": name,
        **spread(times_ms, "ms"),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if HAS_GPU else 0.0,
        "f_evaluations": None if stats[0] is None else float(stats[0].f_evaluations.mean()),
        "losses": [round(loss.item(), 5) for loss in losses],
        "solver": row.solver,
        "gradient_checkpointing": options.gradient_checkpointing,
    }


def show_profile(step: Callable[[], None], count: int) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        milliseconds(step)
    print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=count))


if __name__ == "__main__":
    main()
