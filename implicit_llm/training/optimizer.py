"""AdamW as the recipe wants it."""

from __future__ import annotations

from torch import Tensor, nn, optim

from implicit_llm_contracts.config.training import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> optim.AdamW:
    """AdamW on all trainable parameters, fused where the device can; weight decay on matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if is_matrix(parameter)], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if not is_matrix(parameter)], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    try:  # the schedule sets the rate
        return optim.AdamW(groups, lr=0.0, betas=betas, eps=config.eps, fused=True)
    except RuntimeError:
        return optim.AdamW(groups, lr=0.0, betas=betas, eps=config.eps)


def is_matrix(parameter: Tensor) -> bool:
    """At least two axes longer than one: no norm, bias or A_log, nor the gain (N, 1) of a normalised weight."""
    return sum(size > 1 for size in parameter.shape) >= 2
