"""Tokens per second of training on 1, 2, 4, ... devices of this machine, through the trainer of the training stage.

    python tests/benchmarks/training_scaling.py mamba2-130m-pretrain --micro-batch 8
    torchrun --nproc-per-node=2 tests/benchmarks/training_scaling.py mamba2-130m-pretrain --micro-batch 8

Random tokens. Started by itself it starts torchrun for every number of devices and shows the efficiency against one;
under torchrun it measures that number only. Weak scaling: every device has the same work, `--accumulate` micro-batches
a step. The first steps, which compile and warm up, do not count; the median is over the others. Without a GPU the
defaults are one layer and a few short steps, which show no more than that it works.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP = 4
RESULT = "RESULT "


def main() -> None:
    options = parse(sys.argv[1:])
    if "WORLD_SIZE" in os.environ:
        measure(options)
    else:
        compare(options)


def parse(arguments: list[str]) -> argparse.Namespace:
    import torch

    is_large = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "config", nargs="?", default="mamba2-130m-pretrain", help="a name of implicit_llm.list_configs()"
    )
    parser.add_argument(
        "--layers", type=int, default=None if is_large else 1, help="fewer layers than the config has, for a quick look"
    )
    parser.add_argument("--micro-batch", type=int, default=8 if is_large else 1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048 if is_large else 64)
    parser.add_argument("--steps", type=int, default=20 if is_large else 3)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--kernels", default="auto", choices=("auto", "torch", "triton"))
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--shard-optimizer", action="store_true")
    parser.add_argument("--processes", type=int, nargs="*", help="numbers of processes; default 1, 2, 4 ... devices")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps: at least 1")
    return options


def compare(options: argparse.Namespace) -> None:
    """Measure every number of processes in torchrun, one after the other, and show them together."""
    import torch

    devices = torch.cuda.device_count() or 2
    counts = options.processes or [2**power for power in range(8) if 2**power <= devices]
    results = []
    for count in counts:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        done = subprocess.run([*command, __file__, *sys.argv[1:]], stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
        if not lines:
            print(f"{count} processes: failed with exit code {done.returncode}; see above")
            continue
        results.append(json.loads(lines[-1].removeprefix(RESULT)))
    if not results:
        sys.exit(1)
    print(f"{results[0]['about']}")
    print(f"{'devices':>8}{'tokens/s':>12}{'ms a step':>12}{'min':>8}{'max':>8}{'GiB':>7}{'mfu':>7}{'efficiency':>12}")
    first = results[0]["tokens_per_s"] / results[0]["processes"]
    for found in results:
        share = found["tokens_per_s"] / found["processes"] / first
        print(
            f"{found['processes']:8}{found['tokens_per_s']:12,.0f}{found['ms']:12.1f}{found['min_ms']:8.1f}"
            f"{found['max_ms']:8.1f}{shown(found['memory_gib'], '.1f'):>7}{shown(found['mfu'], '.1%'):>7}{share:12.1%}"
        )


def measure(options: argparse.Namespace) -> None:
    """Train in this process of torchrun; rank 0 writes the result."""
    import torch

    from implicit_llm.kernels.selection import select_kernels
    from implicit_llm.training.distributed import is_main, join_world, leave_world
    from implicit_llm.training.model import apply_runtime, build_model
    from implicit_llm_contracts.config.training import Runtime, TrainConfig
    from implicit_llm_contracts.runs.fill import fill

    has_cuda = torch.cuda.is_available()
    select_kernels(options.kernels if has_cuda else "torch")
    config = fill(TrainConfig, train_config(options), "benchmark")
    runtime = Runtime(
        device="cuda" if has_cuda else "cpu",
        micro_batch_size=options.micro_batch,
        log_every_steps=1,  # the report of every step waits for the device: this is what is timed
        gradient_checkpointing=options.gradient_checkpointing,
        shard_optimizer=options.shard_optimizer,
        kernels=options.kernels,
    )
    with tempfile.TemporaryDirectory() as work:
        device = join_world(runtime.device)
        model = build_model(config, 2, "benchmark")
        apply_runtime(model, runtime, "benchmark")
        data = RandomTokens(model.config.vocab_size, options.length)
        points = train(model, device, Path(work), config, runtime, data)
    if is_main():
        found = result(options, points[WARM_UP:])
        print(RESULT + json.dumps(found))
        print(f"{found['processes']} devices: {found['tokens_per_s']:,.0f} tokens/s, {found['ms']:.1f} ms a step")
    leave_world()


def result(options: argparse.Namespace, points: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the steps."""
    import torch

    processes = int(os.environ["WORLD_SIZE"])
    tokens = options.micro_batch * options.accumulate * processes * options.length
    times_ms = [1e3 * tokens / point["tokens_per_s"] for point in points]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "about": f"{options.config}, {options.precision}, L {options.length}, micro-batch {options.micro_batch} x "
        f"{options.accumulate}, {device}, torch {torch.__version__}",
        "processes": processes,
        "tokens_per_s": 1e3 * tokens / statistics.median(times_ms),
        "ms": statistics.median(times_ms),
        "min_ms": min(times_ms),
        "max_ms": max(times_ms),
        "memory_gib": points[-1].get("memory_gib"),
        "mfu": statistics.median(point["mfu"] for point in points) if "mfu" in points[-1] else None,
    }


