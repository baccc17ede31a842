"""The state-to-state Jacobian of one token in one Mamba2 layer, explicit and implicit (Theorem 1).

An explicit layer moves its state by a diagonal map, whatever the input. At the fixed point the transition depends on
the state through z*, and its Jacobian gets off-diagonal entries: that is what makes an implicit model a non-linear RNN.

The state of a layer may have a hundred thousand entries, so a Jacobian is taken between some of them, the coordinates.
Derivatives are formed for many rows at once, as one backward pass over as many copies of the token.

Shapes: `S` entries of the flattened SSM state (heads x head width x state), `K` coordinates, `D` model, `R` rows.
Source: Schöne et al. 2025, Eqs. 6-9 and Theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from implicit_llm.models.backbone import ImplicitMamba2Model
from implicit_llm.models.stack import Prefix

ROW_ENTRIES = 2**22  # entries of the copies of the state in one backward pass: 32 MiB in fp64
TINY = 1e-300


class NotConverged(ArithmeticError):
    """A fixed point that the analysis needs was not reached within its iterations."""


@dataclass(frozen=True)
class JacobianStep:
    """One token of a Mamba2 model, seen as a function of one layer's state before it, all other states held.

    apply: z (R, D), h (R, S) -> f(z, h, x) (R, D), what the model says, and h' (R, S), the layer's state after the
    token; the rows are independent of one another. An explicit model takes no z.
    """

    apply: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    state_S: Tensor
    width: int
    is_implicit: bool

    @property
    def coordinates(self) -> Tensor:
        """All entries of the state."""
        return torch.arange(len(self.state_S), device=self.state_S.device)


@dataclass(frozen=True)
class FixedPoint:
    """z* (D), and the iterations it took."""

    z_D: Tensor
    num_iter: int
    residual: float


@torch.no_grad()
def step_after(model: ImplicitMamba2Model, input_ids_L: Tensor, layer: int = 0) -> JacobianStep:
    """The step of the last token of `input_ids` in a layer, from the converged state of the tokens before it.

    Args: model is in evaluation mode; fp64 is what the comparison to 1e-6 needs.
    Raises: TypeError for a model that is no Mamba2, or has a head.
    """
    if not isinstance(model, ImplicitMamba2Model):
        raise TypeError(
            f"step_after takes a Mamba2 without its head, got {type(model).__name__}: keys and values are no recurrent "
            "state; of an ImplicitMamba2ForCausalLM give model.base"
        )
    if len(input_ids_L) < 2 or not 0 <= layer < len(model.layers):
        raise ValueError(
            f"the Jacobian is that of layer 0 to {len(model.layers) - 1} after at least one token: "
            f"got layer {layer} and {len(input_ids_L)} tokens"
        )
    prefix = model(input_ids_L[None, :-1], use_cache=True).past_key_values.prefix
    embedding_BLD = model.get_input_embeddings()(input_ids_L[None, -1:])
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
    """z* = f(z*, h, x) by damped iteration; tol is relative.

    Raises: NotConverged, with the residual reached.
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


def explicit_jacobian(step: JacobianStep, coordinates_K: Tensor | None = None) -> Tensor:
    """dh_t/dh_{t-1} of an explicit layer between coordinates (default all), (K, K): diagonal."""
    coordinates_K = step.coordinates if coordinates_K is None else coordinates_K
    return _partials(step, _no_z(step), "state", coordinates_K, coordinates_K)[1]


def implicit_jacobian(step: JacobianStep, coordinates_K: Tensor | None = None, z_D: Tensor | None = None) -> Tensor:
    """dh*_t/dh*_{t-1} by the paper's formula, between coordinates (default all), (K, K); z is the fixed point if known.

    With G = I - df/dz and phi' = G^-1 df/dh: h' depends on h directly (the diagonal decay) and through z*, so
    dh'/dh + dh'/dz phi'. In the paper's letters: diag(Lambda) + (dLambda/dz phi') h + (du/dz) phi'.
    """
    coordinates_K = step.coordinates if coordinates_K is None else coordinates_K
    z_D = fixed_point(step).z_D if z_D is None else z_D
    df_dz_DD, df_dh_DK = _partials(step, z_D, "output", torch.arange(step.width, device=z_D.device), coordinates_K)
    dh_dz_KD, dh_dh_KK = _partials(step, z_D, "state", coordinates_K, coordinates_K)
    phi_DK = torch.linalg.solve(torch.eye(step.width, dtype=z_D.dtype, device=z_D.device) - df_dz_DD, df_dh_DK)
    return dh_dh_KK + dh_dz_KD @ phi_DK


def output_jacobian(step: JacobianStep, z_D: Tensor) -> Tensor:
    """df/dz at z, (D, D): its spectral radius says whether, and how fast, the iteration contracts."""
    every = torch.arange(step.width, device=z_D.device)
    return _partials(step, z_D, "output", every, every[:0])[0]


