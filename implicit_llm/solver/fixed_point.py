"""The fixed-point iteration: iterate a map until every sequence is done, dropping those that are.

Knows nothing of layers: a `FixedPointMap` is called with z (B, L, D) and can be narrowed to a part of the batch.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from implicit_llm.kernels.selection import is_reference
from implicit_llm.solver.best import Best
from implicit_llm.solver.methods import Update
from implicit_llm.solver.residual import Rule
from implicit_llm.solver.stats import BlockStats

# A sequence that is done only wastes work while it stays in the batch; copying the others out costs about half an
# evaluation of f. Leaving at three quarters keeps both small.
COMPACT_BELOW = 0.75
# On an accelerator, asking whether all are done waits for the device, so it is asked only every few iterations.
CHECK_EVERY_ON_DEVICE = 4


class FixedPointMap(Protocol):
    """f(., x) for a fixed input x, over a batch of sequences."""

    def __call__(self, z_BLD: Tensor) -> Tensor: ...

    def select(self, index_B: Tensor) -> FixedPointMap: ...

    def is_wanted(self, num_open: int) -> bool:
        """Whether to evaluate f again with `num_open` sequences not done; the same for all processes that share f."""
        return num_open > 0


@torch.no_grad()
def solve(
    step: FixedPointMap,
    z0_BLD: Tensor,
    *,
    update: Update,
    rule: Rule,
    max_iter: int,
    valid_BL: Tensor | None = None,
) -> tuple[Tensor, BlockStats]:
    """Iterate `step` from z0 until `rule` is met or `max_iter` evaluations are spent; without gradient.

    Padding, where `valid_BL` is False, stays at zero and so has no part in residuals or acceleration; z0 is zero there.

    Returns: per sequence the iterate with the lowest residual, made by `update`, (B, L, D); and the statistics. Tokens
        whose own residual is not below the rule's tol are reported whatever the rule says of their sequence.
    Raises: NonFiniteState, naming sequence and position; NotImplementedError inside torch.func.vmap.
    Source: Schöne et al. 2025, section 2.
    """
    batch = len(z0_BLD)
    check_every = 1 if z0_BLD.device.type == "cpu" else CHECK_EVERY_ON_DEVICE
    best = Best(z0_BLD)
    active = torch.arange(batch, device=z0_BLD.device)
    z_BLD, valid = z0_BLD, valid_BL
    for iteration in range(1, max_iter + 1):
        # no_grad does not stop forward-mode derivatives: without detach, jvp and vjp would disagree.
        fz_BLD = step(z_BLD).detach()
        if iteration == 1 and is_reference():
            _refuse_vmap(fz_BLD)
        if valid is not None:
            fz_BLD = fz_BLD.masked_fill(~valid[..., None], 0.0)
        z_next_BLD = update(z_BLD, fz_BLD)
        best.take(active, (z_BLD, fz_BLD, z_next_BLD), rule)
        z_BLD = z_next_BLD
        if iteration == max_iter or iteration % check_every:
            continue
        still = ~best.done[active]
        num_active = int(still.sum())
        if not step.is_wanted(num_active):
            break
        if 0 < num_active <= COMPACT_BELOW * len(active):
            keep = still.nonzero()[:, 0]
            active, z_BLD, step = active[keep], z_BLD[keep], step.select(keep)
            valid = None if valid is None else valid[keep]
            update.select(keep)
    best.raise_if_not_finite()
    return best.z, BlockStats(best.num_iter, best.residual, best.done, best.residual_BL >= rule.tol)


def _refuse_vmap(z_BLD: Tensor) -> None:
    try:
        z_BLD.sum().item()
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise NotImplementedError(
            "torch.func.vmap cannot cross the fixed-point solver, where each sequence takes its own number of "
            "iterations: use the batch dimension, jacrev (with chunk_size=1 where gradient='implicit'), or "
            "mode='unrolled' in train mode"
        ) from error
