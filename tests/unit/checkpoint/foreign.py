"""Small checkpoints of other makers, for tests."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Mamba2Config

from implicit_llm.checkpoint import stage
from implicit_llm_jobs.stage import run_stage
from tests.unit.evaluation.finished_runs import request

VOCAB = 40
SIZES: dict[str, int] = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2}
ATTENTION: dict[str, int] = {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 256}


def mamba2_config(**changes: Any) -> Mamba2Config:
    return Mamba2Config(**SIZES | {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1} | changes)


CONFIGS: dict[str, Any] = {
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, **ATTENTION),
    "llama": lambda: LlamaConfig(**SIZES, **ATTENTION),
    "mamba2": mamba2_config,
}


def save_foreign(kind: str, folder: Path, *, vocab_size: int | None = None, **how: Any) -> Any:
    """An untrained model of transformers, saved there with sharpened outputs; returned in evaluation mode.

    kind: one of CONFIGS, or "original" for `save_original_mamba2`.
    """
    if kind == "original":
        return save_original_mamba2(folder)
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config.vocab_size = vocab_size or config.vocab_size
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30)
    model.save_pretrained(folder, **how)
    return model


def write_original_mamba2(model: Any, folder: Path, *, is_pickle: bool = False, **changes: Any) -> None:
    """The weights of transformers' model, in the layout of the original Mamba2 release."""
    weights = {name.replace("embeddings.", "embedding."): value.clone() for name, value in model.state_dict().items()}
    config = {"d_model": 16, "n_layer": 2, "vocab_size": VOCAB, "pad_vocab_size_multiple": 8, "tie_embeddings": False}
    block = {"layer": "Mamba2", "d_state": 8, "headdim": 8}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"ssm_cfg": block} | changes))
    if is_pickle:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")


def save_original_mamba2(folder: Path, *, is_pickle: bool = False) -> Any:
    """As `save_foreign`, in that layout; returned is transformers' model with these weights."""
    model = save_foreign("mamba2", folder / "unused")
    write_original_mamba2(model, folder, is_pickle=is_pickle)
    return model


def import_checkpoint(folder: Path, **config: Any) -> Path:
    """Run the stage in `folder`, by default on what is in `source` there; returns the run directory."""
    if "hub" not in config:
        config = {"path": str(folder / "source")} | config
    asked = request(folder / "run", "checkpoint", "peer", config, {})
    asked.runtime["downloads"] = folder / "downloads"
    run_stage(asked, stage.run)
    return folder / "run"
