"""The local tasks: their files are the generator's, and knowing the text they imitate is what helps."""

from __future__ import annotations

import argparse
import inspect
import subprocess
from collections import defaultdict
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.tasks._yaml_loader import _import_func_in_yml
from torch import Tensor

from implicit_llm.evaluation.lm_eval_harness.model import ImplicitLM
from implicit_llm.evaluation.lm_eval_harness.tasks import load_tasks
from implicit_llm_contracts.config.evaluation import LmEvalConfig
from tests.unit.evaluation.harness_models import LOCAL_FOLDER, VOCAB, harness_model, harness_tokenizer

ORDER = 6  # bytes that a count looks back


class Reader(torch.nn.Module):
    """Predicts the next byte from how often it followed the longest known end of what was read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="reader", max_position_embeddings=2048)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.log_shares = cache(self._log_shares)
        self.device = torch.device("cpu")
        tokens = harness_tokenizer()(text)["input_ids"]
        self.counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for index, token in enumerate(tokens):
            for order in range(min(index, ORDER) + 1):
                self.counts[tuple(tokens[index - order : index])][token] += 1

    def tie_weights(self) -> None:
        """It has none."""

    def forward(self, input_ids: Tensor) -> Any:
        ends = [[tuple(row[max(0, at - ORDER) : at]) for at in range(1, len(row) + 1)] for row in input_ids.tolist()]
        rows = [[self.log_shares(end) for end in of_row] for of_row in ends]
        return SimpleNamespace(logits=torch.stack([torch.stack(row) for row in rows]))

    def _log_shares(self, before: tuple[int, ...]) -> Tensor:
        shares = torch.full((VOCAB,), 1 / VOCAB)
        for order in range(ORDER + 1):
            counts = self.counts.get(before[len(before) - order :]) if order <= len(before) else None
            if counts:
                seen = torch.zeros(VOCAB)
                seen[list(counts)] = torch.tensor([float(count) for count in counts.values()])
                shares = (seen + 2 * shares) / (seen.sum() + 2)
        return shares.log()


def scores(model: Any, task: str) -> dict[str, float]:
    tasks = load_tasks(LmEvalConfig("lm_eval", (), (task,), task_path="local"))
    results = evaluate(ImplicitLM(model, harness_tokenizer()), {"tasks": tasks}, bootstrap_iters=0)
    assert results is not None
    return {key.partition(",")[0]: value for key, value in results["results"][task].items() if ",none" in key}


@pytest.fixture(scope="module")
def reader() -> Reader:
    """It has read some of the library that the documents imitate, and none of the documents."""
    return Reader("".join(inspect.getsource(module) for module in (argparse, subprocess, inspect))[:60_000])


@pytest.mark.parametrize(("task", "chance"), [("local_continuation", 0.25), ("local_cloze", 0.5)])
def test_an_untrained_model_is_at_chance_and_one_that_read_the_library_above(
    reader: Reader, task: str, chance: float
) -> None:
    untrained = scores(harness_model("llama3", "explicit"), task)
    spread = (chance * (1 - chance) / 64) ** 0.5
    assert all(abs(untrained[metric] - chance) < 3 * spread for metric in untrained if "stderr" not in metric)
    assert scores(reader, task)["acc"] > chance + 4 * spread


def test_the_last_word_is_less_of_a_surprise_to_a_model_that_read_the_library(reader: Reader) -> None:
    untrained, read = (scores(model, "local_last_word") for model in (harness_model("llama3", "explicit"), reader))
    assert read["perplexity"] < 0.01 * untrained["perplexity"]


def test_the_documents_are_those_that_their_generator_writes() -> None:
    text_of = _import_func_in_yml("documents.text_of", LOCAL_FOLDER)
    for name in ("last_word", "continuation", "cloze"):
        assert (LOCAL_FOLDER / f"{name}.jsonl").read_text(encoding="utf-8") == text_of(name)
