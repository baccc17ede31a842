"""Train one implicit Mamba2 layer to track a state, on a CPU in a few minutes, in plain PyTorch.

    python examples/train_word_problem.py [--steps STEPS]

A token is an element of S3, the six permutations of three things; the answer at each token is the product of all so
far. The model trains on words of 16 tokens and is then read on longer ones. `train_word_problem.ipynb` is this file as
a notebook, with what it printed; `notebook.py` makes it.
"""

# %% Settings
import argparse

import torch
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm_contracts.config.word_problem import WordProblemConfig
from implicit_llm_data.stages.word_problem import generate

GROUP, ORDER = "S3", 6
TRAIN_LENGTH, BATCH = 16, 32
STEPS, UNROLLED_STEPS = 1200, 300
PEAK_RATE = 5e-3


# %% Data
def words(split, length, count):
    """Random words and the products of their tokens so far, (count, length) each."""
    data = WordProblemConfig(GROUP, "none", 0.5, length, count, split, seed=0, shard_samples=count)
    return [torch.from_numpy(array.astype("int64")) for array in generate(data, shard=0)]


# %% Training
def train(model, steps):
    """Train with four unrolled iterations, then to the fixed point, with four phantom-gradient steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up_then_down = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps))
    )
    ids, labels = words("train", TRAIN_LENGTH, steps * BATCH)
    model.train()
    for step in range(steps):
        if step in (0, UNROLLED_STEPS):
            model.solver = {"mode": "fixed_point" if step else "unrolled", "max_iter": 16}
        rows = slice(step * BATCH, (step + 1) * BATCH)
        out = model(ids[rows], labels=labels[rows], aligned=True)  # the answer at a token is the label of that token
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        warm_up_then_down.step()
        if (step + 1) % 100 == 0:
            used = out.solver_stats.f_evaluations.mean()
            print(f"step {step + 1:5d}  loss {out.loss:.3f}  {used:.0f} evaluations of f", flush=True)


# %% Evaluation
@torch.inference_mode()
def accuracy(model, length):
    """Share of right answers at the last ten tokens of 128 words that were not trained on."""
    ids, labels = words("test", length, 128)
    model.eval()
    return (model(ids).logits.argmax(-1) == labels)[:, -10:].float().mean().item()


# %% One run
def main(steps=STEPS):
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tensors are small
    size = {"vocab_size": ORDER, "hidden_size": 32, "expand": 2, "head_dim": 32, "state_size": 32}
    config = implicit_llm.load_config("mamba2-state-tracking-implicit", **size)
    model = AutoModelForCausalLM.from_config(config)
    train(model, steps)
    found = {length: accuracy(model, length) for length in (TRAIN_LENGTH, 2 * TRAIN_LENGTH, 4 * TRAIN_LENGTH)}
    for length, share in found.items():
        print(f"{length:4d} tokens: {share:.1%} of the last ten answers are right (guessing {1 / ORDER:.1%})")
    return found


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    main(parser.parse_known_args()[0].steps)  # a notebook has arguments of its own
