"""Read words of S5 that a model loses again, from a state before the first wrong answer, in other ways.

    python results/reference/state-tracking/rereads.py MODEL DATA [--words 256] [--tol 0.05] [--back 256]

MODEL: a folder with config.json and model.safetensors; DATA: a data set, the folder with its index.json.
Words are read in blocks of 8, as in `accuracy.csv`. A lost word is read again from `--back` tokens before its first
wrong answer to 8 tokens after it. Prints one JSON object.

The margin of an answer is the logit of the right element minus the largest other logit: negative if it is wrong.
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
from implicit_llm_data.groups import load_group
from implicit_llm_data.shards import open_dataset

TABLE = torch.as_tensor(load_group("S5").table.astype(np.int64))
BLOCK, PIECE, AFTER, OTHERS = 8, 256, 8, 16
WAYS: dict[str, dict[str, Any]] = {
    "as before": {},
    "tolerance 0.06": {"tol": 0.06},
    "tolerance 0.04": {"tol": 0.04},
    "tolerance 0.01": {"tol": 0.01},
    "tolerance 0.001": {"tol": 0.001},
    "sequential": {"eval_mode": "sequential"},
    "sequential, tolerance 0.001": {"eval_mode": "sequential", "tol": 0.001},
}


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    tokens_BL = torch.as_tensor(open_dataset(options.data).fetch(np.arange(options.words))["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    blocks = {"eval_mode": "blockwise", "eval_block_len": BLOCK, "eval_stop": "token", "eval_max_iter": 128}
    model.solver = replace(model.solver, **blocks, tol=options.tol)
    margins_BL, _ = read(model, tokens_BL, *nothing_read(len(tokens_BL)))
    is_lost_B = (margins_BL < 0).any(dim=1)
    about = {key: getattr(options, key) for key in ("words", "tol", "back")} | {"length": tokens_BL.shape[1]}
    lost = [
        about_word(model, tokens_BL, word, int((margins_BL[word] < 0).nonzero()[0]), is_lost_B, options.back)
        | {"wrong_tokens": int((margins_BL[word] < 0).sum())}
        for word in is_lost_B.nonzero().flatten().tolist()
    ]
    json.dump(about | {"lost": lost}, sys.stdout, indent=1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--words", type=int, default=256)
    parser.add_argument("--tol", type=float, default=0.05)
    parser.add_argument("--back", type=int, default=256)
    return parser.parse_args()


def nothing_read(words: int) -> tuple[ConvergedStateCache, Tensor]:
    """The state and the product before the first token."""
    return ConvergedStateCache(), torch.zeros(words, dtype=torch.long)


@torch.inference_mode()
def read(model: Any, tokens_BL: Tensor, cache: ConvergedStateCache, product_B: Tensor) -> tuple[Tensor, Tensor]:
    """The margins of all answers (B, L), and the product after the last token; the cache is advanced."""
    margins = []
    for piece_BP in tokens_BL.split(PIECE, dim=1):
        logits_BPA = model(input_ids=piece_BP, past_key_values=cache).logits
        products = []
        for token_B in piece_BP.T:
            product_B = TABLE[product_B, token_B]
            products.append(product_B)
        answer_BP1 = torch.stack(products, dim=1)[..., None]
        others_BP = logits_BPA.scatter(-1, answer_BP1, -torch.inf).amax(-1)
        margins.append(logits_BPA.gather(-1, answer_BP1)[..., 0] - others_BP)
    return torch.cat(margins, dim=1), product_B


def about_word(model: Any, tokens_BL: Tensor, word: int, first: int, is_lost_B: Tensor, back: int) -> dict[str, Any]:
    """The word's least margin around its first wrong answer, in each way and from other states."""
    start = max(0, first - back) // BLOCK * BLOCK
    rows = torch.cat([torch.tensor([word]), (~is_lost_B).nonzero().flatten()[:OTHERS]])
    cache, product_B = nothing_read(len(rows))
    if start:
        _, product_B = read(model, tokens_BL[rows, :start], cache, product_B)
    around_1P = tokens_BL[word : word + 1, start : first + 1 + AFTER]
    as_read = model.solver

    def least_margin(chosen: list[int], is_empty: bool = False, **settings: Any) -> float:
        state, product = nothing_read(len(chosen))
        if cache.prefix is not None and not is_empty:
            state.made_by, product = cache.made_by, product_B[chosen]
            state.prefix = cache.prefix.select(torch.tensor(chosen)).map(torch.clone)
        model.solver = replace(as_read, **settings)
        margins, _ = read(model, around_1P.expand(len(chosen), -1), state, product)
        model.solver = as_read
        return round(float(margins.min()), 2)

    ways = {way: least_margin([0], **settings) for way, settings in WAYS.items()}
    ways |= {"from the empty state": least_margin([0], is_empty=True)}
    ways |= {"from other words": least_margin(list(range(1, len(rows))))}
    return {"word": word, "first_wrong_token": first + 1, "least_margins": ways}


if __name__ == "__main__":
    main()
