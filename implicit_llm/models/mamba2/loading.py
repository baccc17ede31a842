"""Convert Mamba2 models of transformers and checkpoints of the original release (state-spaces/mamba2-*) to our models.

The config.json of the original release has no model_type. The weights are a pickle, pytorch_model.bin, which is loaded
only as tensors and only if the caller gives its sha256. A model.safetensors with the same names needs no digest.
Source of the format: state-spaces/mamba: models/config_mamba.py, models/mixer_seq_simple.py, modules/mamba2.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from implicit_llm.models.causal_lm import ImplicitForCausalLM, sharing_weights
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.mamba2.model import ImplicitMamba2Config, ImplicitMamba2ForCausalLM
from implicit_llm.models.published import read_pickle, read_safetensors
from implicit_llm_contracts.runs.atomic import read_object
from implicit_llm_contracts.runs.fetched_files import CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE
from implicit_llm_contracts.runs.manifest import sha256_of

# Settings of transformers' models that we do not copy, each with the only value for which their layer equals ours.
FIXED_OF_TRANSFORMERS = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
    "n_groups": 1,
    "time_step_limit": (0.0, float("inf")),
}
TAKEN = ("expand", "state_size", "head_dim", "conv_kernel", "layer_norm_epsilon")
DEFAULT_PAD_MULTIPLE = 8

# Settings of the original, each with the only value for which its layer equals ours. Unknown settings are refused.
FIXED = {
    "ssm_cfg.layer": "Mamba2",
    "ssm_cfg.ngroups": 1,
    "ssm_cfg.d_ssm": None,
    "ssm_cfg.D_has_hdim": False,
    "ssm_cfg.rmsnorm": True,
    "ssm_cfg.norm_before_gate": False,
    "ssm_cfg.bias": False,
    "ssm_cfg.conv_bias": True,
    "ssm_cfg.dt_limit": [0.0, float("inf")],
    "d_intermediate": 0,
    "attn_layer_idx": [],
    "rms_norm": True,
}
# Sizes, which we copy, and settings that affect only the initialisation and speed of the original.
FREE = frozenset({"d_state", "d_conv", "expand", "headdim", "A_init_range", "dt_min", "dt_max", "dt_init_floor"})
FREE |= {"conv_init", "chunk_size", "use_mem_eff_path"}
# Such settings outside ssm_cfg, and keys that transformers may have added to the file.
FREE_OUTSIDE = frozenset({"d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple", "tie_embeddings", "ssm_cfg"})
FREE_OUTSIDE |= {"attn_cfg", "residual_in_fp32", "fused_add_norm", "torch_dtype", *PreTrainedConfig().to_dict()}
FREE_OUTSIDE |= {"bos_token_id", "eos_token_id", "pad_token_id"}


def from_mamba2(model: PreTrainedModel) -> ImplicitForCausalLM:
    """Convert a `Mamba2ForCausalLM` of transformers to an explicit model of this package with the same outputs.

    The two models share their weights: changing one changes the other. The new model starts in the mode of `model`,
    which is evaluation mode after `from_pretrained`. `load_original_mamba2` loads checkpoints of the original release.
    Raises: ModelConfigError for another class, and for a setting that our layers do not support.
    """
    if model.config.model_type != "mamba2" or not hasattr(model, "lm_head"):
        raise ModelConfigError(f"from_mamba2 takes a Mamba2ForCausalLM, got {type(model).__name__}; load one")
    return sharing_weights(model, ImplicitMamba2ForCausalLM, FIXED_OF_TRANSFORMERS, TAKEN)


class UntrustedCheckpoint(ModelConfigError):
    """The weights are a pickle, and the caller gave no sha256; the message has that of the file."""


def is_original_mamba2(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is from the original release, of Mamba or Mamba2."""
    return "model_type" not in config and {"d_model", "n_layer", "ssm_cfg"} <= config.keys()


def original_config(config: Mapping[str, Any]) -> ImplicitMamba2Config:
    """Convert a configuration of the original release to ours.

    Raises: ModelConfigError for an unknown setting or one that our layers do not support, and without vocab_size.
    """
    block = config["ssm_cfg"]
    settings = {key: value for key, value in config.items() if key not in FREE_OUTSIDE}
    settings |= {f"ssm_cfg.{key}": value for key, value in {"layer": "Mamba1", **block}.items() if key not in FREE}
    for key, value in settings.items():
        if key not in FIXED:
            raise ModelConfigError(f"{key}: {value!r} is unknown and may give another layer than ours; remove the key")
        if value != FIXED[key]:
            raise ModelConfigError(f"{key}: {value!r} gives another layer than ours; give another checkpoint")
    if config.get("vocab_size") is None:
        raise ModelConfigError("vocab_size: is missing; fetch config.json again")
    multiple = config.get("pad_vocab_size_multiple", DEFAULT_PAD_MULTIPLE)
    return ImplicitMamba2Config(
        is_implicit=False,
        weight_norm=False,
        vocab_size=-(-config["vocab_size"] // multiple) * multiple,
        hidden_size=config["d_model"],
        num_hidden_layers=config["n_layer"],
        expand=block.get("expand", 2),
        state_size=block.get("d_state", 128),
        head_dim=block.get("headdim", 64),
        conv_kernel=block.get("d_conv", 4),
        tie_word_embeddings=config.get("tie_embeddings", True),
    )


def load_original_mamba2(directory: Path | str, sha256: str | None = None) -> ImplicitForCausalLM:
    """Load an explicit model of the original release from a directory, in fp32 and in evaluation mode.

    Args: sha256 is the hexadecimal digest of pytorch_model.bin; it has no effect if there is a model.safetensors.
    Raises: UntrustedCheckpoint if the weights are a pickle and `sha256` is None; ModelConfigError if digest, settings
        or weights do not match, or if config.json or the weights are missing or damaged.
    """
    directory = Path(directory)
    settings = read_object(directory / CONFIG_FILE)
    if not is_original_mamba2(settings):
        raise ModelConfigError(f"{directory / CONFIG_FILE}: is missing, or not that of an original Mamba")
    config = original_config(settings)
    # All parameters except the embedding have our names, and in_proj has the same order (z, x, B, C, dt).
    weights = {
        re.sub(r"^backbone\.embedding\.", "backbone.embeddings.", name): value.float()
        for name, value in _read_weights(directory, sha256).items()
    }
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if config.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights.get("backbone.embeddings.weight", torch.empty(0)))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelConfigError(f"{directory}: config.json and weights do not belong together: {reason}") from error
    return model.eval()


def _read_weights(directory: Path, sha256: str | None) -> dict[str, Tensor]:
    if (directory / WEIGHTS_FILE).is_file():
        return read_safetensors(directory / WEIGHTS_FILE)
    path = directory / PICKLE_FILE
    if not path.is_file():
        raise ModelConfigError(f"{directory}: neither {WEIGHTS_FILE} nor {PICKLE_FILE} is there")
    found = sha256_of(path)
    if sha256 is None:
        raise UntrustedCheckpoint(f"{path}: is a pickle; vouch for it by its sha256, {found}")
    if found != sha256:
        raise ModelConfigError(f"{path}: expected sha256 {sha256}, found {found}; fetch the file again")
    return read_pickle(path)
