"""Models that start from the weights of others: from Llama and Mamba2 of transformers, and implicit from explicit."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from implicit_llm.models.causal_lm import ImplicitForCausalLM, ImplicitLlama3ForCausalLM, ImplicitMamba2ForCausalLM
from implicit_llm.models.configuration import ImplicitConfig, ImplicitLlama3Config, ImplicitMamba2Config
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.layers import NormedWeight, gain_of
from implicit_llm_contracts.config.solver import SolverConfig

# Settings of transformers' models that our blocks lack, each with the only value that gives the same layer.
FIXED_LLAMA = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
FIXED_MAMBA2 = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
    "n_groups": 1,
    "time_step_limit": (0.0, float("inf")),
}
TAKEN = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "tie_word_embeddings",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
TAKEN_LLAMA = (
    *TAKEN,
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
TAKEN_MAMBA2 = (*TAKEN, "expand", "state_size", "head_dim", "conv_kernel", "layer_norm_epsilon")


def from_llama(model: PreTrainedModel) -> ImplicitForCausalLM:
    """Convert a `LlamaForCausalLM` of transformers to an explicit model of this package with the same outputs.

    The two share their weights: changing one changes the other. `to_implicit` makes an implicit model of it.

    Raises: ModelConfigError for a setting that our block does not support.
    """
    theirs = model.config
    if theirs.model_type != "llama" or not hasattr(model, "lm_head"):
        raise ModelConfigError(f"from_llama takes a LlamaForCausalLM, got {type(model).__name__}; load one")
    _require(theirs, FIXED_LLAMA)
    rope = {key: value for key, value in theirs.rope_parameters.items() if key != "type"}
    theta, is_plain = rope.pop("rope_theta"), rope.get("rope_type") == "default"
    if rope.pop("partial_rotary_factor", 1.0) != 1:
        raise ModelConfigError("partial_rotary_factor: only 1 is supported; use another checkpoint")
    fields = {key: getattr(theirs, key) for key in TAKEN_LLAMA}
    config = ImplicitLlama3Config(
        is_implicit=False, rope_theta=theta, rope_scaling=None if is_plain else rope, dtype=model.dtype, **fields
    )
    return _with_weights_of(model, ImplicitLlama3ForCausalLM, config)


def from_mamba2(model: PreTrainedModel) -> ImplicitForCausalLM:
    """Convert a `Mamba2ForCausalLM` of transformers, as `from_llama` does a Llama.

    `load_original_mamba2` reads the checkpoints of the original release. Raises: ModelConfigError.
    """
    theirs = model.config
    if theirs.model_type != "mamba2" or not hasattr(model, "lm_head"):
        raise ModelConfigError(f"from_mamba2 takes a Mamba2ForCausalLM, got {type(model).__name__}; load one")
    _require(theirs, FIXED_MAMBA2)
    fields = {key: getattr(theirs, key) for key in TAKEN_MAMBA2}
    config = ImplicitMamba2Config(is_implicit=False, dtype=model.dtype, **fields)
    return _with_weights_of(model, ImplicitMamba2ForCausalLM, config)


FROM_TRANSFORMERS = {"llama": from_llama, "mamba2": from_mamba2}


def _require(theirs: Any, fixed: Mapping[str, Any]) -> None:
    """Raises: ModelConfigError for a setting that gives another layer than ours."""
    for key, wanted in fixed.items():
        found = getattr(theirs, key)
        if (tuple(found) if isinstance(found, list) else found) != wanted:
            raise ModelConfigError(f"{key}: {found!r} is not supported, only {wanted!r}; use another checkpoint")


def _with_weights_of(
    model: PreTrainedModel, cls: type[ImplicitForCausalLM], config: ImplicitConfig
) -> ImplicitForCausalLM:
    """A model of ours that shares the weights of `model`, which have the same names."""
    with torch.device("meta"):
        ours = cls(config)
    ours.load_state_dict(model.state_dict(), assign=True)
    ours.tie_weights()
    ours.generation_config = model.generation_config
    return ours.train(model.training)


@torch.no_grad()
def to_implicit(model: PreTrainedModel, solver: SolverConfig | Mapping[str, Any] | None = None) -> ImplicitForCausalLM:
    """A new implicit model with the layers of an explicit one, ours or a Llama or Mamba2 of transformers.

    The injection is newly initialised.

    Weight normalisation splits each weight into g = ||v|| and v, so every layer computes what it did; the model as a
    whole does not, since its layers now read the fixed point instead of the embedding. Train it.

    Raises: TypeError for a model of another family; ModelConfigError; ValueError if it is implicit already.
    """
    if not isinstance(model, ImplicitForCausalLM):
        convert = FROM_TRANSFORMERS.get(getattr(model.config, "model_type", ""))
        if convert is None:
            raise TypeError(
                f"to_implicit takes an explicit model of implicit_llm, or a Llama or Mamba2 of transformers, got "
                f"{type(model).__name__}; give one of these"
            )
        model = convert(model)
    if model.config.is_implicit:
        raise ValueError("the model is implicit already; assign model.solver to change how it is solved")
    values = model.config.to_dict() | {
        "is_implicit": True,
        "weight_norm": True,
        "solver": solver or SolverConfig(),
    }
    implicit = type(model)(type(model.config)(**values))
    implicit.to(device=model.device, dtype=model.dtype)  # type: ignore[call-arg]  # transformers' wrapper loses its self
    weights = model.state_dict()
    for name, module in implicit.named_modules():
        if isinstance(module, NormedWeight) and (weight := weights.pop(f"{name}.weight", None)) is not None:
            weights |= {f"{name}.v": weight, f"{name}.g": gain_of(weight)}
    implicit.load_state_dict(weights, strict=False)
    implicit.generation_config = copy.deepcopy(model.generation_config)
    return implicit
