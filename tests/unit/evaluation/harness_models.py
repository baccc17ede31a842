"""Small models and requests for tests of the harness, in the vocabulary of a tokenizer of bytes."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import implicit_llm
from implicit_llm_contracts.runs.task_folders import TASK_FOLDERS

END_OF_TEXT = "<|endoftext|>"
VOCAB = 257
LOCAL_TASKS = ("local_last_word", "local_continuation", "local_cloze")
LOCAL_FOLDER = TASK_FOLDERS / "local"
_SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 16, "expand": 2, "head_dim": 8, "state_size": 8},
    "llama3": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
}


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; the first one ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {END_OF_TEXT: 0} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_in(folder: Path) -> list[str]:
    """Write a tokenizer.json, as a data job leaves it; its name."""
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return ["tokenizer.json"]


def harness_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END_OF_TEXT)


def harness_model(family: str, kind: str = "implicit", **solver: Any) -> Any:
    """An untrained model with sharpened outputs, so that answers differ; `solver` changes its evaluation."""
    torch.manual_seed(0)
    name = f"mamba2-state-tracking-{kind}" if family == "mamba2" else f"llama3-130m-{kind}"
    config = implicit_llm.load_config(name, vocab_size=VOCAB, **_SIZES[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    if kind == "implicit":
        model.solver = dataclasses.replace(model.solver, **{"eval_max_iter": 24, "eval_block_len": 8} | solver)
    return model


def requests(count: int = 12, task: str = "task") -> list[Any]:
    """Requests of three lengths, the last two of which differ in their last token only."""
    texts = ["def read(self):", "return None", "for key in self._data:"]
    pairs = [(texts[i % 3], f" {chr(97 + i)}{chr(122 - i)}{chr(97 + i)}") for i in range(count - 2)]
    pairs += [("if x is", " A"), ("if x is", " B")]
    return [SimpleNamespace(args=pair, task_name=task) for pair in pairs]
