"""Loss or gradient became NaN or infinite: nothing of it reaches the weights, and training stops."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicit_llm.runs.atomic import write_atomic
from implicit_llm.runs.errors import UserError

REPORT = "non_finite.json"


class NonFiniteTraining(UserError):
    """The loss, the gradient or the solver's state is not finite; starting again would end the same way."""

    failure_class = "non_finite"


class UpdateGuard:
    """Keeps non-finite gradients from the weights.

    On the CPU it looks at every step. On an accelerator looking would mean to wait for it in every step: there the
    fused optimizer skips this update and all later ones by itself, and the step is found when metrics are read.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, *, is_alone: bool) -> None:
        can_skip = bool(optimizer.defaults.get("fused"))
        self.is_immediate = not can_skip or (device.type == "cpu" and is_alone)
        self._optimizer: Any = optimizer
        self._is_bad = torch.zeros((), device=device)

    def is_good(self, loss_and_norm: Tensor) -> bool:
        """Look at loss and gradient norm before the update; always true where the look is put off."""
        if self.is_immediate:
            return all(map(math.isfinite, loss_and_norm.tolist()))
        self._is_bad = torch.maximum(self._is_bad, 1 - torch.isfinite(loss_and_norm).all().float())
        self._optimizer.found_inf = self._is_bad
        return True


def non_finite_error(
    name: str, step: int, what: str, sample_indices: np.ndarray, recent: Sequence[dict[str, Any]], work: Path
) -> NonFiniteTraining:
    """The error of `step` (its number once finished), with a report of the batch and the last steps below `work`."""
    report = {"step": step, "what": what, "sample_indices": sample_indices.tolist(), "recent": list(recent)}
    write_atomic(work / REPORT, json.dumps(report, indent=1, allow_nan=False) + "\n")
    shown = ", ".join(map(str, sample_indices[:8].tolist())) + (", ..." if len(sample_indices) > 8 else "")
    return NonFiniteTraining(
        f"train/{name}: {what} at step {step} (samples {shown}; all of them and the steps before in {work / REPORT}), "
        "the last checkpoint is from before it; lower schedule.peak_learning_rate or optimizer.max_grad_norm"
    )
