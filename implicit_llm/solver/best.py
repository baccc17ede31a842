"""The best iterate of every sequence so far, and when each was done; all on the device."""

import torch
from torch import Tensor

from implicit_llm.kernels.selection import judge_runs_on_triton
from implicit_llm.solver.residual import Progress, Rule
from implicit_llm.solver.stats import NonFiniteState


class Best:
    """What a solve has found. Shapes: `B` sequences, `A` of them not known to be done, `L` length, `D` width."""

    def __init__(self, z0_BLD: Tensor) -> None:
        batch, length, _ = z0_BLD.shape
        device = z0_BLD.device
        wide = z0_BLD.dtype if z0_BLD.dtype == torch.float64 else torch.float32
        self.z = z0_BLD.clone(memory_format=torch.contiguous_format)
        self.residual = torch.full((batch,), float("inf"), device=device, dtype=wide)
        self.residual_BL = torch.full((batch, length), float("inf"), device=device, dtype=wide)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.num_iter = torch.zeros(batch, device=device)
        self.non_finite = torch.zeros(batch, length, dtype=torch.bool, device=device)

    def take(self, active_A: Tensor, z: tuple[Tensor, Tensor, Tensor], rule: Rule) -> None:
        """Record an iteration (z, f(z), next z) of the sequences `active_A`; those already done keep what they have."""
        if judge_runs_on_triton(z[1], rule.stop):
            from implicit_llm.kernels.triton import convergence

            convergence.judge(self, active_A, z, rule.stop, rule.tol)
            return
        self._record(active_A, z[2], rule(z[0], z[1]))

    def _record(self, active: Tensor, z_next: Tensor, progress: Progress) -> None:
        whole = len(active) == len(self.z)
        open_B = ~(self.done if whole else self.done[active])
        better_B = open_B
        if not progress.keeps_last:
            better_B = open_B & (progress.residual_B < (self.residual if whole else self.residual[active]))
        non_finite_BL = ~progress.residual_BL.isfinite()
        self._put("non_finite", active, whole, open_B, non_finite_BL, merge=True)
        num_iter = self.num_iter if whole else self.num_iter[active]
        self._put("num_iter", active, whole, open_B, num_iter + 1)
        self._put("z", active, whole, better_B, z_next)
        self._put("residual", active, whole, better_B, progress.residual_B)
        self._put("residual_BL", active, whole, better_B, progress.residual_BL)
        self._put("done", active, whole, open_B, progress.done_B)

    def _put(self, name: str, active: Tensor, whole: bool, where_B: Tensor, value: Tensor, merge: bool = False) -> None:
        mine = getattr(self, name)
        current = mine if whole else mine[active]
        value = (current | value) if merge else value.to(current.dtype)
        where = where_B.view(-1, *(1,) * (value.ndim - 1))
        if whole:  # in place: a captured graph knows the tensors by their addresses
            torch.where(where, value, current, out=mine)
        else:
            mine[active] = torch.where(where, value, current)

    def reset(self) -> None:
        """Forget everything, in place."""
        self.z.zero_()
        self.residual.fill_(torch.inf)
        self.residual_BL.fill_(torch.inf)
        for t in (self.done, self.num_iter, self.non_finite):
            t.zero_()

    def raise_if_not_finite(self) -> None:
        """Raises: NonFiniteState, naming sequence and position."""
        if bool(self.non_finite.any()):
            sequence, position = self.non_finite.nonzero()[0].tolist()
            raise NonFiniteState(
                f"the fixed-point iteration became NaN or infinite, first seen at sequence {sequence}, "
                f"position {position}; lower the learning rate, check the input, or solve in fp32"
            )