def implicit_jacobian_by_autograd(
    step: JacobianStep,
    rows_R: Tensor | None = None,
    coordinates_K: Tensor | None = None,
    *,
    z_D: Tensor | None = None,
    num_unroll: int = 400,
    tau: float = 0.8,
) -> Tensor:
    """Rows of the same (R, K) by differentiating through `num_unroll` damped iterations: slow, needs no formula.

    The iterations start at z, default 0; what z has to do with h is found by them alone, since z is a constant.
    """
    rows_R = step.coordinates if rows_R is None else rows_R
    coordinates_K = step.coordinates if coordinates_K is None else coordinates_K
    found = []
    for part_R in rows_R.split(_rows_at_once(step)):
        h_RS = step.state_S.repeat(len(part_R), 1).requires_grad_(True)
        z_RD = (_no_z(step) if z_D is None else z_D).repeat(len(part_R), 1)
        with torch.enable_grad():
            for _ in range(num_unroll):
                z_RD = torch.lerp(z_RD, step.apply(z_RD, h_RS)[0], tau)
            moved_RS = step.apply(z_RD, h_RS)[1]
        (gradient_RS,) = torch.autograd.grad(moved_RS, h_RS, _unit_rows(moved_RS, part_R))
        found.append(gradient_RS[:, coordinates_K])
    return torch.cat(found)


def transition_radius(step: JacobianStep, z_D: Tensor | None, *, num_products: int = 100) -> float:
    """Spectral radius of dh_t/dh_{t-1} over the whole state, by power iteration on vector-Jacobian products.

    The geometric mean growth over the second half of the products; exact for an explicit layer, which is diagonal.
    """
    h_S = step.state_S.clone().requires_grad_(True)
    if z_D is None:
        moved_S = step.apply(_no_z(step)[None], h_S[None])[1][0]
        return float(torch.autograd.grad(moved_S, h_S, torch.ones_like(h_S))[0].abs().max())
    adjoint_DD = (torch.eye(step.width, dtype=z_D.dtype, device=z_D.device) - output_jacobian(step, z_D)).T
    factors = torch.linalg.lu_factor(adjoint_DD)
    z_D = z_D.clone().requires_grad_(True)
    with torch.enable_grad():
        out_RD, moved_RS = step.apply(z_D[None], h_S[None])
    generator = torch.Generator(device="cpu").manual_seed(0)
    v_S = torch.randn(h_S.shape, generator=generator, dtype=h_S.dtype).to(h_S.device)
    growth = []
    for _ in range(num_products):
        of_z_D, of_h_S = torch.autograd.grad(moved_RS, (z_D, h_S), (v_S / v_S.norm())[None], retain_graph=True)
        through_D = torch.linalg.lu_solve(*factors, of_z_D[:, None])[:, 0]
        (through_S,) = torch.autograd.grad(out_RD, h_S, through_D[None], retain_graph=True)
        v_S = of_h_S + through_S
        growth.append(math.log(float(v_S.norm()) + TINY))
    second_half = growth[num_products // 2 :]
    return math.exp(sum(second_half) / len(second_half))


def off_diagonal_mass(jacobian_KK: Tensor) -> float:
    """Share of the Frobenius norm that lies off the diagonal: 0 for a diagonal transition, at most 1."""
    off = jacobian_KK - torch.diag(jacobian_KK.diagonal())
    return float(off.norm() / jacobian_KK.norm())


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`."""
    return float((found - expected).norm() / (expected.norm() + TINY))


def _partials(step: JacobianStep, z_D: Tensor, of: str, rows_R: Tensor, coordinates_K: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the derivatives of the "output" f or the "state" h' by z (R, D) and by coordinates of h (R, K)."""
    by_z, by_h = [], []
    for part_R in rows_R.split(_rows_at_once(step)):
        z_RD = z_D.repeat(len(part_R), 1).requires_grad_(True)
        h_RS = step.state_S.repeat(len(part_R), 1).requires_grad_(True)
        with torch.enable_grad():
            out_RX = step.apply(z_RD, h_RS)[0 if of == "output" else 1]
        gradients = torch.autograd.grad(
            out_RX, (z_RD, h_RS), _unit_rows(out_RX, part_R), allow_unused=True, materialize_grads=True
        )
        by_z.append(gradients[0])
        by_h.append(gradients[1][:, coordinates_K])
    return torch.cat(by_z), torch.cat(by_h)


def _unit_rows(like_RX: Tensor, index_R: Tensor) -> Tensor:
    return torch.zeros_like(like_RX).scatter_(1, index_R[:, None], 1.0)


def _rows_at_once(step: JacobianStep) -> int:
    return max(1, ROW_ENTRIES // len(step.state_S))


def _no_z(step: JacobianStep) -> Tensor:
    return torch.zeros(step.width, dtype=step.state_S.dtype, device=step.state_S.device)
