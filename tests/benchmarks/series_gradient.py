"""The gradient `series` against `phantom`: their angle on trained models, and the losses of trainings with either.

    python -m tests.benchmarks.series_gradient    # trained models, on a CPU, with bAbI's archive
    python -m tests.benchmarks.series_gradient prepare BOOKS.jsonl.gz TOKENIZER.json TOKENS.npy
    python -m tests.benchmarks.series_gradient train TOKENS.npy --out losses.json         # on a GPU

`compare` takes the gradients of all weights on test data of the model's own task, in fp32 and train mode without
dropout. As a measure it also shows `phantom` of half as many steps against `phantom`.
`train` trains small language models on the same batches for each seed: `phantom` with seeds 0 to 2 and again with 3 to
5, `series` with 0 to 2. It compares the mean losses of the last 50 steps. Without a GPU its models are tiny.
"""

import argparse
import gzip
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.training.model import apply_runtime
from implicit_llm_contracts.config.text import CatbabiConfig
from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.config.word_problem import WordProblemConfig
from implicit_llm_contracts.runs.places import downloads_folder
from implicit_llm_data.babi.archive import find_archive, read_archive
from implicit_llm_data.babi.stories import parse_stories, vocabulary_of, words_of
from implicit_llm_data.stages.catbabi import PAD_ID, TaskStory, join, rows
from implicit_llm_data.stages.word_problem import generate
from tests.measuring import DEVICE, HAS_GPU, keep, options_of, show, update

VOCABULARY = 16384  # as language-models.yaml: the most frequent tokens; all others are the last one
SIZE = {"vocab_size": VOCABULARY, "hidden_size": 384, "num_hidden_layers": 8}
FAMILIES = {
    "mamba2": ("mamba2-130m-implicit", {**SIZE, "num_hidden_layers": 12}),  # a Mamba2 layer has two thirds of Llama's
    "llama3": ("llama3-130m-implicit", {**SIZE, "num_attention_heads": 6, "intermediate_size": 1024}),
}
RUNS = (*(("phantom", seed) for seed in range(6)), *(("series", seed) for seed in range(3)))
LAST_STEPS = 50
STUDENT_4 = 2.776  # 97.5 % quantile of Student's t with the 4 degrees of freedom of two groups of three


def main() -> None:
    actions = {"compare": (compare, 0), "prepare": (prepare, 3), "train": (train, 1)}
    arguments = {
        "action": {"nargs": "?", "default": "compare", "choices": [*actions]},
        "files": {"nargs": "*", "type": Path},
        "--steps": {"type": int, "default": 400},
        "--families": {"nargs": "+", "default": [*FAMILIES], "choices": [*FAMILIES]},
    }
    options = options_of(__doc__, arguments)
    act, wanted = actions[options.action]
    if len(options.files) != wanted:
        sys.exit(f"{options.action} takes {wanted} files, not {len(options.files)}")
    act(options)


