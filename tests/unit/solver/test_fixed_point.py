"""The solver on maps whose fixed point, rate of convergence and gradient are known in closed form.

Shapes: `B` batch, `L` length, `D` width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from implicit_llm import NonFiniteState, SolverConfig
from implicit_llm.solver import fixed_point
from implicit_llm.solver.fixed_point import FixedPointMap, solve
from implicit_llm.solver.passes import evaluation_pass, phantom_steps, series_steps, training_solve, unrolled_pass
from implicit_llm.solver.residual import make_rule
from implicit_llm_contracts.config.solver import METHODS


@dataclass
class Scaled(FixedPointMap):
    """f(z) = c z + x: its residual shrinks by |c| an iteration, and its fixed point is x / (1 - c)."""

    c_BL: Tensor
    x_BLD: Tensor

    def __call__(self, z_BLD: Tensor) -> Tensor:
        return self.c_BL[..., None] * z_BLD + self.x_BLD

    def select(self, index_B: Tensor) -> Scaled:
        return Scaled(self.c_BL[index_B], self.x_BLD[index_B])


@dataclass
class Causal(FixedPointMap):
    """f(z)_t = A z_t + B z_(t-1) + x_t; `before_BD` is z of the token before the first."""

    A_DD: Tensor
    B_DD: Tensor
    x_BLD: Tensor
    before_BD: Tensor | None = None
    valid_BL: Tensor | None = None

    def __call__(self, z_BLD: Tensor) -> Tensor:
        first_BD = torch.zeros_like(z_BLD[:, 0]) if self.before_BD is None else self.before_BD
        shifted_BLD = torch.cat([first_BD[:, None], z_BLD[:, :-1]], dim=1)
        return z_BLD @ self.A_DD.T + shifted_BLD @ self.B_DD.T + self.x_BLD

    def select(self, index_B: Tensor) -> Causal:
        before = None if self.before_BD is None else self.before_BD[index_B]
        return Causal(self.A_DD, self.B_DD, self.x_BLD[index_B], before)

    def block(self, start: int, end: int, state: Any) -> Causal:
        return Causal(self.A_DD, self.B_DD, self.x_BLD[:, start:end], state)

    def close(self, z_BLD: Tensor) -> tuple[Tensor, Tensor]:
        out_BLD = self(z_BLD)
        return out_BLD, out_BLD[:, -1]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scaled(factors: list[list[float]], width: int = 3) -> Scaled:
    """One factor for each sequence and position."""
    c_BL = torch.tensor(factors, dtype=torch.float64)
    return Scaled(c_BL, normal(*c_BL.shape, width))


def contraction(size: int, norm: float, seed: int = 0) -> Tensor:
    matrix = normal(size, size, seed=seed)
    return matrix * (norm / torch.linalg.matrix_norm(matrix, 2))


def linear(A_DD: Tensor, x_BLD: Tensor) -> Causal:
    """f(z) = A z + x."""
    return Causal(A_DD, torch.zeros_like(A_DD), x_BLD)


def causal_fixed_point(f: Causal) -> Tensor:
    """z_t = (I - A)^-1 (B z_(t-1) + x_t), token by token."""
    inverse_DD = torch.linalg.inv(torch.eye(len(f.A_DD), dtype=torch.float64) - f.A_DD)
    z_BD, out = torch.zeros_like(f.x_BLD[:, 0]), []
    for t in range(f.x_BLD.shape[1]):
        z_BD = (z_BD @ f.B_DD.T + f.x_BLD[:, t]) @ inverse_DD.T
        out.append(z_BD)
    return torch.stack(out, dim=1)


def run(f: Any, z0: Tensor, *, method: str = "plain", stop: str = "sequence", tol: float = 1e-6, **options: Any) -> Any:
    settings = {"max_iter": 500, "tau": 0.8, "is_training": True, **options}
    rule = make_rule(stop, tol, is_training=settings.pop("is_training"))
    return solve(f, z0, update=METHODS[method](settings.pop("tau")), rule=rule, **settings)


def evaluations_needed(factor: float, tol: float) -> int:
    """The first k for which |f(z) - z| / |f(z)| = c^(k-1) (1 - c) / (1 - c^k) is below tol, from z = 0."""
    return next(k for k in range(1, 10_000) if factor ** (k - 1) * (1 - factor) / (1 - factor**k) < tol)


@pytest.mark.parametrize("tol", [0.05, 1e-3, 1e-6])
def test_each_sequence_of_a_contraction_takes_the_iterations_that_its_factor_needs(tol: float) -> None:
    factors = [0.1, 0.5, 0.9]
    f = scaled([[c, c] for c in factors])
    z_BLD, stats = run(f, torch.zeros_like(f.x_BLD), tol=tol)
    assert stats.num_iter.tolist() == [evaluations_needed(c, tol) for c in factors]
    assert stats.is_converged.all()
    assert (stats.residual < tol).all()
    exact_BLD = f.x_BLD / (1 - f.c_BL[..., None])
    # The distance to the fixed point is at most c / (1 - c) times the last change.
    assert torch.linalg.vector_norm(z_BLD - exact_BLD) < 10 * tol * torch.linalg.vector_norm(exact_BLD)


@pytest.mark.parametrize("wanted", [0, 9])  # by other processes that share f
def test_f_is_evaluated_no_more_once_all_sequences_are_done_everywhere(wanted: int) -> None:
    calls: list[int] = []

    @dataclass
    class Counted(Scaled):
        def __call__(self, z_BLD: Tensor) -> Tensor:
            calls.append(len(z_BLD))
            return super().__call__(z_BLD)

        def is_wanted(self, num_open: int) -> bool:
            return num_open > 0 or len(calls) < wanted

    f = Counted(torch.full((1, 2), 0.5), normal(1, 2, 3))
    _, stats = run(f, torch.zeros(1, 2, 3), tol=0.05)
    assert stats.num_iter.item() == evaluations_needed(0.5, 0.05)
    assert calls == [1] * max(wanted, int(stats.num_iter))


def test_damping_contracts_by_one_minus_tau_plus_tau_c() -> None:
    factor, tau = -0.9, 0.5  # plain iteration contracts by 0.9, the damped one by 0.05
    f = scaled([[factor]])
    z0 = torch.zeros_like(f.x_BLD)
    needed = {method: run(f, z0, method=method, tau=tau)[1].num_iter.item() for method in ("plain", "damped")}
    assert needed["damped"] < 8 < 100 < needed["plain"]


def test_by_the_token_rule_later_tokens_have_no_part_in_which_iterate_is_kept() -> None:
    """A rotation never converges, and the residuals of its tokens go up and down."""
    angle = torch.tensor(1.0, dtype=torch.float64)
    A_DD = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    x_BLD = normal(8, 6, 2)
    other_BLD = torch.cat([x_BLD[:, :3], normal(8, 3, 2, seed=1)], dim=1)
    one, other = (
        run(Causal(A_DD, A_DD / 2, x), torch.zeros_like(x), stop="token", tol=1e-12, max_iter=9)[0]
        for x in (x_BLD, other_BLD)
    )
    assert torch.equal(one[:, :3], other[:, :3])


def test_the_token_rule_waits_for_the_slowest_token_and_the_sequence_rule_does_not() -> None:
    f = scaled([[0.1] * 50 + [0.9], [0.1] * 51])
    tol = 0.05
    by_rule = {
        stop: run(f, torch.zeros_like(f.x_BLD), stop=stop, tol=tol)[1] for stop in ("sequence", "token", "batch")
    }
    assert by_rule["token"].num_iter.tolist() == [evaluations_needed(0.9, tol), evaluations_needed(0.1, tol)]
    assert by_rule["sequence"].num_iter[0] < by_rule["token"].num_iter[0]
    assert by_rule["sequence"].unconverged_BL.nonzero().tolist() == [[0, 50]]  # content, but that token is reported
    assert by_rule["batch"].num_iter.tolist() == [by_rule["sequence"].num_iter.max().item()] * 2


def test_the_published_evaluation_rule_takes_one_norm_over_the_batch_relative_to_the_iterate() -> None:
    f = scaled([[0.5], [0.9]])
    z0 = torch.ones_like(f.x_BLD)
    iterates = [z0, f(z0)]
    while (iterates[-1] - iterates[-2]).norm() / iterates[-2].norm() >= 0.1:
        iterates.append(f(iterates[-1]))
    z_BLD, stats = run(f, z0, stop="batch", tol=0.1, is_training=False)
    assert stats.num_iter.tolist() == [len(iterates) - 1] * 2
    assert torch.equal(z_BLD, iterates[-1])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_anderson_solves_a_linear_map_in_about_its_dimension(size: int) -> None:
    f = linear(contraction(size, 0.95, seed=size), normal(3, 1, size))
    # Its ridge allows about so much at once.
    z_BLD, stats = run(f, torch.zeros_like(f.x_BLD), method="anderson", tau=1.0, tol=1e-4)
    assert (stats.num_iter <= size + 2).all()  # size + 1 residuals span the space; the last evaluation only measures
    torch.testing.assert_close(z_BLD, causal_fixed_point(f), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("method", ["plain", "damped", "anderson"])
def test_sequences_that_leave_the_batch_change_nothing(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    f = scaled([[c] * 4 for c in (0.1, 0.3, 0.5, 0.8, 0.95)])
    found = []
    for share in (0.0, 1.0):  # never, and as soon as one is done
        monkeypatch.setattr(fixed_point, "COMPACT_BELOW", share)
        found.append(run(f, torch.zeros_like(f.x_BLD), method=method))
    (kept, kept_stats), (left, left_stats) = found
    torch.testing.assert_close(left, kept, rtol=1e-12, atol=1e-12)
    assert left_stats.num_iter.tolist() == kept_stats.num_iter.tolist()


def test_a_solve_that_does_not_converge_returns_the_iterate_of_lowest_residual_and_says_so() -> None:
    f = scaled([[-1.5]])  # z_k = x (1 - (-1.5)^k) / 2.5: the relative residual is lowest at the first odd iterate
    z_BLD, stats = run(f, torch.zeros_like(f.x_BLD), max_iter=9)
    iterates = [torch.zeros_like(f.x_BLD)]
    for _ in range(9):
        iterates.append(f(iterates[-1]))
    residuals = [((b - a).norm() / b.norm()).item() for a, b in pairwise(iterates)]
    best = min(range(9), key=residuals.__getitem__)
    assert torch.equal(z_BLD, iterates[best + 1])
    assert stats.residual.item() == pytest.approx(residuals[best])
    assert not stats.is_converged.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_residuals_are_kept_in_fp32_or_in_the_wider_precision_of_the_states(dtype: torch.dtype) -> None:
    f = Scaled(torch.tensor([[0.5]], dtype=dtype), normal(1, 1, 3).to(dtype))
    _, stats = run(f, torch.zeros_like(f.x_BLD), tol=0.4)  # so that it ends with the second step
    fz_BLD = f(f.x_BLD).double()
    residual = (fz_BLD - f.x_BLD).norm() / fz_BLD.norm()
    torch.testing.assert_close(stats.residual, residual.expand(1).to(torch.promote_types(dtype, torch.float32)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_named_by_sequence_and_position(bad: float) -> None:
    f = scaled([[0.5] * 4, [0.5] * 4])
    f.x_BLD[1, 2, 0] = bad
    with pytest.raises(NonFiniteState, match="sequence 1, position 2"):
        run(f, torch.zeros_like(f.x_BLD))


def causal() -> Causal:
    return Causal(contraction(3, 0.5), contraction(3, 0.4, seed=1), normal(2, 7, 3, seed=2))


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("method", ["plain", "anderson"])
def test_blocks_of_every_width_reach_the_fixed_point_of_the_whole(width: int, method: str) -> None:
    f = causal()
    solver = SolverConfig(method=method, tol=1e-10, max_iter=500, eval_block_len=width, block_len=width)  # type: ignore[arg-type]
    z0, exact_BLD = torch.zeros_like(f.x_BLD), causal_fixed_point(f)
    evaluated, state, stats = evaluation_pass(f, z0, solver)
    trained, _ = training_solve(f, z0, solver)
    torch.testing.assert_close(evaluated, exact_BLD, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(trained, exact_BLD, rtol=1e-8, atol=1e-8)
    assert torch.equal(state, evaluated[:, -1])
    assert stats.is_converged.all()
    assert stats.num_closing == 1  # of every block


@pytest.mark.parametrize(("steps", "tau"), [(1, 1.0), (1, 0.8), (4, 0.8), (60, 0.8)])
def test_the_phantom_gradient_of_a_linear_map_is_its_truncated_series(steps: int, tau: float) -> None:
    f = scaled([[0.3, -0.6], [0.5, 0.2]])
    f.x_BLD.requires_grad_()
    z_BLD = torch.zeros_like(f.x_BLD)
    (gradient_BLD,) = torch.autograd.grad(
        phantom_steps(f, z_BLD, SolverConfig(phantom_steps=steps, tau=tau)).sum(), f.x_BLD
    )
    # dz_k/dx = tau sum_(i<k) (1 - tau + tau c)^i, which goes to the true 1 / (1 - c).
    ratio_BL = 1 - tau + tau * f.c_BL
    torch.testing.assert_close(gradient_BLD, (tau * (1 - ratio_BL**steps) / (1 - ratio_BL))[..., None].expand(2, 2, 3))
    if steps == 60:
        torch.testing.assert_close(gradient_BLD, (1 / (1 - f.c_BL))[..., None].expand(2, 2, 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("tau", [0.8, 1.0])
@pytest.mark.parametrize("is_solved", [False, True])
def test_the_series_of_a_linear_map_is_its_phantom_gradient(steps: int, tau: float, is_solved: bool) -> None:
    """By what is added, from any z; by the matrices at the fixed point, where the phantom steps multiply the same z."""
    f, found = causal(), []
    g_BLD, solver = normal(*f.x_BLD.shape, seed=3), SolverConfig(phantom_steps=steps, tau=tau)
    z_BLD = causal_fixed_point(f) if is_solved else normal(*f.x_BLD.shape, seed=4)
    leaves = [t.requires_grad_() for t in ((f.x_BLD, f.A_DD, f.B_DD) if is_solved else (f.x_BLD,))]
    for take in (phantom_steps, series_steps):
        out_BLD = take(f, z_BLD.clone().requires_grad_(take is series_steps), solver)
        found.append([out_BLD.detach(), *torch.autograd.grad(out_BLD, leaves, g_BLD)])
    (phantom, *phantom_gradients), (series, *series_gradients) = found
    assert torch.equal(series, phantom)
    torch.testing.assert_close(series_gradients, phantom_gradients, rtol=1e-12, atol=1e-12)


def test_a_series_evaluates_f_as_often_as_phantom_steps_and_gives_the_z_before_it_no_gradient() -> None:
    calls: list[bool] = []

    @dataclass
    class Watched(Causal):
        def __call__(self, z_BLD: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return super().__call__(z_BLD)

    f = causal()
    f = Watched(f.A_DD, f.B_DD, f.x_BLD.requires_grad_())
    z_BLD = normal(*f.x_BLD.shape).requires_grad_()
    series_steps(f, z_BLD, SolverConfig(phantom_steps=3)).sum().backward()
    assert calls == [False, False, True]
    assert z_BLD.grad is None
    assert f.x_BLD.grad is not None


@pytest.mark.parametrize("num_unroll", [1, 2, 5])
def test_unrolling_damps_all_iterations_but_the_first(num_unroll: int) -> None:
    f, tau = scaled([[0.3, -0.6]]), 0.8
    f.x_BLD.requires_grad_()
    z_BLD, _ = unrolled_pass(
        f, torch.zeros_like(f.x_BLD), SolverConfig(mode="unrolled", num_unroll=num_unroll, tau=tau)
    )
    (gradient_BLD,) = torch.autograd.grad(z_BLD.sum(), f.x_BLD)
    ratio_BL = 1 - tau + tau * f.c_BL  # z_1 = x, then z <- ratio z + tau x
    series_BL = ratio_BL ** (num_unroll - 1) + tau * sum(ratio_BL**i for i in range(num_unroll - 1))
    torch.testing.assert_close(gradient_BLD, series_BL[..., None].expand_as(gradient_BLD))


@settings(derandomize=True, deadline=None, database=None)
@given(
    size=st.integers(1, 6),
    norm=st.floats(0.0, 0.9),
    seed=st.integers(0, 2**20),
    method=st.sampled_from(["plain", "damped", "anderson"]),
    stop=st.sampled_from(["sequence", "token", "batch"]),
)
def test_every_contraction_is_solved_to_its_tolerance(
    size: int, norm: float, seed: int, method: str, stop: str
) -> None:
    f = linear(contraction(size, norm, seed), normal(2, 1, size, seed=seed + 1))
    z_BLD, stats = run(f, torch.zeros_like(f.x_BLD), method=method, stop=stop, tol=1e-4)
    assert stats.is_converged.all()
    exact_BLD = causal_fixed_point(f)
    # |z - z*| <= |f(z) - z| / (1 - norm), and the residual is relative to |f(z)|, itself near |z*|.
    error_B = (f(z_BLD) - exact_BLD).flatten(1).norm(dim=1)
    assert (error_B <= 2e-4 / (1 - norm) * exact_BLD.flatten(1).norm(dim=1) + 1e-12).all()
