"""The output of a model token by token, whatever its evaluation mode is set to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from implicit_llm.models.causal_lm import ImplicitCausalLMOutput, ImplicitForCausalLM


def sequential_forward(model: ImplicitForCausalLM, input_ids: Tensor, **kwargs: Any) -> ImplicitCausalLMOutput:
    """`model(input_ids, ...)` in sequential mode: each token solved to convergence, only converged state carried.

    The model must be in evaluation mode. An explicit model has one mode only.
    """
    return model(input_ids, eval_mode=None if model.solver is None else "sequential", **kwargs)