def compare(options: argparse.Namespace) -> None:
    found = []
    for name, changes, (ids_BL, labels_BL) in tasks():
        model = AutoModelForCausalLM.from_pretrained(implicit_llm.trained_model(name), dtype=torch.float32).train()
        model.config.dropout = 0.0
        solver = replace(model.solver, **changes)
        halved = replace(solver, phantom_steps=solver.phantom_steps // 2)
        losses, gradients = [], []
        for model.solver in (halved, solver, replace(solver, gradient="series")):
            output = model(ids_BL, labels=labels_BL, aligned=True)
            losses.append(output.loss.item())
            gradients.append(torch.autograd.grad(output.loss, list(model.parameters())))
        few, phantom, series = (torch.cat([gradient.flatten() for gradient in of]) for of in gradients)
        stats = output.solver_stats
        found.append(
            {
                "model": name,
                "changes": json.dumps(changes),
                "sequences": len(ids_BL),
                "length": ids_BL.shape[1],
                "cosine": cosine(phantom, series),
                "least_cosine_of_a_weight": min(map(cosine, *gradients[1:])),
                "norm_ratio": (series.norm() / phantom.norm()).item(),
                "cosine_of_half_the_steps": cosine(phantom, few),
                "loss": losses[2],
                "is_loss_equal": losses[2] == losses[1],
                "accuracy": (output.logits.argmax(-1) == labels_BL)[labels_BL != -100].float().mean().item(),
                "residual": stats.residual.mean().item(),
                "converged": stats.is_converged.float().mean().item(),
                "solver": solver.to_dict(),
            }
        )
        show(found[-1:], name)
        keep(options.out, found)


def cosine(a: Tensor, b: Tensor) -> float:
    return cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()


def tasks() -> Iterator[tuple[str, dict[str, Any], list[Tensor]]]:
    """Yield each trained model, changes of its solver, and test data of its task: input and labels (B, L).

    Labels are -100 where there is no question.
    """
    a5 = words("A5", "aperiodic", 0.1, 256, 16)
    yield "a5-monoid-released-s0", {}, a5
    yield "a5-monoid-released-s0", {"block_len": 8, "method": "damped", "max_iter": 64}, a5
    yield "s5-state-passing-s0", {}, words("S5", "none", 1.0, 32, 64)
    yield "catbabi-implicit-s0", {}, stories(200, 16)


def words(
    group: str, monoid: Any, hard: float, length: int, count: int, split: str = "test", seed: int = 0
) -> list[Tensor]:
    data = WordProblemConfig(group, monoid, hard, length, count, split, seed, shard_samples=count)
    return [torch.from_numpy(array.astype("int64")) for array in generate(data, shard=0)]


def stories(length: int, count: int) -> list[Tensor]:
    """The first rows of CatbAbI's test set, as state-tracking.yaml has it but not shuffled by story."""
    config = CatbabiConfig("en-valid-10k", "test", "qa", length, vocab_size=192, seed=0, drop_last_story=True)
    files = read_archive(find_archive(downloads_folder()), ["en-valid-10k/qa3_train.txt"])
    by_file = {name: [words_of(story) for story in parse_stories(data)] for name, data in files.items()}
    vocabulary = vocabulary_of(word for of_file in by_file.values() for story in of_file for word in story)
    wanted = [
        of_file for name, of_file in sorted(by_file.items()) if name.startswith("en-valid-10k/") and "_test" in name
    ]
    mixed = [TaskStory(0, tuple(of_file[place])) for place in range(count) for of_file in wanted]
    found = rows(*join(mixed, vocabulary), vocabulary.index("?"), config)
    ids_BL, labels_BL = (torch.from_numpy(found[name][:count].astype("int64")) for name in ("input_ids", "labels"))
    return [ids_BL, labels_BL.masked_fill(labels_BL == PAD_ID, -100)]


def prepare(options: argparse.Namespace) -> None:
    """Write the tokens of all texts as one array of 16 bits, numbered by how frequent they are."""
    from tokenizers import Tokenizer

    text, tokenizer, out = options.files
    with gzip.open(text, "rt", encoding="utf-8") as lines:
        encoded = Tokenizer.from_file(str(tokenizer)).encode_batch([json.loads(line)["text"] for line in lines])
    _, tokens, counts = np.unique(np.concatenate([one.ids for one in encoded]), return_inverse=True, return_counts=True)
    rank = np.argsort(np.argsort(-counts, kind="stable"))
    np.save(out, np.minimum(rank[tokens], VOCABULARY - 1).astype(np.uint16))


def train(options: argparse.Namespace) -> None:
    tokens, kept = np.load(options.files[0]), []
    for family in options.families:
        losses = {run: losses_of(family, *run, tokens, options.steps) for run in RUNS}
        last = {run: statistics.fmean(curve[-LAST_STEPS:]) for run, curve in losses.items()}
        phantom, again, series = ([last[run] for run in group] for group in (RUNS[:3], RUNS[3:6], RUNS[6:]))
        spread = ((statistics.variance(phantom) + statistics.variance(again)) / 2) ** 0.5
        row = {
            "family": family,
            "phantom": statistics.fmean(phantom),
            "phantom_again": statistics.fmean(again),
            "series": statistics.fmean(series),
            "difference": statistics.fmean(series) - statistics.fmean(phantom),
            "half_interval": STUDENT_4 * spread * (2 / 3) ** 0.5,  # 95 % of a difference of two means of three
            "losses": [
                {"gradient": gradient, "seed": seed, "losses": losses[gradient, seed]} for gradient, seed in RUNS
            ],
        }
        row["is_within"] = abs(row["difference"]) <= min(row["half_interval"], 0.01)
        kept.append(row)
        show(kept[-1:], family)
        keep(options.out, kept, tokens=len(tokens), last_steps=LAST_STEPS)


def losses_of(family: str, gradient: str, seed: int, tokens: np.ndarray, steps: int) -> list[float]:
    """The loss of each step of one training: free from the first step on, in bf16 on a GPU."""
    batch, length = (8, 512) if HAS_GPU else (2, 32)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    name, size = FAMILIES[family]
    config = implicit_llm.load_config(name, **size if HAS_GPU else {**size, "num_hidden_layers": 1})
    model: Any = AutoModelForCausalLM.from_config(config).to(DEVICE).train()
    model.solver = replace(model.solver, gradient=gradient)
    apply_runtime(model, Runtime(cuda_graphs=HAS_GPU), name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=HAS_GPU)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (0.1 * steps)))
    rows_NL = torch.from_numpy(tokens[: len(tokens) // length * length].astype(np.int64)).view(-1, length).to(DEVICE)
    order_N = torch.randperm(len(rows_NL), generator=torch.Generator().manual_seed(0)).to(DEVICE)  # for every seed
    losses = []
    for step in range(steps):
        ids_BL = rows_NL[order_N[torch.arange(step * batch, (step + 1) * batch, device=DEVICE) % len(rows_NL)]]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=HAS_GPU):
            loss = model(input_ids=ids_BL, labels=ids_BL, return_logits=False).loss
        update(model, optimizer, loss)
        warm_up.step()
        losses.append(loss.detach().clone())
    return [round(loss, 5) for loss in torch.stack(losses).tolist()]


if __name__ == "__main__":
    main()
