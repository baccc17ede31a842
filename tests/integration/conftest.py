"""A small saved model and its tokenizer."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import implicit_llm

SMALL = {
    "mamba2": {"head_dim": 16, "state_size": 16},
    "llama3": {"num_attention_heads": 2, "intermediate_size": 48},
}


@pytest.fixture
def folder(tmp_path: Path, family: str) -> Path:
    """A saved model of 32 words with its tokenizer."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", bos_token="w2")
    config = implicit_llm.load_config(
        f"{family}-130m-implicit", hidden_size=32, num_hidden_layers=1, vocab_size=32,
        solver={"max_iter": 4, "tol": 0.01}, pad_token_id=0, eos_token_id=1, bos_token_id=2, **SMALL[family],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"