def train(model: Any, device: Any, work: Path, config: Any, runtime: Any, data: RandomTokens) -> list[dict[str, float]]:
    """Metrics of every step."""
    from implicit_llm.training.batches import BatchLayout
    from implicit_llm.training.distributed import rank, world_size
    from implicit_llm.training.loop import TrainingJob, TrainingLoop
    from implicit_llm.training.operations.checkpoint_store import CheckpointStore
    from implicit_llm.training.operations.preemption import StopRequest
    from implicit_llm.training.operations.save_schedule import SaveSchedule
    from implicit_llm.training.operations.status import StatusLine
    from implicit_llm.training.operations.watchdog import Watchdog
    from implicit_llm_contracts.runs.journal import Journal

    points: list[dict[str, float]] = []

    class Points(Journal):
        def metrics(self, step: int, values: Mapping[str, float]) -> None:
            points.append(dict(values))

    class NoSaves(SaveSchedule):
        def commit(self, state: Any) -> None: ...

    journal = Points(None)
    store = CheckpointStore(work, {}, journal)
    job = TrainingJob(
        name="benchmark",
        config=config,
        runtime=runtime,
        dataset=data,
        layout=BatchLayout.choose(config.batch_size, world_size(), rank(), runtime.micro_batch_size),
        identity={},
        work=work,
        device=device,
        saves=NoSaves(runtime, StopRequest(), config.phase.end_step, store, device, journal),
        status=StatusLine("benchmark", logging.getLogger("benchmark"), bar=False),
        watchdog=Watchdog(None, work),
        journal=journal,
    )
    TrainingLoop(model, job, None).run()
    return points


def train_config(options: argparse.Namespace) -> dict[str, Any]:
    """A phase of the wanted steps at the very beginning of a long curriculum."""
    import implicit_llm

    model = implicit_llm.load_config(options.config).to_diff_dict()
    solver = model.pop("solver", None)
    for key in ("transformers_version", "architectures", "dtype"):
        model.pop(key, None)
    if options.layers is not None:
        model["num_hidden_layers"] = options.layers
    world_size = int(os.environ["WORLD_SIZE"])
    end_step = WARM_UP + options.steps
    return {
        "task": "language_model",
        "labels": "next_token",
        "model": model,
        "phase": {"name": "benchmark", "index": 0, "start_step": 0, "end_step": end_step, "solver": solver},
        "total_steps": 1000 * end_step,
        "schedule": {
            "kind": "warmup_stable_decay",
            "peak_learning_rate": 1e-4,
            "final_learning_rate": 1e-5,
            "warmup_fraction": 0.01,
            "decay_fraction": 0.2,
        },
        "optimizer": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0},
        "batch_size": options.micro_batch * options.accumulate * world_size,
        "precision": options.precision,
        "seed": 0,
    }


class RandomTokens:
    """Rows of uniform tokens; a row is the same whenever it is asked for."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size = vocab_size
        self.length = length

    def __len__(self) -> int:
        return 1 << 20

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = [np.random.default_rng(int(index)).integers(self.vocab_size, size=self.length) for index in indices]
        return {"input_ids": np.stack(rows), "labels": np.stack(rows)}


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    main()
