"""How many words a model reads in blocks of 32 tokens, by the rule that stops a block.

    python results/reference/state-tracking/stopping_rules.py MODEL DATA [--words 128] [--rules sequence token]

MODEL: a folder with config.json and model.safetensors; DATA: a data set, the folder with its index.json.
A block is iterated until its residual over all tokens (`sequence`) or that of each token (`token`) is below 0.05, at
most 128 times. Prints one JSON object.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import implicit_llm  # noqa: F401 (registers the models)
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm_data.shards import open_dataset

PIECE = 256  # tokens that are read at a time


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    rows = open_dataset(options.data).fetch(np.arange(options.words))
    ids_BL, labels_BL = (torch.as_tensor(rows[column]) for column in ("input_ids", "labels"))
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    blocks = replace(model.solver, eval_mode="blockwise", eval_block_len=32, tol=0.05, eval_max_iter=128)
    found: dict[str, Any] = {"words": options.words, "length": ids_BL.shape[1]}
    for rule in options.rules:
        model.solver = replace(blocks, eval_stop=rule)
        is_right_BL, evaluations = read(model, ids_BL, labels_BL)
        found[rule] = {
            "accuracy_last10": round(float(is_right_BL[:, -10:].float().mean()), 4),
            "right_throughout": int(is_right_BL.all(dim=1).sum()),
            "f_evaluations_per_token": round(evaluations, 2),
        }
    json.dump(found, sys.stdout, indent=1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--words", type=int, default=128)
    parser.add_argument("--rules", nargs="+", default=["sequence", "token"])
    return parser.parse_args()


@torch.inference_mode()
def read(model: Any, ids_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, float]:
    """Return which predictions are correct (B, L), and the mean number of evaluations of f per token."""
    cache, is_right, evaluations = ConvergedStateCache(), [], []
    for ids_BP, labels_BP in zip(ids_BL.split(PIECE, dim=1), labels_BL.split(PIECE, dim=1), strict=True):
        out = model(input_ids=ids_BP, past_key_values=cache)
        is_right.append(out.logits.argmax(-1) == labels_BP)
        evaluations.append(float(out.solver_stats.f_evaluations.float().mean()))
    return torch.cat(is_right, dim=1), float(np.mean(evaluations))


if __name__ == "__main__":
    main()
