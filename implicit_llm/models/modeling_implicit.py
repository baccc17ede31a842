"""Import the classes of implicit-llm. Each saved model has a copy of this file, which `trust_remote_code=True` runs."""

from implicit_llm import (
    ImplicitLlama3Config,
    ImplicitLlama3ForCausalLM,
    ImplicitLlama3Model,
    ImplicitMamba2Config,
    ImplicitMamba2ForCausalLM,
    ImplicitMamba2Model,
)

__all__ = [
    "ImplicitLlama3Config",
    "ImplicitLlama3ForCausalLM",
    "ImplicitLlama3Model",
    "ImplicitMamba2Config",
    "ImplicitMamba2ForCausalLM",
    "ImplicitMamba2Model",
]
