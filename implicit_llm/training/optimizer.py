"""Build AdamW for the recipe, and compute the learning rate as a pure function of the global step."""

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn, optim

from implicit_llm_contracts.config.training import OptimizerConfig, ScheduleConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, is_sharded: bool = False) -> optim.Optimizer:
    """Return AdamW for all trainable parameters, fused if the device supports it, with weight decay on matrices only.

    is_sharded: whether each process stores the moments of only a part of the parameters, updates this part and sends it
        to the other processes (ZeRO stage 1).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if is_matrix(parameter)], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if not is_matrix(parameter)], "weight_decay": 0.0},
    ]
    kind: Callable[..., optim.Optimizer] = optim.AdamW
    if is_sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its import takes a second

        kind = partial(ZeroRedundancyOptimizer, optimizer_class=optim.AdamW)
    build = partial(kind, groups, lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps)  # the schedule sets lr
    try:
        return build(fused=True)
    except RuntimeError:
        return build()


def local_part(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Return the optimizer of this process's part of the parameters: `optimizer` itself, unless it is sharded."""
    return getattr(optimizer, "optim", optimizer)


def is_matrix(parameter: Tensor) -> bool:
    """Return whether at least two axes are longer than 1; norms, biases, A_log and gains (N, 1) are no matrices."""
    return sum(size > 1 for size in parameter.shape) >= 2


def learning_rate(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of the update after `step` finished updates, for step in 0..total_steps - 1.

    Warm-up begins above zero and reaches the peak at its last update. After warm-up, the learning rate falls towards
    `final_learning_rate`, either linearly, or as 1 - sqrt over the last `decay_fraction` of all steps. In the second
    case, it stays at the peak until then.
    Source: Schöne et al. 2025 (release script and section 4); the published linear schedule starts from zero.
    """
    warmup_steps = math.ceil(schedule.warmup_fraction * total_steps)
    peak, final = schedule.peak_learning_rate, schedule.final_learning_rate
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule.kind == "linear":
        share = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    else:
        decay_steps = math.ceil((schedule.decay_fraction or 0.0) * total_steps)
        share = math.sqrt(max(0.0, (step - (total_steps - decay_steps)) / max(1, decay_steps)))
    return final + (peak - final) * (1 - share)
