"""Stop training when the loss or a gradient becomes NaN or infinite, before the weights change."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from implicit_llm.training.distributed import max_tensor_over_ranks
from implicit_llm_contracts.errors import UserError


class NonFiniteTraining(UserError):
    """The loss, the gradient or the solver's state is not finite; a restart would end the same way."""

    failure_class = "non_finite"


class UpdateGuard:
    """A guard that keeps non-finite gradients from the weights, on all ranks alike.

    On the CPU, or without a fused optimizer, the guard checks every step. Otherwise a check would wait for the device,
    so the fused optimizer skips the bad update and all later ones, and reading the metrics finds the step.
    may_overflow: whether a gradient scaler skips updates with infinite gradients. The guard then checks only the loss,
        and with a fused optimizer on an accelerator it checks nothing.
    """

    def __init__(self, optimizer: Any, device: torch.device, *, may_overflow: bool) -> None:
        self.is_immediate = device.type == "cpu" or not optimizer.defaults.get("fused")
        self._optimizer = optimizer
        self._may_overflow = may_overflow
        self._is_bad = torch.zeros((), device=device)

    def is_good(self, loss_and_norm: Tensor) -> bool:
        """Check loss and gradient norm before the update; always return True if the check is deferred. Collective."""
        watched = loss_and_norm[:1] if self._may_overflow else loss_and_norm
        is_bad = 1 - torch.isfinite(watched).all().float()
        self._is_bad = torch.maximum(self._is_bad, max_tensor_over_ranks(is_bad))  # each rank knows only its own loss
        if self.is_immediate:
            return not bool(self._is_bad)
        if not self._may_overflow:
            self._optimizer.found_inf = self._is_bad
        return True


class SolverFailures:
    """A patch of the model's `forward`, which returns logits of NaN if the solver fails in a training pass.

    A failed rank thus still sends gradients, without which the other ranks could not finish the step. Then all ranks
    skip the update, and the error of each rank states why the failed rank failed. In evaluation mode, the patch raises
    the error of the solver: each rank measures the fixed point by itself, and a failure there does not end the step.
    message: the first failure of this rank, or None.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.message: str | None = None
        forward = model.forward
        vocab_size = model.config.get_text_config().vocab_size

        @functools.wraps(forward)
        def survive(*arguments: Any, **options: Any) -> Any:
            try:
                return forward(*arguments, **options)
            except FloatingPointError as error:
                if not model.training:
                    raise
                self.message = self.message or str(error)
            # Every parameter contributes, so all sums over ranks become NaN.
            touched = torch.stack([parameter.float().sum() for parameter in model.parameters()]).sum()
            shape = (*options["input_ids"].shape, vocab_size)
            return CausalLMOutput(logits=(touched * math.nan).expand(shape))

        setattr(model, "forward", survive)  # noqa: B010  (methods cannot be assigned to, says the type checker)


def judge(
    losses_and_norms: Sequence[tuple[float, float]], first_step: int, allowed_in_a_row: int, in_a_row: int
) -> tuple[list[int], tuple[int, str] | None]:
    """Check the loss and gradient norm of consecutive steps, which start at number `first_step`.

    If only the gradient is not finite, the update counts as skipped while fewer than `allowed_in_a_row` are skipped in
    a row. `in_a_row` updates were skipped right before these steps. Returns: the skipped steps; the first bad step with
    the reason, or None.
    """
    skipped: list[int] = []
    for step, (loss, norm) in enumerate(losses_and_norms, start=first_step):
        if math.isfinite(loss) and math.isfinite(norm):
            in_a_row = 0
            continue
        in_a_row += 1
        what = f"the loss is {loss:g} and the gradient norm {norm:g}"
        if not math.isfinite(loss) or not allowed_in_a_row:
            return skipped, (step, what)
        if in_a_row >= allowed_in_a_row:
            return skipped, (step, f"{what}, whatever the scale: {in_a_row} updates in a row were skipped")
        skipped.append(step)
    return skipped, None
