"""The fixed-point iteration: iterate a map until every sequence is done, dropping those that are.

Knows nothing of layers: a `FixedPointMap` is called with z (B, L, D) and can be narrowed to a part of the batch.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from implicit_llm.solver.methods import Update
from implicit_llm.solver.residual import Progress, Rule
from implicit_llm.solver.stats import BlockStats, NonFiniteState

# A sequence that is done only wastes work while it stays in the batch; copying the others out costs about half an
# evaluation of f. Leaving at three quarters keeps both small.
COMPACT_BELOW = 0.75
# On an accelerator, asking whether all are done waits for the device, so it is asked only every few iterations.
CHECK_EVERY_ON_DEVICE = 4


class FixedPointMap(Protocol):
    """f(., x) for a fixed input x, over a batch of sequences."""

    def __call__(self, z_BLD: Tensor) -> Tensor: ...

    def select(self, index_B: Tensor) -> FixedPointMap: ...


@torch.no_grad()
def solve(
    step: FixedPointMap,
    z0_BLD: Tensor,
    *,
    update: Update,
    rule: Rule,
    tol: float,
    max_iter: int,
    valid_BL: Tensor | None = None,
) -> tuple[Tensor, BlockStats]:
    """Iterate `step` from z0 until `rule` is met or `max_iter` evaluations are spent; without gradient.

    Returns: per sequence the iterate with the lowest residual, made by `update`, (B, L, D); and the statistics. Tokens
        whose own residual is not below tol are reported whatever the rule says of their sequence.
    Raises: NonFiniteState, naming sequence and position.
    Source: Schöne et al. 2025, section 2.
    """
    batch = len(z0_BLD)
    check_every = 1 if z0_BLD.device.type == "cpu" else CHECK_EVERY_ON_DEVICE
    best = _Best(z0_BLD)
    active = torch.arange(batch, device=z0_BLD.device)
    z_BLD, valid = z0_BLD, valid_BL
    for iteration in range(1, max_iter + 1):
        fz_BLD = step(z_BLD)
        z_next_BLD = update(z_BLD, fz_BLD)
        best.take(active, z_next_BLD, rule(z_BLD, fz_BLD, valid), iteration)
        z_BLD = z_next_BLD
        if iteration == max_iter or iteration % check_every:
            continue
        still = ~best.done[active]
        num_active = int(still.sum())
        if num_active == 0:
            break
        if num_active <= COMPACT_BELOW * len(active):
            keep = still.nonzero()[:, 0]
            active, z_BLD, step = active[keep], z_BLD[keep], step.select(keep)
            valid = None if valid is None else valid[keep]
            update.select(keep)
    best.raise_if_not_finite(valid_BL)
    return best.z, BlockStats(best.num_iter, best.residual, best.done, best.residual_BL >= tol)


class _Best:
    """The best iterate of every sequence so far, and when each was done; all on the device."""

    def __init__(self, z0_BLD: Tensor) -> None:
        batch, length, _ = z0_BLD.shape
        device = z0_BLD.device
        wide = z0_BLD.dtype if z0_BLD.dtype == torch.float64 else torch.float32
        self.z = z0_BLD.clone()
        self.residual = torch.full((batch,), float("inf"), device=device, dtype=wide)
        self.residual_BL = torch.full((batch, length), float("inf"), device=device, dtype=wide)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.num_iter = torch.zeros(batch, device=device)
        self.non_finite = torch.zeros(batch, length, dtype=torch.bool, device=device)

    def take(self, active: Tensor, z_next: Tensor, progress: Progress, iteration: int) -> None:
        """Record one iteration of the sequences `active`; those already done keep what they have."""
        whole = len(active) == len(self.z)
        open_B = ~(self.done if whole else self.done[active])
        self._put("non_finite", active, whole, open_B, ~progress.residual_BL.isfinite(), merge=True)
        self._put(
            "num_iter", active, whole, open_B, torch.full_like(progress.residual_B, iteration, dtype=torch.float32)
        )
        better_B = (
            open_B
            if progress.keeps_last
            else open_B & (progress.residual_B < (self.residual if whole else self.residual[active]))
        )
        self._put("z", active, whole, better_B, z_next)
        self._put("residual", active, whole, better_B, progress.residual_B)
        self._put("residual_BL", active, whole, better_B, progress.residual_BL)
        self._put("done", active, whole, open_B, progress.done_B)

    def _put(self, name: str, active: Tensor, whole: bool, where_B: Tensor, value: Tensor, merge: bool = False) -> None:
        mine = getattr(self, name)
        current = mine if whole else mine[active]
        value = (current | value) if merge else value
        mixed = torch.where(where_B.view(-1, *(1,) * (value.ndim - 1)), value.to(current.dtype), current)
        if whole:
            setattr(self, name, mixed)
        else:
            mine[active] = mixed

    def raise_if_not_finite(self, valid_BL: Tensor | None) -> None:
        bad = self.non_finite if valid_BL is None else self.non_finite & valid_BL
        if bool(bad.any()):
            sequence, position = bad.nonzero()[0].tolist()
            raise NonFiniteState(
                f"the fixed-point iteration became NaN or infinite, first seen at sequence {sequence}, "
                f"position {position}; lower the learning rate, check the input, or solve in fp32"
            )
