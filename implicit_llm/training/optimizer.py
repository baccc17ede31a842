"""AdamW as the recipe wants it, and the learning rate as a pure function of the global step."""

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn, optim

from implicit_llm_contracts.config.training import OptimizerConfig, ScheduleConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, is_sharded: bool = False) -> optim.Optimizer:
    """AdamW on all trainable parameters, fused where the device can; weight decay on matrices only.

    is_sharded: each process updates a part of the parameters, has the moments of that part alone, and sends it to the
    others (ZeRO stage 1).
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
    """Return the optimizer that updates the parameters of this process: itself, unless it is sharded."""
    return getattr(optimizer, "optim", optimizer)


def is_matrix(parameter: Tensor) -> bool:
    """Whether two axes are longer than one, unlike those of a norm, bias, A_log, or the gain (N, 1) of a weight."""
    return sum(size > 1 for size in parameter.shape) >= 2


def learning_rate(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Learning rate of the update that follows `step` finished ones, for step in 0..total_steps - 1.

    Warm-up reaches the peak with its last update; its first one is not wasted on a rate of zero. Then either a straight
    line to `final_learning_rate`, or the peak followed by 1 - sqrt over the last `decay_fraction`.
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
