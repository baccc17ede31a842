"""Theorem 1 in numbers: the state-to-state Jacobian is diagonal for an explicit layer and not for an implicit one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModel

import implicit_llm
from implicit_llm.analysis.jacobian import (
    NotConverged,
    explicit_jacobian,
    fixed_point,
    implicit_jacobian,
    implicit_jacobian_by_autograd,
    off_diagonal_mass,
    step_after,
)
from implicit_llm.analysis.spectral_radius import spectral_radius


def one_layer(kind: str):
    """A random Mamba2 layer with one state entry per head channel, as in the paper's check, in fp64."""
    torch.manual_seed(0)
    config = implicit_llm.load_config(
        f"mamba2-state-tracking-{kind}", hidden_size=16, expand=1, head_dim=16, state_size=1, vocab_size=11
    )
    model = AutoModel.from_config(config).double().eval()
    if kind == "implicit":
        model.solver = replace(model.solver, tol=1e-12, eval_mode="sequential", eval_max_iter=2000)
    return model


def test_formula_and_autograd_agree_to_1e_6_and_the_transition_is_not_diagonal() -> None:
    step = step_after(one_layer("implicit"), torch.tensor([1, 2, 3, 4]))
    formula, autograd = implicit_jacobian(step), implicit_jacobian_by_autograd(step)
    assert (formula - autograd).abs().max() < 1e-6
    assert off_diagonal_mass(formula) > 1e-3


def test_an_explicit_transition_is_diagonal() -> None:
    assert off_diagonal_mass(explicit_jacobian(step_after(one_layer("explicit"), torch.tensor([1, 2, 3, 4])))) == 0.0


def test_spectral_radius_is_the_largest_eigenvalue_of_the_jacobian() -> None:
    model = one_layer("implicit")
    input_ids = torch.randint(0, 11, (2, 3))
    z_BLD = model(input_ids).last_hidden_state
    x = model.stack_input(model.get_input_embeddings()(input_ids), None, None, None)
    estimate = spectral_radius(model, x, z_BLD, num_products=400)
    for row in range(2):
        narrowed = x.select(torch.tensor([row]))

        def f(z, narrowed=narrowed):
            return model.apply_stack(z.view(1, 3, 16), narrowed)[0].flatten()

        jacobian = torch.autograd.functional.jacobian(f, z_BLD[row].flatten())
        assert estimate[row].item() == pytest.approx(torch.linalg.eigvals(jacobian).abs().max().item(), rel=0.02)


def test_a_fixed_point_that_is_not_reached_is_an_error() -> None:
    step = step_after(one_layer("implicit"), torch.tensor([1, 2, 3]))
    with pytest.raises(NotConverged, match="after 2 iterations"):
        fixed_point(step, step.state_S, max_iter=2)
