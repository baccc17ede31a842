"""Solver iterations of each token of a word problem, read one token at a time, for hard tokens and the identity.

    python results/reference/state-tracking/iterations_by_token.py MODEL DATA [--samples 256] [--length 64] [--tol 0.05]

MODEL: a folder with config.json and model.safetensors; DATA: the run directory of a data set.
Prints one JSON object: iterations by kind of token, accuracy by position, and the iterations of a sequence one after
another, its serial depth.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import implicit_llm  # noqa: F401 (registers the models)
from implicit_llm_data.groups import load_monoid
from implicit_llm_data.shards import open_dataset


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    folder = next(iter(sorted((options.data / "work").glob("*/index.json")))).parent
    rows = open_dataset(folder).fetch(np.arange(options.samples))
    ids_BL, labels_BL = (np.asarray(rows[column])[:, : options.length] for column in ("input_ids", "labels"))
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    model.solver = replace(model.solver, eval_mode="sequential", tol=options.tol, eval_max_iter=128)
    answers_BL, iterations_BL = read_token_by_token(model, torch.as_tensor(ids_BL, dtype=torch.long))
    is_right_BL = answers_BL.numpy() == labels_BL
    manifest = json.loads((options.data / "manifest.json").read_text())["identity"]["config"]
    is_hard_BL = ids_BL // load_monoid(manifest["monoid"]).order != 0
    json.dump(summary(iterations_BL.numpy(), is_right_BL, is_hard_BL) | {"tol": options.tol}, sys.stdout)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--tol", type=float, default=0.05)
    return parser.parse_args()


@torch.inference_mode()
def read_token_by_token(model: torch.nn.Module, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return predictions and iterations of each token, both (B, L)."""
    cache, answers, iterations = None, [], []
    for position in range(ids_BL.shape[1]):
        out = model(input_ids=ids_BL[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        answers.append(out.logits[:, -1].argmax(-1))
        iterations.append(out.solver_stats.num_iter)
    return torch.stack(answers, 1), torch.stack(iterations, 1)


def summary(iterations_BL: np.ndarray, is_right_BL: np.ndarray, is_hard_BL: np.ndarray) -> dict[str, object]:
    """Return numbers by kind of token. Quantiles are over all tokens of the kind."""
    kinds = {"hard": is_hard_BL, "identity": ~is_hard_BL}
    found = {
        name: {
            "tokens": int(of_kind.sum()),
            "iterations_mean": round(float(iterations_BL[of_kind].mean()), 3),
            "iterations_quantiles_5_50_95": np.quantile(iterations_BL[of_kind], [0.05, 0.5, 0.95]).tolist(),
            "iterations_max": int(iterations_BL[of_kind].max()),
        }
        for name, of_kind in kinds.items()
        if of_kind.any()
    }
    return found | {
        "sequences": len(iterations_BL),
        "length": iterations_BL.shape[1],
        "accuracy_token": round(float(is_right_BL.mean()), 5),
        "accuracy_sequence": round(float(is_right_BL.all(axis=1).mean()), 5),
        "accuracy_per_position": [round(float(share), 4) for share in is_right_BL.mean(axis=0)],
        "serial_iterations_of_a_sequence": round(float(iterations_BL.sum(axis=1).mean()), 2),
    }


if __name__ == "__main__":
    main()
