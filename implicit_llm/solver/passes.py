"""Run the passes in which a model iterates: unrolled passes, free passes and evaluation passes.

A free pass runs the solver without gradient, then steps that carry the gradient. To close a solved block is to evaluate
one undamped f at its z, which also returns the state from which the next block starts. f is causal, so blocks have the
same fixed point as the whole sequence.
Source: Schöne et al. 2025, sections 2 and 3. Blockwise evaluation is new here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from implicit_llm.solver.fixed_point import FixedPointMap, solve
from implicit_llm.solver.implicit_gradient import implicit_step, series_step
from implicit_llm.solver.methods import Update
from implicit_llm.solver.residual import Rule, make_rule
from implicit_llm.solver.stats import Block, SolverStats, gather_blocks, unrolled_stats
from implicit_llm_contracts.config.solver import METHODS, SolverConfig


class SequenceMap(FixedPointMap, Protocol):
    """A differentiable map f(., x) on sequences, or on a block of their tokens."""

    @property
    def valid_BL(self) -> Tensor | None: ...

    def block(self, start: int, end: int, state: Any) -> SequenceMap:
        """Return the map on the tokens from start to end (exclusive), given the converged state before them."""
        ...

    def close(self, z_BLD: Tensor) -> tuple[Tensor, Any]:
        """Return f(z) and the state after the last token."""
        ...


@dataclass(frozen=True, eq=False)  # see residual.Rule
class Search:
    """The settings of a block's solve: stopping rule, largest number of evaluations of f, method and damping."""

    rule: Rule
    max_iter: int
    method: str
    tau: float

    @classmethod
    def of(cls, solver: SolverConfig, *, is_training: bool) -> Search:
        """Return the settings with which `solver` solves a block in training or in evaluation. Raises: UnknownName."""
        if is_training:
            return cls(make_rule(solver.stop, solver.tol, is_training=True), solver.max_iter, solver.method, solver.tau)
        # `method` applies to training alone. As in the released code, evaluation is damped, and the f that closes a
        # block is one of the evaluations that the budget allows.
        rule = make_rule(solver.eval_stop, solver.tol, is_training=False)
        return cls(rule, max(1, solver.eval_budget - 1), "damped", solver.tau)

    @property
    def damping(self) -> float | None:
        """The tau of z <- (1 - tau) z + tau f(z), or None for other methods, which may remember iterates."""
        return {"plain": 1.0, "damped": self.tau}.get(self.method)

    def update(self) -> Update:
        """Return a new update, because each block needs its own: an update may remember iterates."""
        return METHODS[self.method](self.tau)


def unrolled_pass(f: SequenceMap, z0_BLD: Tensor, solver: SolverConfig) -> tuple[Tensor, SolverStats]:
    """Run `num_unroll` differentiated iterations; tau damps all of them except the first."""
    z_BLD = f(z0_BLD)
    for _ in range(solver.num_unroll - 1):
        z_BLD = torch.lerp(z_BLD, f(z_BLD), solver.tau)
    return z_BLD, unrolled_stats(solver.num_unroll, len(z0_BLD), z0_BLD.device)


@torch.no_grad()
def training_solve(
    f: SequenceMap, z0_BLD: Tensor, solver: SolverConfig, state: Any = None
) -> tuple[Tensor, list[Block]]:
    """Run the solver's part of a free pass after `state`; return z (B, L, D) and each block's length and statistics.

    A sequence that fits into one block has no next block that needs its state, so its block is not closed.
    Raises: NonFiniteState.
    """
    length = z0_BLD.shape[1]
    block_len = solver.block_len or length
    search = Search.of(solver, is_training=True)
    z_BLD, _, blocks = solve_blocks(f, z0_BLD, search, block_len, state, close_longer_than=block_len)
    return z_BLD, blocks


