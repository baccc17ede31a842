"""Tokens per second of training on 1, 2, 4, ... devices of this machine, through the training stage under torchrun.

    python -m tests.benchmarks.training_scaling mamba2-130m-pretrain llama3-130m-pretrain --micro-batch 8

Random tokens, and the efficiency against one device. Weak scaling: every device has the same work, `--accumulate`
micro-batches a step. Metrics are read every ten steps, as in training. The first ten, which compile and warm up, do not
count; the median is over the later tens. Without a GPU the defaults are one layer and a few short steps, which show no
more than that it works.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.modules["mlflow"] = None  # type: ignore[assignment]  # it would take time of the steps

import numpy as np  # noqa: E402
import torch  # noqa: E402

import implicit_llm  # noqa: E402
from implicit_llm.training import stage  # noqa: E402
from implicit_llm_contracts.runs import journal  # noqa: E402
from implicit_llm_contracts.runs.identity import Identity  # noqa: E402
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult  # noqa: E402
from implicit_llm_data.shard_writer import write_shards  # noqa: E402
from implicit_llm_data.shards import DatasetSpec, token_dtype  # noqa: E402
from implicit_llm_jobs.stage import StageRequest, run_stage  # noqa: E402
from tests.measuring import card, keep, options_of, show, spread  # noqa: E402
from tests.unit.training.small_runs import request, train_config  # noqa: E402

WARM_UP = 10  # steps
ROWS = 1 << 10  # of random tokens; more steps begin another epoch


def main() -> None:
    options = parse()
    if options.work is None:
        with tempfile.TemporaryDirectory() as work:
            compare(options, Path(work))
    else:
        for name in options.configs:
            train(name, options)


def parse() -> argparse.Namespace:
    is_large = torch.cuda.is_available()
    arguments = {
        "configs": {"nargs": "*", "default": ["mamba2-130m-pretrain"], "help": "of implicit_llm.list_configs()"},
        "--layers": {"type": int, "default": None if is_large else 1, "help": "fewer than the config has"},
        "--micro-batch": {"type": int, "default": 8 if is_large else 1},
        "--accumulate": {"type": int, "default": 1},
        "--length": {"type": int, "default": 2048 if is_large else 64},
        "--steps": {"type": int, "default": 30 if is_large else 3},
        "--precision": {"default": "bf16", "choices": ("fp32", "bf16", "fp16")},
        "--reduction": {"default": "fp32", "choices": ("fp32", "bf16"), "help": "in what gradients are summed"},
        "--kernels": {"default": "auto", "choices": ("auto", "torch", "triton")},
        "--gradient-checkpointing": {"action": "store_true"},
        "--shard-optimizer": {"action": "store_true"},
        "--processes": {"type": int, "nargs": "*", "help": "numbers of processes; default 1, 2, 4 ... devices"},
        "--work": {"type": Path, "help": argparse.SUPPRESS},  # for the processes of torchrun
    }
    return options_of(__doc__, arguments)


def compare(options: argparse.Namespace, work: Path) -> None:
    """Measure every number of processes in torchrun, one after the other, and show them together."""
    vocab_size = min(implicit_llm.load_config(name).vocab_size for name in options.configs)
    make_tokens(work / "data", options.length, vocab_size)
    devices = torch.cuda.device_count() or 2
    counts = options.processes or [2**power for power in range(8) if 2**power <= devices]
    for count in counts:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [*torchrun, "-m", "tests.benchmarks.training_scaling", *sys.argv[1:], "--work", str(work)]
        subprocess.run([sys.executable, "-m", *command], check=True)
    rows = [measured(work / "train" / name / str(count), name, count) for name in options.configs for count in counts]
    for row in rows:
        first = next(other for other in rows if other["config"] == row["config"])
        row["efficiency"] = row["tokens_per_s"] / row["devices"] / first["tokens_per_s"] * first["devices"]
    batch = f"micro-batch {options.micro_batch} x {options.accumulate}"
    about = f"{options.precision}, L {options.length}, {batch}, {card()}, torch {torch.__version__}"
    show(rows, about)
    keep(options.out, rows, about=about)


def measured(run_dir: Path, name: str, count: int) -> dict[str, Any]:
    (path,) = run_dir.glob("work/*/journal.jsonl")
    points = [point for point in journal.read(path) if point.step > WARM_UP]
    tokens = points[-1].values["tokens"] / points[-1].step
    found = spread([1e3 * tokens / point.values["tokens_per_s"] for point in points], "ms")
    last = {key: points[-1].values.get(key) for key in ("f_evaluations", "memory_gib", "mfu", "loss")}
    return {"config": name, "devices": count, "tokens_per_s": 1e3 * tokens / found["ms"], **found, **last}


def make_tokens(run_dir: Path, length: int, vocab_size: int) -> None:
    rows = np.random.default_rng(0).integers(vocab_size, size=(ROWS, length)).astype(token_dtype(vocab_size))

    def body(context: StageContext) -> StageResult:
        spec = DatasetSpec(vocab_size, length, ("input_ids", "labels"), {})
        return StageResult(write_shards(context, spec, 1, lambda shard: {"input_ids": rows, "labels": rows}), {})

    run_stage(StageRequest(run_dir, Identity("data", "tokens", {}, "", {})), body)


def train(name: str, options: argparse.Namespace) -> None:
    """Train in this process of torchrun: some steps at the very beginning of a long curriculum."""
    gc.collect()  # the model before, with its graphs
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    model = implicit_llm.load_config(name).to_diff_dict()
    solver = model.pop("solver", None)
    for key in ("transformers_version", "architectures", "dtype"):
        model.pop(key, None)
    if options.layers is not None:
        model["num_hidden_layers"] = options.layers
    count, end_step = int(os.environ["WORLD_SIZE"]), WARM_UP + options.steps
    config = train_config(
        model, task="language_model", labels="next_token", phase={"end_step": end_step, "solver": solver},
        total_steps=1000 * end_step, batch_size=options.micro_batch * options.accumulate * count,
        precision=options.precision, reduction=options.reduction,
    )  # fmt: skip
    runtime = {
        "device": "auto", "threads": None, "micro_batch_size": options.micro_batch, "kernels": options.kernels,
        "gradient_checkpointing": options.gradient_checkpointing, "shard_optimizer": options.shard_optimizer,
        "log_every_steps": WARM_UP, "save_every_s": 86400.0,  # not while it is measured
    }  # fmt: skip
    run_stage(request(options.work / "train" / name / str(count), config, options.work / "data", **runtime), stage.run)


if __name__ == "__main__":
    main()
