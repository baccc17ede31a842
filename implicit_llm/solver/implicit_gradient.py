"""Compute the derivatives of a fixed point by products with the Jacobian of f at one z; this matrix is never formed.

At z* = f(z*, x), with g the gradient with respect to z*, the gradient with respect to x is u^T df/dx, where
u = g + (df/dz)^T u (implicit function theorem). In forward mode a change dx of the input changes z* by
w = df/dx dx + df/dz w. `implicit_step` solves these equations. `series_step` sums the first terms of a damped series
for u or w, one term for each phantom step. Both evaluate f on the whole sequence, even if the solver works in blocks.

A product computes no gradients of weight matrices, because `torch.autograd.grad` skips them in PyTorch's own
operations. Our kernels still compute the gradients of norms, convolution and decays beside that of z, which costs
little.
Source: Bai et al. 2019, Theorem 1; Geng et al. 2021, Neumann series. Shapes: `B` batch, `A` sequences still being
solved, `L` length, `D` width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from implicit_llm.kernels.selection import is_reference
from implicit_llm.solver.fixed_point import FixedPointMap, solve
from implicit_llm.solver.methods import Anderson
from implicit_llm.solver.residual import make_rule
from implicit_llm_contracts.config.solver import SolverConfig

_log = logging.getLogger(__name__)

Linear = Callable[[Tensor], tuple[Tensor, ...]]  # a product with one matrix, as `torch.func.vjp` returns it
IsWanted = Callable[[int], bool]  # see `FixedPointMap.is_wanted`
Through = Callable[[Linear, Tensor], Tensor]  # (product, g) -> u, such as the solution of u = g + product(u)


def implicit_step(f: FixedPointMap, z_BLD: Tensor, solver: SolverConfig) -> Tensor:
    """Return f(z) with the derivatives of the fixed point.

    The result can be differentiated once; forward mode works only with the `reference` kernels. The backward pass
    raises NonFiniteState if its own solve becomes NaN or infinite.
    """
    return _with_derivatives(f, z_BLD, partial(_solve_linear, is_wanted=f.is_wanted, solver=solver))


def series_step(f: FixedPointMap, z_BLD: Tensor, solver: SolverConfig) -> Tensor:
    """Return (1 - tau) z + tau f(z) with the derivatives of `phantom_steps` such steps, all linearised at this z.

    The result can be differentiated once; forward mode works only with the `reference` kernels.
    """
    fz_BLD = _with_derivatives(f, z_BLD, partial(_sum_series, steps=solver.phantom_steps, tau=solver.tau))
    return torch.lerp(z_BLD, fz_BLD, solver.tau)


def _with_derivatives(f: FixedPointMap, z_BLD: Tensor, through: Through) -> Tensor:
    """Return f(z), whose backward pass first replaces its gradient g by `through(product with (df/dz)^T, g)`.

    The input z gets no gradient.
    """
    if not torch.is_grad_enabled():
        return f(z_BLD)
    if is_reference():
        fz_BLD, pull_back = torch.func.vjp(f, z_BLD)  # type: ignore[misc]  # no third value without has_aux
        return _Derivative.apply(fz_BLD, pull_back, through)
    z_BLD = z_BLD.detach().requires_grad_()
    fz_BLD = f(z_BLD)
    return _Derivative.apply(fz_BLD, lambda u: torch.autograd.grad(fz_BLD, z_BLD, u, retain_graph=True), through)


class _Derivative(torch.autograd.Function):
    """A copy of f(z): reverse mode uses the product u -> (df/dz)^T u, forward mode uses the transposed product."""

    @staticmethod
    def forward(fz_BLD: Tensor, pull_back: Linear, through: Through) -> Tensor:
        return fz_BLD.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.pull_back, ctx.through = inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g_BLD: Tensor) -> tuple[Tensor, None, None]:
        (fz_BLD,) = ctx.saved_tensors
        with torch.no_grad():
            u_BLD = ctx.through(ctx.pull_back, g_BLD)
        return _OnceDifferentiable.apply(u_BLD, g_BLD, fz_BLD), None, None

    @staticmethod
    def jvp(ctx: Any, dfz_BLD: Tensor, *_: None) -> Tensor:
        _, push_forward = torch.func.vjp(lambda u_BLD: ctx.pull_back(u_BLD)[0], dfz_BLD)  # type: ignore[misc]
        with torch.no_grad():
            w_BLD = ctx.through(push_forward, dfz_BLD)
        return _OnceDifferentiable.apply(w_BLD, dfz_BLD)


class _OnceDifferentiable(torch.autograd.Function):
    """A copy of a solved u that raises NotImplementedError for second derivatives.

    Without it, autograd would treat u as a constant and return wrong second derivatives.
    """

    generate_vmap_rule = True  # jacrev computes many gradients at once

    @staticmethod
    def forward(u_BLD: Tensor, *depends_on: Tensor) -> Tensor:
        return u_BLD.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(
            "a solver whose gradient is 'implicit' or 'series' has no second derivatives: take gradient='phantom', or "
            "mode='unrolled' in train mode"
        )

    jvp = backward


class _Affine(FixedPointMap):
    """The map u -> g + product(u), restricted to the sequences `index_A`."""

    def __init__(self, product: Linear, g_BLD: Tensor, index_A: Tensor, is_wanted: IsWanted) -> None:
        self.product, self.g_BLD, self.index_A = product, g_BLD, index_A
        self.is_wanted = is_wanted  # type: ignore[assignment]  # a product gathers sharded layers, as f does

    def __call__(self, u_ALD: Tensor) -> Tensor:
        u_BLD = torch.zeros_like(self.g_BLD).index_copy(0, self.index_A, u_ALD)
        return (self.g_BLD + self.product(u_BLD)[0])[self.index_A]

    def select(self, index_A: Tensor) -> _Affine:
        return _Affine(self.product, self.g_BLD, self.index_A[index_A], self.is_wanted)


def _sum_series(product: Linear, g_BLD: Tensor, steps: int, tau: float) -> Tensor:
    """Return the sum over m < steps of M^m g, where M u = (1 - tau) u + tau product(u)."""
    u_BLD = sum_BLD = g_BLD
    for _ in range(steps - 1):
        u_BLD = torch.lerp(u_BLD, product(u_BLD)[0], tau)
        sum_BLD = sum_BLD + u_BLD
    return sum_BLD


def _solve_linear(product: Linear, g_BLD: Tensor, is_wanted: IsWanted, solver: SolverConfig) -> Tensor:
    """Return the solution of u = g + product(u); log a warning if a sequence misses `gradient_tol`.

    Each sequence's g is scaled to norm 1 for the solve, because the loss may have any scale. A sequence whose g is not
    finite gets NaN. Raises: NonFiniteState.
    """
    norm_B11 = torch.linalg.vector_norm(g_BLD, dim=(1, 2), keepdim=True).clamp_min(torch.finfo(g_BLD.dtype).tiny)
    unit_BLD = torch.where(norm_B11.isfinite(), g_BLD / norm_B11, 0.0)  # 0 times a norm that is not finite is NaN
    everyone = torch.arange(len(g_BLD), device=g_BLD.device)
    u_BLD, stats = solve(
        _Affine(product, unit_BLD, everyone, is_wanted),
        torch.zeros_like(g_BLD),
        update=Anderson(solver.tau, is_causal=False),
        rule=make_rule("sequence", solver.gradient_tol, is_training=True),
        max_iter=solver.eval_budget,
    )
    if not bool(stats.is_converged.all()):
        _log.warning(
            "the implicit gradient of %d of %d sequences is not solved to solver.gradient_tol %g: relative residual up "
            "to %.1e after %d products; raise eval_max_iter, or take gradient='phantom'",
            *(int((~stats.is_converged).sum()), len(g_BLD), solver.gradient_tol),
            *(float(stats.residual.max()), solver.eval_budget),
        )
    return u_BLD * norm_B11
