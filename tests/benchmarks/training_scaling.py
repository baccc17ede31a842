"""Tokens per second of training on 1, 2, 4, ... devices of this machine, through the training stage under torchrun.

    python -m tests.benchmarks.training_scaling mamba2-130m-pretrain --micro-batch 8

Random tokens, and the efficiency against one device. Weak scaling: every device has the same work, `--accumulate`
micro-batches a step. The first steps, which compile and warm up, do not count; the median is over the others. Without a
GPU the defaults are one layer and a few short steps, which show no more than that it works.
"""

import argparse
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

WARM_UP = 4
ROWS = 1 << 10  # of random tokens; more steps begin another epoch


def main() -> None:
    options = parse()
    if options.work is None:
        with tempfile.TemporaryDirectory() as work:
            compare(options, Path(work))
    else:
        train(options)


def parse() -> argparse.Namespace:
    is_large = torch.cuda.is_available()
    parser = options_of(__doc__)
    parser.add_argument("config", nargs="?", default="mamba2-130m-pretrain", help="of implicit_llm.list_configs()")
    parser.add_argument("--layers", type=int, default=None if is_large else 1, help="fewer than the config has")
    parser.add_argument("--micro-batch", type=int, default=8 if is_large else 1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048 if is_large else 64)
    parser.add_argument("--steps", type=int, default=20 if is_large else 3)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--reduction", default="fp32", choices=("fp32", "bf16"), help="in what gradients are summed")
    parser.add_argument("--kernels", default="auto", choices=("auto", "torch", "triton"))
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--shard-optimizer", action="store_true")
    parser.add_argument("--processes", type=int, nargs="*", help="numbers of processes; default 1, 2, 4 ... devices")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # for the processes of torchrun
    return parser.parse_args()


def compare(options: argparse.Namespace, work: Path) -> None:
    """Measure every number of processes in torchrun, one after the other, and show them together."""
    make_tokens(work / "data", options.length, implicit_llm.load_config(options.config).vocab_size)
    devices = torch.cuda.device_count() or 2
    rows: list[dict[str, Any]] = []
    for count in options.processes or [2**power for power in range(8) if 2**power <= devices]:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [*torchrun, "-m", "tests.benchmarks.training_scaling", *sys.argv[1:], "--work", str(work)]
        subprocess.run([sys.executable, "-m", *command], check=True)
        (path,) = (work / "train" / str(count)).glob("work/*/journal.jsonl")
        points = [point.values for point in journal.read(path)][WARM_UP:]
        tokens = count * options.micro_batch * options.accumulate * options.length
        found = spread([1e3 * tokens / point["tokens_per_s"] for point in points], "ms")
        rate = 1e3 * tokens / found["ms"]
        last = {key: points[-1].get(key) for key in ("memory_gib", "mfu", "loss")}
        row = {"devices": count, "tokens_per_s": rate, **found, **last}
        first = rows[0] if rows else row
        rows.append(row | {"efficiency": rate / count / first["tokens_per_s"] * first["devices"]})
    batch = f"micro-batch {options.micro_batch} x {options.accumulate}"
    about = f"{options.config}, {options.precision}, L {options.length}, {batch}, {card()}, torch {torch.__version__}"
    show(rows, about)
    keep(options.out, rows, about=about)


def make_tokens(run_dir: Path, length: int, vocab_size: int) -> None:
    rows = np.random.default_rng(0).integers(vocab_size, size=(ROWS, length)).astype(token_dtype(vocab_size))

    def body(context: StageContext) -> StageResult:
        spec = DatasetSpec(vocab_size, length, ("input_ids", "labels"), {})
        return StageResult(write_shards(context, spec, 1, lambda shard: {"input_ids": rows, "labels": rows}), {})

    run_stage(StageRequest(run_dir, Identity("data", "tokens", {}, "", {}).to_json()), body)


def train(options: argparse.Namespace) -> None:
    """Train in this process of torchrun: some steps at the very beginning of a long curriculum."""
    model = implicit_llm.load_config(options.config).to_diff_dict()
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
        "save_every_s": 86400.0,  # not while it is measured
    }  # fmt: skip
    run_stage(request(options.work / "train" / str(count), config, options.work / "data", **runtime), stage.run)


if __name__ == "__main__":
    main()
