"""Exact matches and the positions of errors in S5 sequences of a million tokens, which are 512 pieces of 2,048 tokens.

    python -m tests.benchmarks.million_tokens MODEL ... --out FILE    # on a Hopper GPU, five minutes per model in bf16
    python -m tests.benchmarks.million_tokens MODEL --length 65536 --precision fp32
    python -m tests.benchmarks.million_tokens MODEL --length 65536 --sequences 256 --seed 1 --last 1 4 16

With `--last`, a run directory is evaluated with its final weights and with the mean of its last 4 and 16 states, the
final weights included. Its phase must have kept the others at equal distances (`keep`). Seed 1 is that of validation.

A model is a name of the package or a run directory. Sequences are solved by the protocol, in blocks of 8 until the
residual of each token is below 0.05, each piece from the state of the one before it. The protocol evaluates in fp32.
In bf16, one kernel solves the blocks of a piece. Without a GPU the sequences are short and show that the script works.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.training.state import load_model, model_tensors
from tests.benchmarks.evaluation_blocks import PROTOCOL
from tests.benchmarks.series_gradient import words
from tests.measuring import DEVICE, HAS_GPU, card, keep, options_of, show

PIECE = 2048
BINS = 16  # the wrong tokens are counted in as many equal parts of the sequences


def main() -> None:
    arguments: dict[str, dict[str, Any]] = {
        "models": {"nargs": "+", "help": "names of the package, or run directories"},
        "--length": {"type": int, "default": 2**20, "help": "tokens of a sequence"},
        "--sequences": {"type": int, "default": 32},
        "--precision": {"default": "bf16", "choices": ("fp32", "bf16")},
        "--seed": {"type": int, "default": 7, "help": "of the sequences"},
        "--last": {"nargs": "+", "type": int, "default": [1], "help": "how many states to average"},
    }
    options, rows = options_of(__doc__, arguments), []
    length, sequences = (options.length, options.sequences) if HAS_GPU else (4 * PIECE // 64, 4)
    ids_BL, labels_BL = words("S5", "none", 1.0, length, sequences, "test", options.seed)
    for model in options.models:
        for count in options.last:
            about = {"model": model, "states": count, "length": length, "sequences": sequences}
            found = exact_matches(load(model, count), ids_BL, labels_BL, options.precision)
            rows.append({**about, "precision": options.precision, **found})
            keep(options.out, rows, seed=options.seed)
    show(rows, f"{card()}, torch {torch.__version__}")


def load(name: str, count: int) -> Any:
    """Return a model, which has the mean of the last `count` states if it is a run directory."""
    path = f"{name}/model" if "/" in name else implicit_llm.trained_model(name)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    kept = sorted(Path(name).glob("kept/*/model.safetensors"))
    if not 0 <= count - 1 <= len(kept):
        sys.exit(f"{name}: --last {count}: give 1 to {len(kept) + 1}, the number of its states")
    states = [*map(load_file, kept[len(kept) - count + 1 :]), model_tensors(model)]
    mean = {tensor: torch.stack([state[tensor] for state in states]).mean(0) for tensor in states[-1]}
    load_model(model, mean, name)
    model.solver = replace(model.solver, **PROTOCOL, eval_block_len=8, tol=0.05, eval_max_iter=128)
    return model.to(DEVICE).eval()


@torch.inference_mode()
def exact_matches(model: Any, ids_BL: torch.Tensor, labels_BL: torch.Tensor, precision: str) -> dict[str, Any]:
    """Return the exact matches at lengths that double, and where the errors are."""
    start_s, cache, wrong = time.perf_counter(), ConvergedStateCache(), []
    for ids, labels in tqdm([*zip(ids_BL.split(PIECE, 1), labels_BL.split(PIECE, 1), strict=True)], unit="piece"):
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=precision == "bf16"):
            out = model(input_ids=ids.to(DEVICE), past_key_values=cache)
        wrong.append(out.logits.argmax(-1) != labels.to(DEVICE))
    wrong_BL = torch.cat(wrong, 1).cpu()
    seconds, length = time.perf_counter() - start_s, wrong_BL.shape[1]
    first_B = torch.where(wrong_BL.any(1), wrong_BL.int().argmax(1), length)
    lengths = [length >> halvings for halvings in range(8) if length >> halvings >= 32][::-1]
    return {
        "exact_matches": int((first_B == length).sum()),
        "right_at_the_end": int((~wrong_BL[:, -1]).sum()),
        "exact_matches_by_length": {size: int((first_B >= size).sum()) for size in lengths},
        "first_errors": sorted(int(first) for first in first_B if first < length),
        "wrong_share_by_part": [float(part.float().mean()) for part in wrong_BL.chunk(BINS, 1)],
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
