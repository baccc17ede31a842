"""Milliseconds of a training step with state passing, and seconds of a long evaluation, of the S5 model in the package.

    python -m tests.benchmarks.state_tracking                             # both rows, on a GPU
    python -m tests.benchmarks.state_tracking training --profile 30
    python -m tests.benchmarks.state_tracking explicit --layers 16
    python -m tests.benchmarks.state_tracking evaluation --length 16384

`training` takes steps of 512 sequences of 32 tokens in blocks of 8, each from the state in which the sequence before it
ended, in bf16, with the trained weights, dropout and a learning rate too small to change them; the median is over the
steps of one chain of 64. `explicit` takes such steps of an explicit model with random weights, which carries its states
after wrong predictions too. `evaluation` solves 256 sequences in blocks of 8 until each token has converged.
Without a GPU the rows are tiny and show that they work.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.evaluation.answers import EvaluationBatchSize, EvaluationJob
from implicit_llm.evaluation.kinds.word_problem import evaluate_word_problem
from implicit_llm.models.runner import Runner
from implicit_llm.training.batches import BatchLayout
from implicit_llm.training.model import apply_runtime
from implicit_llm.training.optimizer import build_optimizer
from implicit_llm.training.state_passing import StatePassing
from implicit_llm_contracts.config.training import OptimizerConfig, PhaseConfig, Runtime
from tests.benchmarks.series_gradient import words
from tests.benchmarks.training_step import OF_STEPS, show_profile
from tests.measuring import DEVICE, HAS_GPU, card, keep, milliseconds, options_of, show, spread, update

MODEL = "s5-state-passing-s0"
CHAIN, WARM_UP = 64, 8


class Words:
    """S5 sequences in memory, with the interface of a data set."""

    def __init__(self, length: int, count: int, split: str) -> None:
        self.length, self.vocab_size = length, 120
        self._ids_NL, self._labels_NL = words("S5", "none", 1.0, length, count, split, seed=5)

    def __len__(self) -> int:
        return len(self._ids_NL)

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"input_ids": self._ids_NL.numpy()[indices], "labels": self._labels_NL.numpy()[indices]}


def main() -> None:
    arguments = {
        "rows": {"nargs": "*", "default": ["training", "evaluation"], "help": ", ".join(ROWS)},
        "--layers": {"type": int, "default": 16, "help": "of the explicit model"},
        "--length": {"type": int, "default": 16384, "help": "tokens of the sequences that are evaluated"},
        "--sequences": {"type": int, "default": 256, "help": "sequences that are evaluated"},
        "--precision": {"default": "fp32", "choices": ("fp32", "bf16"), "help": "of the evaluation"},
    }
    options, rows = options_of(__doc__, arguments | OF_STEPS), []
    for name in options.rows:
        if name not in ROWS:
            sys.exit(f"no such row: {name}; rows: {', '.join(ROWS)}")
        rows.append({"row": name} | ROWS[name](options))
        show(rows[-1:], name)
        keep(options.out, rows)
    show(rows, f"{card()}, torch {torch.__version__}")


def trained() -> Any:
    return AutoModelForCausalLM.from_pretrained(implicit_llm.trained_model(MODEL)).to(DEVICE)


def training(options: argparse.Namespace) -> dict[str, Any]:
    return steps(trained(), options, restarts=True)


def explicit(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    config = implicit_llm.load_config(
        "mamba2-state-tracking-explicit", vocab_size=120, num_hidden_layers=options.layers
    )
    model: Any = AutoModelForCausalLM.from_config(config).to(DEVICE)
    return {"layers": options.layers, **steps(model, options, restarts=False)}


def steps(model: Any, options: argparse.Namespace, *, restarts: bool) -> dict[str, Any]:
    """Time the steps of one chain. `restarts`: whether a sequence after a wrong prediction starts empty."""
    model.train()
    device = model.device
    batch_size = 512 if HAS_GPU else 4
    apply_runtime(model, Runtime(cuda_graphs=options.graphs), "benchmark")
    optimizer = build_optimizer(
        model, OptimizerConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=0.25)
    )
    for group in optimizer.param_groups:
        group["lr"] = 1e-7
    data = Words(32, batch_size * CHAIN, "train")
    phase = PhaseConfig("free", 0, 0, CHAIN, model.solver, state_passing=CHAIN, restart_when_wrong=restarts)
    layout = BatchLayout(batch_size, 1, 0, batch_size)
    passing = StatePassing(phase, {"group": "S5", "monoid": "none"}, layout, device)
    torch.manual_seed(0)
    found: list[dict[str, torch.Tensor]] = []

    def step(number: int) -> None:
        rows = data.fetch(np.arange(number * batch_size, (number + 1) * batch_size))
        batch: dict[str, Any] = {name: torch.as_tensor(rows[name]).to(device) for name in rows}
        passing.join([batch], number)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = model(
                input_ids=batch["input_ids"], labels=batch["labels"], aligned=True, num_items_in_batch=1,
                past_key_values=batch["chains"].cache,
            )  # fmt: skip
        passing.leave(batch, out.logits)
        update(model, optimizer, out.loss / (32 * batch_size), max_norm=0.25)
        solved = {} if out.solver_stats is None else {"f_evaluations": out.solver_stats.f_evaluations.mean()}
        found.append(
            {
                **solved,
                "accuracy": (out.logits.argmax(-1) == batch["labels"]).float().mean(),
                "carried": (batch["chains"].product_B != 0).float().mean(),
                "loss": out.loss.detach() / (32 * batch_size),
            }
        )

    times_ms = [milliseconds(lambda number=number: step(number)) for number in range(CHAIN)][WARM_UP:]
    start_s = time.perf_counter()
    for number in range(CHAIN):
        step(number)
    float(found[-1]["loss"])
    queued_ms = 1e3 * (time.perf_counter() - start_s) / CHAIN
    if options.profile:
        show_profile(lambda: step(0), options.profile)
    means = {key: float(torch.stack([row[key] for row in found]).mean()) for key in found[0]}
    return {**spread(times_ms, "ms"), "ms_of_a_chain": queued_ms, **means}


def evaluation(options: argparse.Namespace) -> dict[str, Any]:
    model = trained().eval()
    length, sequences = (options.length, options.sequences) if HAS_GPU else (64, 4)
    if not options.graphs:
        model.base.runner = Runner()

    def evaluate(length: int) -> dict[str, Any]:
        data = Words(length, sequences, "test")
        job = EvaluationJob(model, data, sequences, EvaluationBatchSize(sequences), "evaluation", options.precision)
        return evaluate_word_problem(job).values

    evaluate(min(256, length))  # compiles and captures
    start_s = time.perf_counter()
    values = evaluate(length)
    seconds = time.perf_counter() - start_s
    kept = ("accuracy_last10", "f_evaluations_per_token", "unconverged_share")
    return {"seconds": seconds, "ms_a_block": 1e3 * seconds / (length // 8), **{name: values[name] for name in kept}}


ROWS = {"training": training, "explicit": explicit, "evaluation": evaluation}

if __name__ == "__main__":
    main()
