"""The output of a model token by token, whatever its evaluation mode is set to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from implicit_llm.models.causal_lm import ImplicitCausalLMOutput, ImplicitForCausalLM


def sequential_forward(model: ImplicitForCausalLM, input_ids: Tensor, **kwargs: Any) -> ImplicitCausalLMOutput:
    """`model(input_ids, ...)` in sequential mode: each token solved to convergence, only converged state carried.

    The model must be in evaluation mode; its solver is the same afterwards. An explicit model has one mode only.
    """
    solver = model.solver
    if solver is None:
        return model(input_ids, **kwargs)
    if model.training:
        raise ValueError("sequential mode is an evaluation mode; call model.eval() first")
    model.solver = replace(solver, eval_mode="sequential")
    try:
        return model(input_ids, **kwargs)
    finally:
        model.solver = solver
