"""The learning rate as one pure function of the global step, over all phases of a curriculum."""

from __future__ import annotations

import math
from typing import Any

import torch

from implicit_llm_contracts.config.training import ScheduleConfig


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


class GlobalStepSchedule:
    """Sets the rate of all parameter groups from the global step; has what the Trainer calls of an LRScheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, total_steps: int, step: int) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.total_steps = total_steps
        self.go_to(step)

    def step(self) -> None:
        """Go on to the next update."""
        self.go_to(self._step + 1)

    def get_last_lr(self) -> list[float]:
        return [self._rate]

    def state_dict(self) -> dict[str, Any]:
        return {}  # a function of the step has no state

    def go_to(self, step: int) -> None:
        """Set the rate of the update that follows `step` finished ones."""
        self._step = step
        # After the last update there is no next one: the rate stays.
        self._rate = learning_rate(self.schedule, min(step, self.total_steps - 1), self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
