"""Makes the model types known to Hugging Face's Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from implicit_llm.models.backbone import ImplicitLlama3Model, ImplicitMamba2Model
from implicit_llm.models.causal_lm import ImplicitLlama3ForCausalLM, ImplicitMamba2ForCausalLM
from implicit_llm.models.configuration import ImplicitLlama3Config, ImplicitMamba2Config
from implicit_llm.models.lstm import LstmConfig, LstmForCausalLM

FAMILIES = (
    (ImplicitMamba2Config, ImplicitMamba2Model, ImplicitMamba2ForCausalLM),
    (ImplicitLlama3Config, ImplicitLlama3Model, ImplicitLlama3ForCausalLM),
)


def register_implicit_causal_lm() -> None:
    """Register implicit_mamba2, implicit_llama3 and the baseline lstm with the Auto classes; idempotent."""
    for config_class, model_class, causal_lm_class in FAMILIES:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, model_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, causal_lm_class, exist_ok=True)
    AutoConfig.register(LstmConfig.model_type, LstmConfig, exist_ok=True)
    AutoModelForCausalLM.register(LstmConfig, LstmForCausalLM, exist_ok=True)
