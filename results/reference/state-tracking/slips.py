"""Where a model loses a long word of S5, read one token at a time.

    python results/reference/state-tracking/slips.py MODEL [--words 256] [--length 4096] [--tol 0.05]

MODEL: a folder with config.json and model.safetensors. Prints one JSON object.

The factor of an answer is the answer times the inverse of the product: the identity if the answer is right. A word
whose state slipped takes the right steps from a wrong element, so its factor stays the same from token to token. An
answer is misread if the answers beside it share another factor; the state slips where the shared factor changes.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import implicit_llm  # noqa: F401 (registers the models)
from implicit_llm_data.groups import load_group

GROUP = load_group("S5")
TABLE = GROUP.table.astype(np.int64)
INVERSE = TABLE.argmin(axis=1)  # the identity is element 0
EDGES = [0, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    tokens_BL = np.random.default_rng(options.seed).integers(0, GROUP.order, (options.words, options.length))
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    model.solver = replace(model.solver, eval_mode="sequential", tol=options.tol, eval_max_iter=128)
    answers_BL, norms = read(model, torch.as_tensor(tokens_BL))
    factors_BL = TABLE[answers_BL, INVERSE[products(tokens_BL)]]
    asked = {key: getattr(options, key) for key in ("words", "length", "tol", "seed")}
    found = {"by_position": by_position(factors_BL, norms), "slips": commonest(slips(factors_BL))}
    json.dump(asked | found, sys.stdout, indent=1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--words", type=int, default=256)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tol", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


def products(tokens_BL: np.ndarray) -> np.ndarray:
    product_B, found = np.zeros(len(tokens_BL), np.int64), []
    for token_B in tokens_BL.T:
        product_B = TABLE[product_B, token_B]
        found.append(product_B)
    return np.stack(found, axis=1)


@torch.inference_mode()
def read(model: torch.nn.Module, tokens_BL: torch.Tensor) -> tuple[np.ndarray, dict[int, float]]:
    """Return predictions (B, L), and the mean norm of the scan's state after each position of EDGES."""
    cache, answers, norms = None, [], {}
    for position in range(1, tokens_BL.shape[1] + 1):
        out = model(input_ids=tokens_BL[:, position - 1 : position], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        answers.append(out.logits[:, -1].argmax(-1).numpy())
        if position in EDGES:
            state = max(cache.prefix.layers[0], key=torch.numel)
            norms[position] = float(state.float().flatten(1).norm(dim=1).mean())
    return np.stack(answers, axis=1), norms


def by_position(factors_BL: np.ndarray, norms: dict[int, float]) -> list[dict[str, Any]]:
    is_right_BL = factors_BL == 0
    has_slipped_BL, is_misread_BL = slips(factors_BL) != 0, factors_BL != without_misread(factors_BL)
    return [
        {
            "tokens": [start, end],
            "accuracy_last10": round(float(is_right_BL[:, end - 10 : end].mean()), 4),
            "accuracy_sequence": round(float(is_right_BL[:, :end].all(axis=1).mean()), 4),
            "slips": int(has_slipped_BL[:, start:end].sum()),
            "misread": int(is_misread_BL[:, start:end].sum()),
            "norm_at_end": round(norms[end], 2),
        }
        for start, end in pairwise(EDGES)
        if end <= factors_BL.shape[1]
    ]


def without_misread(factors_BL: np.ndarray) -> np.ndarray:
    """The factors with those that neither neighbour shares replaced by the last shared one; the identity at first."""
    before_BL = np.pad(factors_BL, ((0, 0), (1, 0)))[:, :-1]
    after_BL = np.pad(factors_BL, ((0, 0), (0, 1)), constant_values=-1)[:, 1:]
    is_shared_BL = (factors_BL == before_BL) | (factors_BL == after_BL)
    shared_BL = np.zeros_like(factors_BL)
    last_B = shared_BL[:, 0]
    for position, is_shared_B in enumerate(is_shared_BL.T):
        last_B = np.where(is_shared_B, factors_BL[:, position], last_B)
        shared_BL[:, position] = last_B
    return shared_BL


def slips(factors_BL: np.ndarray) -> np.ndarray:
    """Return the state error at each token (B, L): the shared factor times the inverse of the one before."""
    shared_BL = without_misread(factors_BL)
    before_BL = np.pad(shared_BL, ((0, 0), (1, 0)))[:, :-1]
    return TABLE[shared_BL, INVERSE[before_BL]]


def commonest(slips_BL: np.ndarray) -> dict[str, Any]:
    steps = slips_BL[slips_BL != 0]
    return {
        "number": len(steps),
        "by": [[cycles(int(element)), times] for element, times in Counter(steps.tolist()).most_common(8)],
    }


def cycles(element: int) -> str:
    """A permutation of 1..5 in cycle notation; the elements are in lexicographic order."""
    rest, permutation, index = [1, 2, 3, 4, 5], [], element
    for radix in (24, 6, 2, 1, 1):
        permutation.append(rest.pop(index // radix))
        index %= radix
    left, found = {1, 2, 3, 4, 5}, ""
    while left:
        cycle = [min(left)]
        while (follower := permutation[cycle[-1] - 1]) != cycle[0]:
            cycle.append(follower)
        left -= set(cycle)
        found += f"({' '.join(map(str, cycle))})" if len(cycle) > 1 else ""
    return found or "()"


if __name__ == "__main__":
    main()
