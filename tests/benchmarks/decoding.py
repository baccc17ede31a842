"""Milliseconds of one decoded token against the figures of the published code on an H200, random weights, fp32.

    python -m tests.benchmarks.decoding
    python -m tests.benchmarks.decoding mamba2-130m-implicit --batch 1 64
    python -m tests.benchmarks.decoding --batch 1 --layer-kernels    # one sequence as several have it

The decode step is ours: one token for every sequence of the batch, from cache to logits. Beside it the same without
captured graphs, `generate` of transformers with all that it does around a step (medians of five calls), and what its
first call takes more than the next ones, which find the graphs captured. Each row checks that the plain code, given the
tokens that the graphs gave, gives the same next ones. Reference and goal are of one H200; on another card compare
ratios only. Without a GPU one layer and a few tokens show that it works.
"""

import statistics
import sys
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.runner import Runner
from tests.measuring import DEVICE, HAS_GPU, card, keep, options_of, seconds, show, spread

# Published code and goal in ms a token, by batch size.
FIGURES = {
    "mamba2-130m-implicit": {1: (148, 6), 64: (155, 25)},
    "llama3-130m-implicit": {1: (53, 4), 64: (59, 6)},
    "mamba2-130m-explicit": {1: (18, 1.5), 64: (22, 5)},
}
PROMPT, WARM_UP = 64, 8


def main() -> None:
    arguments = {
        "configs": {"nargs": "*", "default": list(FIGURES)},
        "--batch": {"type": int, "nargs": "*", "default": [1, 64]},
        "--tokens": {"type": int, "default": 32},
        "--layer-kernels": {"action": "store_true"},
    }
    options = options_of(__doc__, arguments)
    torch.set_float32_matmul_precision("high")
    rows = []
    for name in options.configs:
        config = implicit_llm.load_config(name)
        if not HAS_GPU:
            config.num_hidden_layers, options.tokens = 1, 3
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
        if options.layer_kernels:
            type(model.base).token_stack = lambda *_: None
        for batch in options.batch:
            found = measure(model, batch, options.tokens)
            reference, goal = FIGURES.get(name, {}).get(batch, (None, None))
            ratio = reference and reference / found["ms"]
            figures = {"reference_ms": reference, "ratio": ratio, "goal_ms": goal}
            rows.append({"model": name, "batch": batch, **found, **figures})
    show(rows, card())
    keep(options.out, rows)


def measure(model: Any, batch: int, num_tokens: int) -> dict[str, Any]:
    """Raises: SystemExit when the graphs decode other tokens than the plain code."""
    prompt = torch.randint(1, model.config.vocab_size, (batch, PROMPT), device=model.device)  # 0 is padding
    times_ms, tokens, f_evaluations = decode(model, prompt, num_tokens)
    graphs, model.base.runner = model.base.runner, Runner()
    plain_ms, plain_tokens, _ = decode(model, prompt, min(num_tokens, 8), tokens)
    count = plain_tokens.shape[1]
    agreement = (tokens[:, :count] == plain_tokens).float().mean().item()
    if agreement < 0.98:  # rounding may turn a near tie
        sys.exit(f"the graphs and the plain code agree on {agreement:.1%} of the tokens only")
    model.base.runner = type(graphs)()
    first_s, short_s, *others_s = (
        seconds(partial(model.generate, prompt, min_new_tokens=n, max_new_tokens=n, do_sample=False, pad_token_id=0))
        for n in (num_tokens, num_tokens, 2 * num_tokens, *(num_tokens, 2 * num_tokens) * 5)
    )
    many_s = statistics.median(others_s[2::2]) - statistics.median(others_s[1::2])
    return spread(times_ms, "ms") | {
        "plain_ms": statistics.median(plain_ms),
        "generate_ms": 1e3 * many_s / num_tokens,
        "first_call_s": first_s - short_s,
        "f_evaluations": f_evaluations,
        "agreement": agreement,
    }


@torch.inference_mode()
def decode(
    model: Any, prompt_BL: torch.Tensor, num_tokens: int, given_BT: torch.Tensor | None = None
) -> tuple[list[float], torch.Tensor, float | None]:
    """Return milliseconds of each token after the first few, the tokens (B, T), and f-evaluations per token.

    given: tokens that the model gets instead of its own.
    """
    cache = ConvergedStateCache()
    out = model(input_ids=prompt_BL, past_key_values=cache, logits_to_keep=1)
    times_ms, tokens, evaluations = [], [], []

    def step() -> None:
        nonlocal out
        out = model(input_ids=following_B1, past_key_values=cache)

    for index in range(WARM_UP + num_tokens):
        tokens.append(out.logits[:, -1:].argmax(-1))
        following_B1 = tokens[-1] if given_BT is None else given_BT[:, index : index + 1]
        seconds(lambda: None)  # what came before has ended
        times_ms.append(1e3 * seconds(step))
        if out.solver_stats is not None:
            evaluations.append(out.solver_stats.f_evaluations.mean().item())
    f_evaluations = round(statistics.fmean(evaluations[WARM_UP:]), 1) if evaluations else None
    return times_ms[WARM_UP:], torch.cat(tokens, dim=1), f_evaluations


if __name__ == "__main__":
    main()
