"""Exact matches of S5 models, and of the mean weights of their last checkpoints, on sequences of 65,536 tokens.

    python -m tests.benchmarks.averaged_weights RUN_DIR ... --out FILE          # on a Hopper GPU

A run directory needs checkpoints that its phase kept at equal distances (`keep`), the last of them as far from the end.
The sequences are those of the validation split, which has the seed 1. Evaluation is that of `million_tokens`, in bf16.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from implicit_llm.training.state import load_model, model_tensors
from tests.benchmarks.million_tokens import PIECE, exact_matches, load
from tests.benchmarks.series_gradient import words
from tests.measuring import HAS_GPU, card, keep, options_of, show


def main() -> None:
    arguments: dict[str, dict[str, Any]] = {
        "runs": {"nargs": "+", "type": Path, "help": "run directories"},
        "--last": {
            "nargs": "+",
            "type": int,
            "default": [1, 4, 8, 16, 32],
            "help": "the states in each mean, if there are as many",
        },
        "--length": {"type": int, "default": 2**16, "help": "tokens of a sequence"},
        "--sequences": {"type": int, "default": 256},
        "--precision": {"default": "bf16", "choices": ("fp32", "bf16")},
        "--seed": {"type": int, "default": 1, "help": "of the sequences"},
    }
    options, rows = options_of(__doc__, arguments), []
    length, sequences = (options.length, options.sequences) if HAS_GPU else (4 * PIECE // 64, 4)
    ids_BL, labels_BL = words("S5", "none", 1.0, length, sequences, "test", options.seed)
    for run in options.runs:
        model = load(str(run))
        end = {name: tensor.cpu() for name, tensor in model_tensors(model).items()}
        states = [*map(load_file, sorted(run.glob("kept/*/model.safetensors"))), end]
        for count in (count for count in options.last if 0 < count <= len(states)):
            load_model(model, mean(states[-count:]), str(run))
            about = {"run": run.parents[2].name, "states": count, "length": length, "sequences": sequences}
            rows.append({**about, **exact_matches(model, ids_BL, labels_BL, options.precision)})
            keep(options.out, rows, seed=options.seed, precision=options.precision)
    show(rows, f"{card()}, torch {torch.__version__}")


def mean(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


if __name__ == "__main__":
    main()
