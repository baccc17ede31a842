"""Compute the state-to-state Jacobian of one token in one Mamba2 layer, explicit or implicit (Theorem 1).

An explicit layer updates its state by a diagonal map, whatever the input is. In an implicit model, the update also
depends on the state through the fixed point z*, so its Jacobian has off-diagonal entries.

The state of a layer may have a hundred thousand entries, and its Jacobian ten billion. But J = diag(decay) + U Phi,
where h and h' are the states before and after the token. U = dh'/dz and Phi = dz*/dh are only as wide as the model, so
norms and products of J are computed from these two factors. With copies of the token in a batch, one backward pass
gives many rows of the derivatives of f, and one forward-mode pass gives many columns of U.

Shapes: `S` entries of the flattened SSM state, `D` model, `R` rows, `K` columns.
Source: Schöne et al. 2025, Eqs. 6-9 and Theorem 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from implicit_llm.analysis.spectral_radius import growth_per_product
from implicit_llm.kernels.selection import kernels
from implicit_llm.models.mamba2.model import ImplicitMamba2Model
from implicit_llm.models.stack import Prefix

ROW_ENTRIES = 2**22  # entries of all copies of the state in one backward pass: 32 MiB in fp64
TINY = 1e-300


class NotConverged(ArithmeticError):
    """The iteration did not reach the fixed point that the analysis needs."""


@dataclass(frozen=True)
class JacobianStep:
    """The step of a Mamba2 model on one token, as a function of z and of one layer's state; other states are fixed.

    apply: maps z (R, D) and h (R, S) to the model's output f(z, h, x) (R, D) and to the layer's state h' (R, S) after
        the token. The rows are independent of one another. An explicit model ignores z.
    state_S: the layer's state before the token.
    width: the width of the model.
    """

    apply: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    state_S: Tensor
    width: int
    is_implicit: bool


@dataclass(frozen=True)
class FixedPoint:
    """The fixed point z* (D), the number of iterations, and the relative residual of the last iteration."""

    z_D: Tensor
    num_iter: int
    residual: float


@dataclass(frozen=True)
class StateJacobian:
    """The Jacobian dh_t/dh_{t-1} of a layer's whole state, as diag(decay) + U Phi; D is 0 for an explicit layer.

    df_dz_DD: the derivative of f at the fixed point, whose spectral radius shows whether and how fast the iteration
        contracts.
    u_SD: dh'/dz. phi_DS: (I - df/dz)^-1 df/dh.
    """

    decay_S: Tensor
    u_SD: Tensor
    phi_DS: Tensor
    df_dz_DD: Tensor

    def dense(self, rows_R: Tensor | None = None, columns_K: Tensor | None = None) -> Tensor:
        """Return the entries at these rows and columns (R, K), by default all entries."""
        every = torch.arange(len(self.decay_S), device=self.decay_S.device)
        rows_R, columns_K = every if rows_R is None else rows_R, every if columns_K is None else columns_K
        is_diagonal_RK = rows_R[:, None] == columns_K
        return self.u_SD[rows_R] @ self.phi_DS[:, columns_K] + is_diagonal_RK * self.decay_S[columns_K]

    def off_diagonal_share(self) -> float:
        """Return the Frobenius norm of the off-diagonal entries, divided by that of all entries.

        The result is 0 for an explicit layer, and at most 1. The squared norm of U Phi is computed as the trace of
        U^T U Phi Phi^T, which is exact up to a rounding error of 1e-8 of the norm of U Phi.
        """
        low_rank_diagonal_S = torch.einsum("sd,ds->s", self.u_SD, self.phi_DS)
        low_rank = ((self.u_SD.T @ self.u_SD) * (self.phi_DS @ self.phi_DS.T)).sum()
        off_diagonal = (low_rank - low_rank_diagonal_S.square().sum()).clamp_min(0)
        whole = off_diagonal + (self.decay_S + low_rank_diagonal_S).square().sum()
        return float((off_diagonal / whole).sqrt())

    def spectral_radius(self, *, num_products: int = 100) -> float:
        """Estimate the spectral radius by power iteration, as the geometric mean growth in its second half.

        The result is exact for an explicit layer, whose transition is diagonal.
        """
        if self.u_SD.shape[1] == 0:
            return float(self.decay_S.abs().max())

        def product(v_1S: Tensor) -> Tensor:
            return self.decay_S * v_1S + v_1S @ self.phi_DS.T @ self.u_SD.T

        return float(growth_per_product(product, self.decay_S[None], num_products))


@torch.no_grad()
def step_after(model: ImplicitMamba2Model, input_ids_L: Tensor, layer: int = 0) -> JacobianStep:
    """Return the step of the last token of `input_ids_L` in a layer, from the converged state after all earlier tokens.

    Args: model must be in evaluation mode; use fp64, because fp32 is too coarse for comparisons to 1e-6.
    Raises: TypeError unless the model is a Mamba2 without its head; ValueError for too few tokens or an unknown layer.
    """
    if not isinstance(model, ImplicitMamba2Model):
        raise TypeError(
            f"step_after takes a Mamba2 without its head, got {type(model).__name__}: keys and values are no recurrent "
            "state; for an ImplicitMamba2ForCausalLM, pass model.base"
        )
    if len(input_ids_L) < 2 or not 0 <= layer < len(model.layers):
        raise ValueError(
            f"the Jacobian needs a layer from 0 to {len(model.layers) - 1} and at least two tokens: "
            f"got layer {layer} and {len(input_ids_L)} tokens"
        )
    prefix = model(input_ids_L[None, :-1], use_cache=True).past_key_values.prefix
    return step_from(model, prefix, input_ids_L[-1], layer)


@torch.no_grad()
def step_from(model: ImplicitMamba2Model, prefix: Prefix, input_id: Tensor, layer: int = 0) -> JacobianStep:
    """Return the step of one token in a layer, from the converged state `prefix` of one sequence."""
    embedding_BLD = model.get_input_embeddings()(input_id.view(1, 1))
    x = model.stack_input(embedding_BLD, None, None, prefix)
    ssm, conv = prefix.layers[layer]

    def apply(z_RD: Tensor, h_RS: Tensor) -> tuple[Tensor, Tensor]:
        copies = torch.zeros(len(h_RS), dtype=torch.long, device=h_RS.device)
        of_rows = x.select(copies)
        assert of_rows.prefix is not None
        layers = list(of_rows.prefix.layers)
        layers[layer] = (h_RS.view(len(h_RS), *ssm.shape[1:]), conv[copies])
        h_BLD = z_RD[:, None] if model.config.is_implicit else embedding_BLD[copies]
        of_rows = replace(of_rows, prefix=Prefix(tuple(layers), prefix.length))
        out_BLD, states = model.apply_stack(h_BLD, of_rows, return_states=True)
        return out_BLD[:, 0], states[layer][0].flatten(1)

    return JacobianStep(apply, ssm.flatten(), model.config.hidden_size, model.config.is_implicit)


@torch.no_grad()
def fixed_point(step: JacobianStep, *, tol: float = 1e-12, max_iter: int = 2000, tau: float = 0.8) -> FixedPoint:
    """Compute z* = f(z*, h, x) by damped iteration; `tol` is relative.

    Raises: NotConverged, whose message has the final residual.
    """
    z_D, residual = _no_z(step), math.inf
    for iteration in range(1, max_iter + 1):
        fz_D = step.apply(z_D[None], step.state_S[None])[0][0]
        residual = float((fz_D - z_D).norm() / (fz_D.norm() + TINY))
        z_D = torch.lerp(z_D, fz_D, tau)
        if residual < tol:
            return FixedPoint(z_D, iteration, residual)
    raise NotConverged(
        f"relative residual {residual:.1e} after {max_iter} iterations, {tol:.0e} wanted; the model may not contract"
    )


@torch.no_grad()
def state_jacobian(step: JacobianStep, z_D: Tensor | None = None) -> StateJacobian:
    """Compute dh_t/dh_{t-1} by the paper's formula; `z_D` is the fixed point, if it is known.

    h' depends on h directly (the diagonal decay) and through z*, so the Jacobian is dh'/dh + dh'/dz phi' with
    phi' = (I - df/dz)^-1 df/dh. In the paper's notation, it is diag(Lambda) + (dLambda/dz phi') h + (du/dz) phi'.
    Raises: NotConverged.
    """
    if step.is_implicit and z_D is None:
        z_D = fixed_point(step).z_D
    at_D, h_S = _no_z(step) if z_D is None else z_D, step.state_S
    with kernels("reference"):  # torch.func does not support our functions with custom gradients
        moved_S, pull_back, *_ = torch.func.vjp(lambda h_S: step.apply(at_D[None], h_S[None])[1][0], h_S)
        (decay_S,) = pull_back(torch.ones_like(moved_S))
        if z_D is None:
            empty_SD = decay_S.new_zeros(len(decay_S), 0)
            return StateJacobian(decay_S, empty_SD, empty_SD.T, decay_S.new_zeros(0, 0))
        identity_DD = torch.eye(step.width, dtype=z_D.dtype, device=z_D.device)
        parts = [_derivatives(step, z_D, unit_RD) for unit_RD in identity_DD.split(_rows_at_once(step))]
    df_dz_DD, df_dh_DS, dh_dz_DS = (torch.cat(rows) for rows in zip(*parts, strict=True))
    phi_DS = torch.linalg.solve(identity_DD - df_dz_DD, df_dh_DS)
    return StateJacobian(decay_S, dh_dz_DS.T, phi_DS, df_dz_DD)


def _derivatives(step: JacobianStep, z_D: Tensor, unit_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for these unit vectors, rows of df/dz (R, D), rows of df/dh (R, S) and columns of dh'/dz (R, S)."""
    z_RD, h_RS = z_D.repeat(len(unit_RD), 1), step.state_S.repeat(len(unit_RD), 1)
    _, pull_back, *_ = torch.func.vjp(lambda z_RD, h_RS: step.apply(z_RD, h_RS)[0], z_RD, h_RS)
    _, moved_RS, *_ = torch.func.jvp(lambda z_RD: step.apply(z_RD, h_RS)[1], (z_RD,), (unit_RD,))
    return *pull_back(unit_RD), moved_RS


def state_jacobian_by_autograd(
    step: JacobianStep,
    rows_R: Tensor | None = None,
    *,
    z_D: Tensor | None = None,
    num_unroll: int = 400,
    tau: float = 0.8,
) -> Tensor:
    """Compute rows of dh_t/dh_{t-1} (R, S), by default all, by autograd through `num_unroll` damped iterations.

    This is slow and independent of the paper's formula. The iterations start at the constant `z_D`, by default 0, so
    autograd derives dz*/dh from the iterations alone.
    """
    rows_R = torch.arange(len(step.state_S), device=step.state_S.device) if rows_R is None else rows_R
    found = []
    for part_R in rows_R.split(_rows_at_once(step)):
        h_RS = step.state_S.repeat(len(part_R), 1).requires_grad_(True)
        z_RD = (_no_z(step) if z_D is None else z_D).repeat(len(part_R), 1)
        with torch.enable_grad():
            for _ in range(num_unroll):
                z_RD = torch.lerp(z_RD, step.apply(z_RD, h_RS)[0], tau)
            moved_RS = step.apply(z_RD, h_RS)[1]
        unit_rows_RS = torch.zeros_like(moved_RS).scatter_(1, part_R[:, None], 1.0)
        found.append(torch.autograd.grad(moved_RS, h_RS, unit_rows_RS)[0])
    return torch.cat(found)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the difference, divided by that of `expected`."""
    return float((found - expected).norm() / (expected.norm() + TINY))


def _rows_at_once(step: JacobianStep) -> int:
    return max(1, ROW_ENTRIES // len(step.state_S))


def _no_z(step: JacobianStep) -> Tensor:
    return torch.zeros(step.width, dtype=step.state_S.dtype, device=step.state_S.device)
