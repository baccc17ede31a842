"""Read models in the layout of the published code, which has a nested config.json and other weight names.

The weights may be safetensors or pytorch_model.bin. Saving such a model writes our own layout, called clean here.
Source of the format: microsoft/implicit_languagemodels at commit 84a0bf3.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from implicit_llm.models.errors import ModelConfigError

SHARED_RENAMES = (
    (r"^word_emb\.emb\.", "backbone.embeddings."),
    (r"^backbone\.injection\.", "backbone.injection.proj."),
    (r"^backbone\.injection_norm\.", "backbone.injection.norm."),
    (r"\.weight_([gv])$", r".\1"),
)
LLAMA3_RENAMES = (
    (r"^backbone\.embeddings\.", "model.embed_tokens."),
    (r"^backbone\.norm_f\.", "model.norm."),
    (r"^backbone\.", "model."),
    (r"\.mixer\.w([qkv])\.", r".self_attn.\1_proj."),
    (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.w1\.", ".mlp.gate_proj."),
    (r"\.mlp\.w3\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
    (r"(layers\.\d+)\.norm2\.", r"\1.post_attention_layernorm."),
)


def is_published(config: dict[str, Any]) -> bool:
    """Return whether a config.json is in the published layout."""
    return "backbone_config" in config


def clean_config(published: dict[str, Any]) -> dict[str, Any]:
    """Return our fields for a published config.json, with the stopping criteria of the released code.

    Raises: ModelConfigError if rms_norm, pre_norm, head_bias or d_embed has a value that no published model has.
    """
    backbone = published["backbone_config"]
    block = backbone.get("block_cfg", {})
    is_implicit = published["backbone_type"] == "implicit"
    is_known = backbone.get("rms_norm", True) and backbone.get("pre_norm", True) and not published.get("head_bias")
    if not is_known or published.get("d_embed", backbone["d_model"]) != backbone["d_model"]:
        raise ModelConfigError(
            "backbone_config: rms_norm and pre_norm must be true, head_bias false, and d_embed equal to d_model, as in "
            "every published model"
        )
    multiple = published.get("pad_vocab_size_multiple", 1) if published.get("pad_vocab") else 1
    vocab_size = -(-published["vocab_size"] // multiple) * multiple
    clean: dict[str, Any] = {
        "model_type": published["model_type"],
        "vocab_size": vocab_size,
        "hidden_size": backbone["d_model"],
        "num_hidden_layers": backbone["n_layer"],
        "is_implicit": is_implicit,
        "weight_norm": is_implicit and published["deq_params"].get("norm", {}).get("norm_type") == "weight_norm",
        "dropout": backbone.get("dropout", 0.0),
        "initializer_range": published.get("emb_init_std", 0.02),
        "tie_word_embeddings": published.get("tie_embeddings", True),
        "dtype": published.get("torch_dtype", "float32"),
        "solver": published_solver(published) if is_implicit else None,
    }
    if published["model_type"] == "implicit_mamba2":
        clean |= {
            "expand": block.get("expand", 2),
            "state_size": block.get("d_state", 128),
            "head_dim": block.get("headdim", 64),
        }
    else:
        # SwiGLU width of the published Llama: two thirds of the inner width, rounded down.
        clean |= {"num_attention_heads": block["n_head"], "intermediate_size": int(2 / 3 * backbone["d_inner"])}
    return clean


def published_solver(published: dict[str, Any]) -> dict[str, Any]:
    """Return the solver settings of a published config, with the stopping criteria of the released code."""
    solver, training = published["deq_params"]["solver"], published["deq_params"]["training"]
    budget = solver.get("eval_f_max_iter") or int(solver.get("eval_factor", 4.0) * solver["f_max_iter"])
    return {
        "mode": "fixed_point",
        "num_unroll": published["backbone_config"].get("pretrain_iter", 4),
        "max_iter": solver["f_max_iter"],
        "tol": solver["f_tol"],
        "stop": "batch",
        "phantom_steps": training["grad"],
        "tau": training["tau"],
        "eval_mode": "simultaneous",
        "eval_max_iter": budget,
        "eval_stop": "batch",
    }


def clean_name(name: str, model_type: str) -> str:
    """Return our name for a parameter of a published model."""
    for pattern, replacement in SHARED_RENAMES + (LLAMA3_RENAMES if model_type == "implicit_llama3" else ()):
        name = re.sub(pattern, replacement, name)
    return name


def read_published_weights(directory: Path, model_type: str, *, use_safetensors: bool = False) -> dict[str, Tensor]:
    """Return the weights in a directory of the published layout by our names; code in a pickle never runs.

    Safetensors take precedence over a pickle, and in each format a single file over shards.
    Args: use_safetensors: whether to accept only safetensors and no pickle.
    Raises: FileNotFoundError, which names the expected files; ModelConfigError for an index with files outside the
        folder, for a damaged file, and for a pickle that has anything but tensors.
    """
    names = ("model.safetensors",) if use_safetensors else ("model.safetensors", "pytorch_model.bin")
    for name in names:
        index = directory / f"{name}.index.json"
        if (directory / name).exists():
            files = [name]
        elif index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if foreign := [file for file in files if Path(file).name != file]:
                raise ModelConfigError(
                    f"{index}: names {foreign[0]!r}, which is no file of this folder; fetch it again"
                )
        else:
            continue
        read = read_safetensors if name.endswith(".safetensors") else read_pickle  # shards have the format of `name`
        weights = (item for file in files for item in read(directory / file).items())
        return {clean_name(key, model_type): value for key, value in weights}
    raise FileNotFoundError(f"{directory}: no {' and no '.join(names)} is there, nor an .index.json of it")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors by name, on the CPU. Raises: ModelConfigError if the file is damaged; OSError if missing."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelConfigError(f"{path}: is damaged ({error}); fetch it again") from error


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors by name, on the CPU; code in the file does not run.

    Raises: ModelConfigError if the file contains anything else or is damaged; OSError if it cannot be opened.
    """
    refusal = ModelConfigError(
        f"{path}: cannot be read with weights_only: it is damaged, or holds more than tensors by name; fetch it again, "
        "or give safetensors"
    )
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # KeyError, struct.error, ...: the class depends on the damage
        raise refusal from error
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in weights.items()
    ):
        raise refusal
    return weights
