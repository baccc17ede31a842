"""What a solve reports about itself, as tensors on the device of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class NonFiniteState(FloatingPointError):
    """The iteration produced NaN or infinity; the message names sequence and position."""


@dataclass
class SolverStats:
    """Health of one forward pass, one entry a sequence (shape B).

    num_iter: solver iterations a token took part in, as a mean over the sequence's blocks weighted by their length; the
        closing f of a block, phantom steps and unrolled steps are counted in `num_closing`.
    residual: relative residual ||f(z) - z|| / ||f(z)|| of the iterate that is closed and returned: the lowest of its
        block, or with eval_stop "batch" the last; the largest over blocks. NaN for unrolled passes, which measure none.
    is_converged: every block met its stopping rule.
    unconverged_tokens: tokens whose own residual is not below tol, also where the rule was content with their sequence.
    unconverged_BL: the same by position; None for unrolled passes.
    """

    num_iter: Tensor
    residual: Tensor
    is_converged: Tensor
    unconverged_tokens: Tensor
    num_closing: int = 0
    unconverged_BL: Tensor | None = None

    @property
    def f_evaluations(self) -> Tensor:
        """Evaluations of f per token, all included (shape B)."""
        return self.num_iter + self.num_closing


@dataclass
class BlockStats:
    """Result of one solve: per sequence, and per position for the tokens that did not converge."""

    num_iter: Tensor
    residual: Tensor
    is_converged: Tensor
    unconverged_BL: Tensor


def unrolled_stats(num_unroll: int, batch: int, device: torch.device) -> SolverStats:
    """Statistics of a pass that iterates a fixed number of times and measures no residual."""
    return SolverStats(
        num_iter=torch.zeros(batch, device=device),
        residual=torch.full((batch,), float("nan"), device=device),
        is_converged=torch.zeros(batch, dtype=torch.bool, device=device),
        unconverged_tokens=torch.zeros(batch, dtype=torch.long, device=device),
        num_closing=num_unroll,
    )


class Block(NamedTuple):
    """A solved block: its number of tokens, by sequence where padded, and the result."""

    length: int | Tensor
    stats: BlockStats


def gather_blocks(blocks: Sequence[Block], num_closing: int) -> SolverStats:
    """Combine blocks into the statistics of whole sequences."""
    total = sum(length for length, _ in blocks)
    if isinstance(total, Tensor):
        total = total.clamp_min(1)  # a row may be all padding
    unconverged = [stats.unconverged_BL for _, stats in blocks]
    return SolverStats(
        num_iter=sum(stats.num_iter.float() * (length / total) for length, stats in blocks),  # type: ignore[arg-type]
        residual=torch.stack([stats.residual for _, stats in blocks]).amax(0),
        is_converged=torch.stack([stats.is_converged for _, stats in blocks]).all(0),
        unconverged_tokens=sum(mask.sum(1) for mask in unconverged),  # type: ignore[arg-type]
        num_closing=num_closing,
        unconverged_BL=torch.cat(unconverged, dim=1),
    )
