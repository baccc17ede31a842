"""How far later tokens move earlier logits, by method, criterion and mode, in standard deviations of the logits.

    python -m tests.benchmarks.causality --out results/benchmarks/causality-cpu.json

Each number is the largest over the positions before the change and over three untrained models (2 layers, width 32,
vocabulary 100) on 6 sequences of 64 random tokens, of which tokens 40 to 64 are changed. A method sets training alone,
so evaluation has one row a criterion. The last row takes the S5 model of the package with its own settings. On a CPU,
so that the numbers are the same everywhere.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import implicit_llm
from tests.measuring import keep, options_of, show

SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}
CONFIGS = {
    "Mamba2": implicit_llm.ImplicitMamba2Config(**SIZES, head_dim=16, state_size=16),
    "Llama": implicit_llm.ImplicitLlama3Config(**SIZES, num_attention_heads=2, intermediate_size=64),
}
MODES: dict[str, dict[str, Any]] = {
    "simultaneous": {"eval_mode": "simultaneous"},
    "blocks of 32": {"eval_mode": "blockwise", "eval_block_len": 32},
    "training": {},
}
SEEDS, LENGTH, CHANGED = 3, 64, 40


def main() -> None:
    options = options_of(__doc__)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for method, stop in product(("plain", "anderson"), ("sequence", "token", "batch")):
        row: dict[str, Any] = {"method": method, "stop": stop}
        for (family, config), (mode, settings) in product(CONFIGS.items(), MODES.items()):
            if method == "anderson" and mode != "training":
                continue
            found = [
                moved(untrained(config, seed, method, stop, settings), mode == "training") for seed in range(SEEDS)
            ]
            row[f"{family}, {mode}"] = max(largest for largest, _ in found)
        rows.append(row)
    trained = AutoModelForCausalLM.from_pretrained(implicit_llm.trained_model("s5-state-passing-s0"))
    trained.solver = replace(trained.solver, eval_block_len=LENGTH)
    largest, changed = moved(trained, is_training=False)
    rows.append({"method": "S5, one block", "stop": "token", "moved": largest, "changed_predictions": changed})
    keep(options.out, rows)
    show(rows, __doc__.partition("\n")[0])


def untrained(config: Any, seed: int, method: str, stop: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.solver = replace(model.solver, method=method, stop=stop, eval_stop=stop, **settings)
    return model


@torch.no_grad()
def moved(model: Any, is_training: bool) -> tuple[float, int]:
    """The largest move of a logit before the change, and how many predictions change there."""
    first, other = torch.randint(model.config.vocab_size, (2, 6, LENGTH), generator=torch.Generator().manual_seed(0))
    other[:, :CHANGED] = first[:, :CHANGED]
    before, after = (model.train(is_training)(ids_BL).logits[:, :CHANGED] for ids_BL in (first, other))
    return float(((before - after).abs() / before.std()).max()), int((before.argmax(-1) != after.argmax(-1)).sum())


if __name__ == "__main__":
    main()
