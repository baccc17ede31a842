"""Small real models and token rows for tests of the evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

import implicit_llm

VOCAB = 12


class Rows:
    """Rows of random tokens, with further columns on request."""

    vocab_size = VOCAB

    def __init__(self, num_rows: int = 7, length: int = 12, **columns: np.ndarray) -> None:
        self.length = length
        rows = np.random.default_rng(0).integers(0, VOCAB, (num_rows, length))
        self.columns: dict[str, np.ndarray] = {"input_ids": rows, "labels": rows} | columns

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: column[indices] for name, column in self.columns.items()}


def small_model(kind: str) -> Any:
    """An untrained model, implicit, explicit or gpt_neox, with sharpened outputs, so that losses differ by token."""
    torch.manual_seed(0)
    config: Any
    if kind == "gpt_neox":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config = GPTNeoXConfig(vocab_size=VOCAB, max_position_embeddings=64, **sizes)
    else:
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "expand": 2, "head_dim": 8, "state_size": 8}
        config = implicit_llm.load_config(f"mamba2-state-tracking-{kind}", **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30)
    return model
