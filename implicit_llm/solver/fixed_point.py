"""Iterate a map to its fixed point until every sequence is done, and drop finished sequences on the way.

A sequence is done when it meets the stopping rule. The solver calls a `FixedPointMap` with z (B, L, D) and restricts
the map to the sequences that are not done.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from implicit_llm.kernels.selection import is_reference, judge_runs_on_triton
from implicit_llm.solver.methods import Update
from implicit_llm.solver.residual import Progress, Rule
from implicit_llm.solver.stats import BlockStats, NonFiniteState

# A finished sequence wastes work while it stays in the batch, and copying the unfinished ones to a smaller batch costs
# about half an evaluation of f. Copying when at most three quarters are unfinished keeps both costs small.
COMPACT_BELOW = 0.75
# To check whether all sequences are done, the CPU waits for the accelerator, so it checks only every few iterations.
CHECK_EVERY_ON_DEVICE = 4


class FixedPointMap(Protocol):
    """A map f(., x) for a fixed input x, over a batch of sequences."""

    def __call__(self, z_BLD: Tensor) -> Tensor: ...

    def select(self, index_B: Tensor) -> FixedPointMap: ...

    def is_wanted(self, num_open: int) -> bool:
        """Return whether to evaluate f again while `num_open` sequences of this process are not done.

        Processes over which f is sharded must all get the same result, because they evaluate f together.
        """
        return num_open > 0


class Best:
    """The record of a solve: for each token its best iteration, for each sequence its progress, all on the device.

    A token's best iteration has the lowest `Progress.rank_BL`, or with `Progress.keeps_last` it is the newest one.
    z: the next z that the best iteration computed.
    rank_BL, residual_BL: the rank and the token's own residual of the z from which the best iteration started.
    Shapes: `B` sequences, `A` of them not known to be done, `L` length, `D` width.
    """

    def __init__(self, z0_BLD: Tensor) -> None:
        batch, length, _ = z0_BLD.shape
        device = z0_BLD.device
        wide = z0_BLD.dtype if z0_BLD.dtype == torch.float64 else torch.float32
        self.z = z0_BLD.clone(memory_format=torch.contiguous_format)
        self.rank_BL = torch.full((batch, length), float("inf"), device=device, dtype=wide)
        self.residual_BL = torch.full((batch, length), float("inf"), device=device, dtype=wide)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.num_iter = torch.zeros(batch, device=device)
        self.non_finite = torch.zeros(batch, length, dtype=torch.bool, device=device)

    def advance(self, active_A: Tensor, z_ALD: Tensor, fz_ALD: Tensor, rule: Rule, tau: float) -> bool:
        """Record an iteration, overwrite `z_ALD` with the next iterate z + tau (f(z) - z), and return True.

        Return False, and change nothing, if no kernel can do this.
        """
        if not judge_runs_on_triton(fz_ALD, rule.stop):
            return False
        from implicit_llm.kernels.triton import convergence

        convergence.judge(self, active_A, (z_ALD, fz_ALD, z_ALD), rule.stop, rule.tol, tau)
        return True

    def take(self, active_A: Tensor, z: tuple[Tensor, Tensor, Tensor], rule: Rule) -> None:
        """Record an iteration (z, f(z), next z) for the sequences of `active_A` that are not done."""
        if judge_runs_on_triton(z[1], rule.stop):
            from implicit_llm.kernels.triton import convergence

            convergence.judge(self, active_A, z, rule.stop, rule.tol)
            return
        self._record(active_A, z[2], rule(z[0], z[1]))

    def _record(self, active: Tensor, z_next: Tensor, progress: Progress) -> None:
        whole = len(active) == len(self.z)

        def mine(name: str) -> Tensor:
            return getattr(self, name) if whole else getattr(self, name)[active]

        open_B, rank_BL = ~mine("done"), progress.rank_BL
        better_BL = open_B[:, None].expand_as(rank_BL)
        if not progress.keeps_last:
            better_BL = better_BL & (rank_BL < mine("rank_BL"))
        found = {
            "non_finite": (open_B, mine("non_finite") | ~progress.residual_BL.isfinite()),
            "num_iter": (open_B, mine("num_iter") + 1),
            "z": (better_BL, z_next),
            "rank_BL": (better_BL, rank_BL),
            "residual_BL": (better_BL, progress.residual_BL),
            "done": (open_B, progress.done_B),
        }
        for name, (where, value) in found.items():
            current, where = mine(name), where[(...,) + (None,) * (value.ndim - where.ndim)]
            if whole:  # in place, because a captured CUDA graph refers to the tensors by their addresses
                torch.where(where, value.to(current.dtype), current, out=current)
            else:
                getattr(self, name)[active] = torch.where(where, value.to(current.dtype), current)

    @property
    def residual(self) -> Tensor:
        """The lowest residual of each sequence (B), or its last residual with `Progress.keeps_last`."""
        return self.rank_BL[:, -1]

    def reset(self) -> None:
        """Reset the record in place for a solve from z = 0."""
        self.z.zero_()
        self.rank_BL.fill_(torch.inf)
        self.residual_BL.fill_(torch.inf)
        for t in (self.done, self.num_iter, self.non_finite):
            t.zero_()

    def raise_if_not_finite(self) -> None:
        """Raise NonFiniteState, which names sequence and position, if an iterate was NaN or infinite."""
        if bool(self.non_finite.any()):
            sequence, position = self.non_finite.nonzero()[0].tolist()
            raise NonFiniteState(
                f"the fixed-point iteration became NaN or infinite, first seen at sequence {sequence}, "
                f"position {position} of its block; lower the learning rate, check the input, or solve in fp32"
            )


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
    """Iterate `step` from z0 until every sequence meets `rule`, at most `max_iter` times; without gradient.

    z0 must be zero at padding, where `valid_BL` is False. z stays zero there, so padding affects no residual and no
    update.

    Returns: the z (B, L, D) that the best iteration computed, and the statistics. `Progress` defines which iteration is
        best for each sequence or token. A token counts as unconverged if its own residual is not below the rule's tol,
        even if its sequence meets the rule.
    Raises: NonFiniteState, which names sequence and position; NotImplementedError inside torch.func.vmap with the
        `reference` kernels.
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
