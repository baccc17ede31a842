"""Turning an explicit model into an implicit one that starts from its weights."""

from __future__ import annotations

import torch
from torch import nn

from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.models.projection import NormedWeight, gain_of
from implicit_llm_contracts.config.solver import SolverConfig


@torch.no_grad()
def to_implicit(model: ImplicitForCausalLM, solver: SolverConfig | None = None) -> ImplicitForCausalLM:
    """A new implicit model with the layers of an explicit one; the injection is newly initialised.

    Weight normalisation splits each weight into g = ||v|| and v, so every layer computes what it did; the model as a
    whole does not, since its layers now read the fixed point instead of the embedding. Train it.

    Raises: TypeError for a model of another package; ValueError if it is implicit already.
    """
    if not isinstance(model, ImplicitForCausalLM):
        raise TypeError(
            f"to_implicit takes an explicit model of implicit_llm, got {type(model).__name__}: make one with "
            "AutoModelForCausalLM.from_config(implicit_llm.load_config('llama3-130m-explicit', ...)) and load the "
            "weights into it"
        )
    if model.config.is_implicit:
        raise ValueError("the model is implicit already; assign model.solver to change how it is solved")
    values = model.config.to_dict() | {
        "is_implicit": True,
        "weight_norm": True,
        "solver": (solver or SolverConfig()).to_dict(),
    }
    implicit = type(model)(type(model.config)(**values))
    implicit.to(device=model.device, dtype=model.dtype)  # type: ignore[call-arg]  # transformers' wrapper loses its self
    theirs = dict(model.named_modules())
    for name, module in implicit.named_modules():
        source = theirs.get(name)
        if source is None:
            continue
        if isinstance(module, NormedWeight) and isinstance(source, NormedWeight):
            _split(module, source)
        for key, parameter in module.named_parameters(recurse=False):
            value = getattr(source, key, None)
            if isinstance(value, nn.Parameter):
                parameter.copy_(value)
    return implicit


def _split(target: NormedWeight, source: NormedWeight) -> None:
    weight = source.effective_weight() if source.is_normed else source.weight
    target.v.copy_(weight)
    target.g.copy_(gain_of(weight))
