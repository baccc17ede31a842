"""Iterations of a whole-sequence solve by the number of hard tokens, for the trained models of state tracking.

    python -m tests.benchmarks.hard_tokens --out results/benchmarks/hard-tokens-cpu.json

All tokens of a sequence are solved together until each has converged at tolerance 0.05, in at most twice as many
iterations as tokens, or 128 where that is more. A token is hard if its group part is not the identity. The fit of a
model is `iterations = at_none + per_hard_token * hard tokens` by least squares over the sequences that converged. Rows
share their random numbers, so the interval is that of 2,000 draws of the 24 sequences with all their rows. It takes
seven minutes on one core.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm_data.groups import load_monoid
from tests.benchmarks.evaluation_blocks import PROTOCOL
from tests.benchmarks.series_gradient import words
from tests.measuring import keep, options_of, show

A5 = ("A5", "aperiodic", (0.0, 0.05, 0.1, 0.25, 0.5), (64, 128, 256))
TASKS = {  # group, monoid, shares of hard tokens, lengths
    "s5-state-passing-s0": ("S5", "none", (1.0,), (16, 32, 64, 128)),
    "a5-monoid-published-s0": A5,
    "a5-monoid-released-s0": A5,
}
SEQUENCES = 24
DRAWS = 2000


def main() -> None:
    options = options_of(__doc__)
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for name, (group, monoid, shares, lengths) in TASKS.items():
        model = AutoModelForCausalLM.from_pretrained(implicit_llm.trained_model(name)).eval()
        saved = model.solver
        for length in lengths:
            model.solver = replace(saved, **PROTOCOL, eval_block_len=length, eval_max_iter=max(128, 2 * length))
            for share in shares:
                data = words(group, monoid, share, length, SEQUENCES)
                found.append({"model": name, "length": length, "hard_fraction": share, **measure(model, monoid, *data)})
                keep(options.out, found, fits=[*fits(found)])
        show([row for row in found if row["model"] == name], name)
    show([*fits(found)], "fits")


@torch.inference_mode()
def measure(model: Any, monoid: str, ids_BL: Tensor, labels_BL: Tensor) -> dict[str, Any]:
    """Return hard tokens and iterations of each sequence, and which converged at every token."""
    start_s = time.process_time()
    out = model(ids_BL)
    return {
        "sequences": len(ids_BL),
        "right_throughout": int((out.logits.argmax(-1) == labels_BL).all(1).sum()),
        "converged": int((out.solver_stats.unconverged_tokens == 0).sum()),
        "seconds": time.process_time() - start_s,
        "hard_tokens": (ids_BL // load_monoid(monoid).order != 0).sum(1).tolist(),
        "iterations": out.solver_stats.num_iter.int().tolist(),
        "is_converged": (out.solver_stats.unconverged_tokens == 0).tolist(),
    }


def fits(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The line of each model, how far sequences lie from it, and the slopes of the lengths with several shares."""
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        by_length = {n: [row for row in of_model if row["length"] == n] for n in [row["length"] for row in of_model]}
        by_sequence = [points(of_model, sequence) for sequence in range(SEQUENCES)]
        points_NX = np.concatenate(by_sequence)
        slope, start = line(points_NX)
        make = np.random.default_rng(0)
        draws = [
            line(np.concatenate([by_sequence[i] for i in make.integers(SEQUENCES, size=SEQUENCES)]))[0]
            for _ in range(DRAWS)
        ]
        yield {
            "model": model,
            "sequences": sum(row["sequences"] for row in of_model),
            "converged": len(points_NX),
            "per_hard_token": round(slope, 3),
            "interval_95": [round(float(value), 3) for value in np.quantile(draws, (0.025, 0.975))],
            "at_none": round(start, 2),
            "deviation": round(float(np.std(points_NX[:, 1] - start - slope * points_NX[:, 0])), 2),
            "per_hard_token_by_length": {
                str(n): round(line(np.concatenate([points(of, i) for i in range(SEQUENCES)]))[0], 3)
                for n, of in by_length.items()
                if len(of) > 1
            },
        }


def points(rows: list[dict[str, Any]], sequence: int) -> np.ndarray:
    """Return hard tokens and iterations of one sequence of each row where it converged, (N, 2)."""
    found = [
        (row["hard_tokens"][sequence], row["iterations"][sequence]) for row in rows if row["is_converged"][sequence]
    ]
    return np.array(found, dtype=float).reshape(-1, 2)


def line(points_NX: np.ndarray) -> tuple[float, float]:
    """Return slope and start; for equal numbers of hard tokens the mean iterations."""
    if not np.ptp(points_NX[:, 0]):
        return 0.0, float(points_NX[:, 1].mean())
    slope, start = np.polyfit(*points_NX.T, 1)
    return float(slope), float(start)


if __name__ == "__main__":
    main()
