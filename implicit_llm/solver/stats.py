"""Define the statistics of solves and passes, which are tensors on the device of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class NonFiniteState(FloatingPointError):
    """The iteration produced NaN or infinity; the message names sequence and position."""


@dataclass
class SolverStats:
    """The statistics of one forward pass. Tensors without a shape suffix have one entry per sequence (shape B).

    num_iter: solver iterations per token, as a mean over the sequence's blocks weighted by their length.
    residual: relative residual ||f(z) - z|| / ||f(z)||, as the stopping rule measures it; the largest over blocks. The
        residual of a block is the lowest of all iterations. With eval_stop "batch" it is that of the last iteration,
        relative to ||z||. Unrolled passes measure no residual and have NaN.
    is_converged: whether every block met its stopping rule; False for unrolled passes.
    unconverged_tokens: number of tokens whose own residual is not below tol, even if their sequence met the rule.
    num_closing: evaluations of f per token outside the solver: the f that closes a block, phantom and unrolled steps.
    unconverged_BL: True for the unconverged tokens; None for unrolled passes, for which `unconverged_tokens` is 0.
    """

    num_iter: Tensor
    residual: Tensor
    is_converged: Tensor
    unconverged_tokens: Tensor
    num_closing: int = 0
    unconverged_BL: Tensor | None = None

    @property
    def f_evaluations(self) -> Tensor:
        """The number of evaluations of f per token (shape B), including those outside the solver."""
        return self.num_iter + self.num_closing


@dataclass
class BlockStats:
    """The statistics of one solve: the fields of the same names in `SolverStats`, for one block."""

    num_iter: Tensor
    residual: Tensor
    is_converged: Tensor
    unconverged_BL: Tensor


def unrolled_stats(num_unroll: int, batch: int, device: torch.device) -> SolverStats:
    """Return the statistics of a pass that iterates a fixed number of times and measures no residual."""
    return SolverStats(
        num_iter=torch.zeros(batch, device=device),
        residual=torch.full((batch,), float("nan"), device=device),
        is_converged=torch.zeros(batch, dtype=torch.bool, device=device),
        unconverged_tokens=torch.zeros(batch, dtype=torch.long, device=device),
        num_closing=num_unroll,
    )


class Block(NamedTuple):
    """A solved block and its statistics. `length`: its number of tokens, or with padding that of each sequence (B)."""

    length: int | Tensor
    stats: BlockStats


def gather_blocks(blocks: Sequence[Block], num_closing: int) -> SolverStats:
    """Combine blocks into the statistics of whole sequences.

    num_closing: the evaluations of f per token outside of the solver.
    """
    total = sum(length for length, _ in blocks)
    if isinstance(total, Tensor):
        total = total.clamp_min(1)  # a sequence may be all padding
    unconverged = [stats.unconverged_BL for _, stats in blocks]
    return SolverStats(
        num_iter=sum(stats.num_iter.float() * (length / total) for length, stats in blocks),  # type: ignore[arg-type]
        residual=torch.stack([stats.residual for _, stats in blocks]).amax(0),
        is_converged=torch.stack([stats.is_converged for _, stats in blocks]).all(0),
        unconverged_tokens=sum(mask.sum(1) for mask in unconverged),  # type: ignore[arg-type]
        num_closing=num_closing,
        unconverged_BL=torch.cat(unconverged, dim=1),
    )
