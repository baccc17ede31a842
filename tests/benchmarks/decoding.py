"""Milliseconds of one decoded token against the figures of the published code on an H200, random weights, fp32.

    python tests/benchmarks/decoding.py
    python tests/benchmarks/decoding.py mamba2-130m-implicit --batch 1 64

The decode step is ours: one token for every sequence of the batch, from cache to logits. Beside it the same without
captured graphs, `generate` of transformers with all that it does around a step, and what its first call takes more
than the next ones, which find the graphs captured. Each row checks that the graphs give the tokens that the plain code
gives. Reference and goal are of one H200; on another card compare ratios only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.runner import Runner

# Published code and goal in ms a token, by batch size.
FIGURES = {
    "mamba2-130m-implicit": {1: (148, 6), 64: (155, 25)},
    "llama3-130m-implicit": {1: (53, 4), 64: (59, 6)},
    "mamba2-130m-explicit": {1: (18, 1.5), 64: (22, 5)},
}
PROMPT, WARM_UP = 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=list(FIGURES))
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        sys.stdout.write("no GPU: one layer and a few tokens, which show that it works\n")
    lines = [
        f"{'model':24}{'batch':>6}{'ms':>8}{'plain':>8}{'generate':>9}{'first, s':>9}{'reference':>10}{'ratio':>7}"
        f"{'goal':>6}{'f':>6}"
    ]
    rows = []
    for name in options.configs:
        config = implicit_llm.load_config(name)
        if device.type == "cpu":
            config.num_hidden_layers, options.tokens = 1, 3
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config).to(device).eval()
        for batch in options.batch:
            found = {"model": name, "batch": batch, **measure(model, batch, options.tokens)}
            reference, goal = FIGURES.get(name, {}).get(batch, (None, None))
            ratio = "" if reference is None else f"{reference / found['ms']:.1f}x"
            lines.append(
                f"{name:24}{batch:6}{found['ms']:8.2f}{found['plain_ms']:8.1f}{found['generate_ms']:9.2f}"
                f"{found['first_call_s']:9.2f}"
                f"{reference or '':>10}{ratio:>7}{goal or '':>6}{found['f_evaluations'] or '':>6}"
            )
            rows.append(found)
    sys.stdout.write("\n".join(lines) + "\n")
    if options.out:
        card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        options.out.write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def measure(model: Any, batch: int, num_tokens: int) -> dict[str, Any]:
    """Raises: SystemExit when the graphs decode other tokens than the plain code."""
    prompt = torch.randint(1, model.config.vocab_size, (batch, PROMPT), device=model.device)  # 0 is padding
    times_ms, tokens, f_evaluations = decode(model, prompt, num_tokens)
    graphs, model.base.runner = model.base.runner, Runner()
    plain_ms, plain_tokens, _ = decode(model, prompt, min(num_tokens, 8))
    model.base.runner = graphs
    count = min(tokens.shape[1], plain_tokens.shape[1])
    agreement = (tokens[:, :count] == plain_tokens[:, :count]).float().mean().item()
    if agreement < 0.98:  # rounding may turn a near tie
        sys.exit(f"the graphs and the plain code agree on {agreement:.1%} of the tokens only")
    model.base.runner = type(graphs)()
    seconds = []
    for count in (num_tokens, num_tokens, 2 * num_tokens):
        started = time.perf_counter()
        model.generate(prompt, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0)
        synchronize()
        seconds.append(time.perf_counter() - started)
    first_s, short_s, long_s = seconds
    return {
        "ms": statistics.median(times_ms),
        "min_ms": min(times_ms),
        "max_ms": max(times_ms),
        "plain_ms": statistics.median(plain_ms),
        "generate_ms": 1e3 * (long_s - short_s) / num_tokens,
        "first_call_s": first_s - short_s,
        "f_evaluations": f_evaluations,
        "agreement": agreement,
    }


@torch.inference_mode()
def decode(model: Any, prompt_BL: torch.Tensor, num_tokens: int) -> tuple[list[float], torch.Tensor, float | None]:
    """Milliseconds of each token after the first few, the tokens (B, T), and f-evaluations a token."""
    cache = ConvergedStateCache()
    logits = model(input_ids=prompt_BL, past_key_values=cache, logits_to_keep=1).logits
    times_ms, tokens, evaluations = [], [], []
    for index in range(WARM_UP + num_tokens):
        token_B1 = logits[:, -1:].argmax(-1)
        tokens.append(token_B1)
        synchronize()
        started = time.perf_counter()
        out = model(input_ids=token_B1, past_key_values=cache)
        logits = out.logits
        synchronize()
        if index >= WARM_UP:
            times_ms.append(1e3 * (time.perf_counter() - started))
            if out.solver_stats is not None:
                evaluations.append(out.solver_stats.f_evaluations.mean().item())
    return times_ms, torch.cat(tokens, dim=1), round(statistics.fmean(evaluations), 1) if evaluations else None


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