def differentiated_steps(f: SequenceMap, z_BLD: Tensor, solver: SolverConfig) -> Tensor:
    """Run the steps that carry the gradient of the pass, over the whole sequence, from a z solved without gradient."""
    how = {"phantom": phantom_steps, "series": series_steps, "implicit": implicit_step}
    return how[solver.gradient](f, z_BLD, solver)


def with_gradient(f: SequenceMap, z_BLD: Tensor, solver: SolverConfig) -> Tensor:
    """Return the values of z, bit for bit, with the gradient of `differentiated_steps(f, z, solver)`."""
    y_BLD = differentiated_steps(f, z_BLD, solver)
    return z_BLD + (y_BLD - y_BLD.detach())


def phantom_steps(f: SequenceMap, z_BLD: Tensor, solver: SolverConfig) -> Tensor:
    """Run `phantom_steps` differentiated steps over the whole sequence, each z <- (1 - tau) z + tau f(z)."""
    for _ in range(solver.phantom_steps):
        z_BLD = torch.lerp(z_BLD, f(z_BLD), solver.tau)
    return z_BLD


def series_steps(f: SequenceMap, z_BLD: Tensor, solver: SolverConfig) -> Tensor:
    """Return the values of `phantom_steps` with the gradient of `series_step` at the z before the last step."""
    with torch.no_grad():
        for _ in range(solver.phantom_steps - 1):
            z_BLD = torch.lerp(z_BLD, f(z_BLD), solver.tau)
    return series_step(f, z_BLD.detach(), solver)


def free_stats(blocks: list[Block], solver: SolverConfig) -> SolverStats:
    """Return the statistics of a free pass from its solved `blocks`; if there are several, an f closed each of them."""
    return gather_blocks(blocks, solver.steps_after_solve + (len(blocks) > 1))


@torch.no_grad()
def evaluation_pass(
    f: SequenceMap, z0_BLD: Tensor, solver: SolverConfig, state: Any = None
) -> tuple[Tensor, Any, SolverStats]:
    """Iterate block after block to the tolerance, damped; one undamped f closes each block and advances the state.

    Returns: z (B, L, D), the state after the last block, and the statistics.
    Raises: NonFiniteState; KeyError for the `eval_mode` "as_trained", which needs a training pass.
    """
    search, block_len = Search.of(solver, is_training=False), solver.eval_width(z0_BLD.shape[1])
    z_BLD, state, blocks = solve_blocks(f, z0_BLD, search, block_len, state)
    return z_BLD, state, gather_blocks(blocks, 1)


def solve_blocks(
    f: SequenceMap, z0_BLD: Tensor, search: Search, block_len: int, state: Any, *, close_longer_than: int = 0
) -> tuple[Tensor, Any, list[Block]]:
    """Solve block after block, each from the converged state before it; one undamped f closes each block.

    Sequences of at most `close_longer_than` tokens keep the solver's own z instead of the f(z) that closes a block.
    Returns: z (B, L, D), the state after the last closed block (`state` if none is closed), and the length and
        statistics of each block.
    Raises: NonFiniteState.
    """
    length = z0_BLD.shape[1]
    parts: list[Tensor] = []
    blocks: list[Block] = []
    for start in range(0, length, block_len):
        end = min(start + block_len, length)
        block = f.block(start, end, state)
        z_BWD, stats = solve(
            block,
            z0_BLD[:, start:end],
            update=search.update(),
            rule=search.rule,
            max_iter=search.max_iter,
            valid_BL=block.valid_BL,
        )
        if length > close_longer_than:
            closed_BWD, state = block.close(z_BWD)
            if f.valid_BL is not None and close_longer_than:
                is_closed_B = f.valid_BL.sum(1) > close_longer_than
                closed_BWD = torch.where(is_closed_B[:, None, None], closed_BWD, z_BWD)
            z_BWD = closed_BWD
        parts.append(z_BWD.detach())  # to drop forward-mode derivatives, as in `solve`
        blocks.append(Block(end - start if block.valid_BL is None else block.valid_BL.sum(1), stats))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], state, blocks
