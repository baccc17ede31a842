"""What the benchmarks share: their options, how times are taken and shown, and the file that keeps them."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def options_of(about: str | None, arguments: Mapping[str, Mapping[str, Any]] | None = None) -> argparse.Namespace:
    """Read the command line: `--out` and these arguments, whose settings are those of `add_argument`.

    about: the docstring of the benchmark.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, settings in {"--out": {"type": Path, "help": "JSON file for the results"}, **(arguments or {})}.items():
        parser.add_argument(name, **settings)
    return parser.parse_args()


def card() -> str:
    return torch.cuda.get_device_name() if HAS_GPU else "CPU"


def seconds(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    if HAS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def milliseconds(action: Callable[[], object]) -> float:
    """Return the time between two events on the GPU, or on the CPU without one."""
    if not HAS_GPU:
        return 1e3 * seconds(action)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, max_norm: float = 1.0) -> None:
    """Run the backward pass, clip the gradients and update the weights."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def spread(values: Sequence[float], unit: str) -> dict[str, float]:
    """Return median and range."""
    return {unit: statistics.median(values), f"min_{unit}": min(values), f"max_{unit}": max(values)}


def show(rows: list[dict[str, Any]], about: str) -> None:
    """A table of the numbers and words of the rows."""
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    is_nested = frame.map(lambda cell: isinstance(cell, dict | list)).any()
    table = frame.loc[:, ~is_nested].to_string(index=False, float_format="{:.4g}".format)
    sys.stdout.write(f"{about}\n{table}\n")


def keep(out: Path | None, rows: list[dict[str, Any]], **about: Any) -> None:
    if out is not None:
        about = {"card": card(), "torch": torch.__version__, **about, "rows": rows}
        out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
