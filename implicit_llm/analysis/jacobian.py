"""The state-to-state Jacobian of one Mamba2 step, explicit and implicit (Theorem 1).

An explicit layer moves its state by a diagonal map, whatever the input. At the fixed point the transition depends on
the state through z*, and its Jacobian gets off-diagonal entries: that is what makes an implicit model a non-linear RNN.

Shapes: `S` entries of the flattened SSM state (heads x head width x state), `D` model.
Source: Schöne et al. 2025, Eqs. 6-9 and Theorem 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from implicit_llm.models.backbone import ImplicitMamba2Model
from implicit_llm.models.stack import Prefix


class NotConverged(ArithmeticError):
    """A fixed point that the analysis needs was not reached within its iterations."""


@dataclass(frozen=True)
class JacobianStep:
    """One token of a one-layer Mamba2 model, seen as functions of state and fixed point.

    read: z, h -> f(z, h, x), what the layer says from the state before the token.
    move: z, h -> h after the token. Both take and give flat vectors (D) and (S).
    """

    read: Callable[[Tensor, Tensor], Tensor]
    move: Callable[[Tensor, Tensor], Tensor]
    state_S: Tensor
    width: int


@torch.no_grad()
def step_after(model: ImplicitMamba2Model, input_ids_L: Tensor) -> JacobianStep:
    """The step of the last token of `input_ids`, from the converged state of the tokens before it.

    Args: model has one layer and is in evaluation mode; fp64 is what the comparison to 1e-6 needs.
    """
    if len(model.layers) != 1 or len(input_ids_L) < 2:
        raise ValueError(
            "the Jacobian is that of one layer, after at least one token: give a one-layer model and two tokens"
        )
    with torch.no_grad():
        cache = model(input_ids_L[None, :-1], use_cache=True).past_key_values
    assert cache is not None
    assert cache.prefix is not None
    embedding_BLD = model.get_input_embeddings()(input_ids_L[None, -1:])
    x = model.stack_input(embedding_BLD, None, None, cache.prefix)
    ssm, conv = cache.prefix.layers[0]

    def apply(z_D: Tensor, state_S: Tensor) -> tuple[Tensor, Tensor]:
        h_BLD = z_D.view(1, 1, -1) if model.config.is_implicit else embedding_BLD
        prefix = Prefix((((state_S.view_as(ssm)), conv),), cache.prefix.length)
        out_BLD, states = model.apply_stack(h_BLD, replace(x, prefix=prefix), return_states=True)
        return out_BLD.flatten(), states[0][0].flatten()

    return JacobianStep(
        read=lambda z, h: apply(z, h)[0],
        move=lambda z, h: apply(z, h)[1],
        state_S=ssm.flatten(),
        width=model.config.hidden_size,
    )


def fixed_point(
    step: JacobianStep, state_S: Tensor, *, tol: float = 1e-12, max_iter: int = 2000, tau: float = 0.8
) -> Tensor:
    """z* (D) with z* = read(z*, h), by damped iteration.

    Raises: NotConverged, with the residual reached.
    """
    z_D = torch.zeros(step.width, dtype=state_S.dtype, device=state_S.device)
    residual = float("inf")
    for _ in range(max_iter):
        fz_D = step.read(z_D, state_S)
        residual = float((fz_D - z_D).detach().norm() / (fz_D.detach().norm() + 1e-300))
        z_D = torch.lerp(z_D, fz_D, tau)
        if residual < tol:
            return z_D
    raise NotConverged(
        f"relative residual {residual:.1e} after {max_iter} iterations, {tol:.0e} wanted; the layer may not contract"
    )


def explicit_jacobian(step: JacobianStep) -> Tensor:
    """dh_t/dh_{t-1} of an explicit layer, (S, S): diagonal."""
    z_D = torch.zeros(step.width, dtype=step.state_S.dtype, device=step.state_S.device)
    return torch.autograd.functional.jacobian(lambda h: step.move(z_D, h), step.state_S)


def implicit_jacobian(step: JacobianStep) -> Tensor:
    """dh*_t/dh*_{t-1} by the paper's formula, (S, S).

    With G = I - df/dz and phi' = G^-1 df/dh: move depends on h directly (the diagonal decay) and through z*, so
    dh'/dh = dmove/dh + dmove/dz phi'. In the paper's letters: diag(Lambda) + (dLambda/dz phi') h + (du/dz) phi'.
    """
    h_S = step.state_S
    z_D = fixed_point(step, h_S).detach()
    dread_dz, dread_dh = torch.autograd.functional.jacobian(step.read, (z_D, h_S))
    dmove_dz, dmove_dh = torch.autograd.functional.jacobian(step.move, (z_D, h_S))
    phi = torch.linalg.solve(torch.eye(step.width, dtype=h_S.dtype, device=h_S.device) - dread_dz, dread_dh)
    return dmove_dh + dmove_dz @ phi


def implicit_jacobian_by_autograd(step: JacobianStep, *, num_unroll: int = 400, tau: float = 0.8) -> Tensor:
    """The same by differentiating through `num_unroll` damped iterations: slow, independent of the formula."""

    def transition(h_S: Tensor) -> Tensor:
        z_D = torch.zeros(step.width, dtype=h_S.dtype, device=h_S.device)
        for _ in range(num_unroll):
            z_D = torch.lerp(z_D, step.read(z_D, h_S), tau)
        return step.move(z_D, h_S)

    return torch.autograd.functional.jacobian(transition, step.state_S)


def off_diagonal_mass(jacobian_SS: Tensor) -> float:
    """Share of the Frobenius norm that lies off the diagonal: 0 for a diagonal transition, at most 1."""
    off = jacobian_SS - torch.diag(jacobian_SS.diagonal())
    return float(off.norm() / jacobian_SS.norm())
