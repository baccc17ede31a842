"""Saved beside a model, so that `trust_remote_code=True` finds its classes: the code is the package implicit-llm."""

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
