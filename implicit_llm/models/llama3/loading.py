"""Convert Llama models of transformers to explicit models of this package."""

from transformers import PreTrainedModel

from implicit_llm.models.causal_lm import ImplicitForCausalLM, sharing_weights
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.llama3.model import ImplicitLlama3ForCausalLM

# Settings of transformers' models that our block lacks, each with the only value for which their layer equals ours.
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
TAKEN = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


def from_llama(model: PreTrainedModel) -> ImplicitForCausalLM:
    """Convert a `LlamaForCausalLM` of transformers to an explicit model of this package with the same outputs.

    The two models share their weights: changing one changes the other. The new model starts in the mode of `model`,
    which is evaluation mode after `from_pretrained`. `to_implicit` converts the result to an implicit model.

    Raises: ModelConfigError for another class, and for a setting that our block does not support.
    """
    theirs = model.config
    if theirs.model_type != "llama" or not hasattr(model, "lm_head"):
        raise ModelConfigError(f"from_llama takes a LlamaForCausalLM, got {type(model).__name__}; load one")
    rope = {key: value for key, value in theirs.rope_parameters.items() if key != "type"}
    theta, is_plain = rope.pop("rope_theta"), rope.get("rope_type") == "default"
    if rope.pop("partial_rotary_factor", 1.0) != 1:
        raise ModelConfigError("partial_rotary_factor: only 1 is supported; use another checkpoint")
    fields = {"rope_theta": theta, "rope_scaling": None if is_plain else rope}
    return sharing_weights(model, ImplicitLlama3ForCausalLM, FIXED, TAKEN, **fields)
