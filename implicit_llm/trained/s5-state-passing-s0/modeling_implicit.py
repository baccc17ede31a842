"""Import the classes of the package implicit-llm, so that `trust_remote_code=True` finds them in a model's folder."""

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
