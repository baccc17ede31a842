"""Turning an explicit model into an implicit one that starts from its weights."""

from __future__ import annotations

import torch
from torch import nn

from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.models.projection import NormedWeight
from implicit_llm.solver.config import SolverConfig


@torch.no_grad()
def to_implicit(model: ImplicitForCausalLM, solver: SolverConfig | None = None) -> ImplicitForCausalLM:
    """A new implicit model with the layers of an explicit one; the injection is newly initialised.

    Weight normalisation splits each weight into g = ||v|| and v, so every layer computes what it did; the model as a whole
    does not, since its layers now read the fixed point instead of the embedding. Train it.

    Raises: ValueError if the model is implicit already.
    """
    if model.config.is_implicit:
        raise ValueError("the model is implicit already; assign model.solver to change how it is solved")
    values = model.config.to_dict() | {
        "is_implicit": True,
        "weight_norm": True,
        "solver": (solver or SolverConfig()).to_dict(),
    }
    implicit = type(model)(type(model.config)(**values)).to(device=model.device, dtype=model.dtype)
    theirs = dict(model.named_modules())
    for name, module in implicit.named_modules():
        if name not in theirs:
            continue
        if isinstance(module, NormedWeight):
            _split(module, theirs[name])
        for key, parameter in module.named_parameters(recurse=False):
            source = getattr(theirs[name], key, None)
            if isinstance(source, nn.Parameter):
                parameter.copy_(source)
    return implicit


def _split(target: NormedWeight, source: nn.Module) -> None:
    weight = source.weight if not source.is_normed else source.effective_weight()
    target.v.copy_(weight)
    dims = tuple(range(1, weight.ndim))
    target.g.copy_(torch.linalg.vector_norm(weight, dim=dims, keepdim=True))
