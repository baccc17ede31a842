"""The gradient of a fixed point by the implicit function theorem, solved for without forming a Jacobian.

At z* = f(z*, x), with g the gradient with respect to z*, the gradient with respect to x is u^T df/dx, where
u = g + (df/dz)^T u. The equation holds for the whole sequence, whatever the blocks and the damping of the solver.
Source: Bai et al. 2019, Theorem 1. Shapes: `B` batch, `A` sequences still being solved, `L` length, `D` width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from implicit_llm.solver.fixed_point import FixedPointMap, solve
from implicit_llm.solver.methods import make_update
from implicit_llm.solver.residual import sequence_rule
from implicit_llm_contracts.config.solver import SolverConfig

_log = logging.getLogger(__name__)


def implicit_step(f: Callable[[Tensor], Tensor], z_BLD: Tensor, solver: SolverConfig) -> Tensor:
    """Return f(z) with the gradient of the fixed point; differentiable once."""
    if not torch.is_grad_enabled():
        return f(z_BLD)
    z_BLD = z_BLD.detach().requires_grad_()
    return _ImplicitGradient.apply(f(z_BLD), z_BLD, solver)


class _ImplicitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fz_BLD: Tensor, z_BLD: Tensor, solver: SolverConfig) -> Tensor:
        ctx.save_for_backward(fz_BLD, z_BLD)
        ctx.solver = solver
        return fz_BLD.view_as(fz_BLD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BLD: Tensor) -> tuple[Tensor, None, None]:
        fz_BLD, z_BLD = ctx.saved_tensors
        return _solve_adjoint(fz_BLD, z_BLD, g_BLD, ctx.solver), None, None


class _Adjoint(FixedPointMap):
    """The map u -> g + (df/dz)^T u, for some of the sequences."""

    def __init__(self, fz_BLD: Tensor, z_BLD: Tensor, g_BLD: Tensor, index_A: Tensor) -> None:
        self.fz_BLD, self.z_BLD, self.g_BLD, self.index_A = fz_BLD, z_BLD, g_BLD, index_A

    def __call__(self, u_ALD: Tensor) -> Tensor:
        u_BLD = torch.zeros_like(self.fz_BLD).index_copy(0, self.index_A, u_ALD)
        (product_BLD,) = torch.autograd.grad(self.fz_BLD, self.z_BLD, u_BLD, retain_graph=True)
        return (self.g_BLD + product_BLD)[self.index_A]

    def select(self, index_A: Tensor) -> _Adjoint:
        return _Adjoint(self.fz_BLD, self.z_BLD, self.g_BLD, self.index_A[index_A])


def _solve_adjoint(fz_BLD: Tensor, z_BLD: Tensor, g_BLD: Tensor, solver: SolverConfig) -> Tensor:
    # Solve with each sequence's gradient at norm 1, since the loss may have any scale.
    norm_B11 = torch.linalg.vector_norm(g_BLD, dim=(1, 2), keepdim=True).clamp_min(torch.finfo(g_BLD.dtype).tiny)
    everyone = torch.arange(len(g_BLD), device=g_BLD.device)
    u_BLD, stats = solve(
        _Adjoint(fz_BLD, z_BLD, g_BLD / norm_B11, everyone),
        torch.zeros_like(g_BLD),
        update=make_update("anderson", solver.tau),
        rule=sequence_rule(solver.gradient_tol),
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
