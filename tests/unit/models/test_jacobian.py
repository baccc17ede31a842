"""Theorem 1 in numbers: the state-to-state Jacobian is diagonal for an explicit layer and not for an implicit one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    relative_difference,
    step_after,
    transition_radius,
)
from implicit_llm.analysis.spectral_radius import spectral_radius


def one_layer(kind: str, seed: int = 0, **changes: int) -> Any:
    """A random Mamba2 layer with one state entry per head channel, as in the paper's check, in fp64."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "expand": 1, "head_dim": 16, "state_size": 1, "vocab_size": 11} | changes
    config = implicit_llm.load_config(f"mamba2-state-tracking-{kind}", **sizes)
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


def test_a_block_of_the_jacobian_is_a_block_of_the_whole_and_checks_against_autograd_row_by_row() -> None:
    step = step_after(one_layer("implicit", 1, state_size=3), torch.tensor([1, 2, 3, 4]))
    coordinates, rows = torch.tensor([1, 7, 20, 40]), torch.tensor([7, 40])
    z_D = fixed_point(step).z_D
    whole, block = implicit_jacobian(step), implicit_jacobian(step, coordinates, z_D)
    assert torch.allclose(block, whole[coordinates][:, coordinates], atol=1e-10)
    checked = implicit_jacobian_by_autograd(step, rows, coordinates, z_D=z_D, num_unroll=200)
    assert relative_difference(checked, whole[rows][:, coordinates]) < 1e-8


def test_rows_are_formed_in_parts_where_the_state_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_after(one_layer("implicit"), torch.tensor([1, 2, 3, 4]))
    whole = implicit_jacobian(step)
    monkeypatch.setattr("implicit_llm.analysis.jacobian.ROW_ENTRIES", 3 * len(step.state_S))
    assert torch.allclose(implicit_jacobian(step), whole, atol=1e-12)


def test_the_radius_of_the_transition_is_that_of_the_whole_jacobian() -> None:
    step = step_after(one_layer("implicit", 1, state_size=3), torch.tensor([1, 2, 3, 4]))
    z_D = fixed_point(step).z_D
    exact = torch.linalg.eigvals(implicit_jacobian(step, z_D=z_D)).abs().max().item()
    assert transition_radius(step, z_D, num_products=400) == pytest.approx(exact, rel=0.02)
    explicit = step_after(one_layer("explicit"), torch.tensor([1, 2, 3, 4]))
    assert transition_radius(explicit, None) == pytest.approx(explicit_jacobian(explicit).abs().max().item())


@pytest.mark.parametrize("layer", [0, 1])
def test_in_a_stack_the_state_of_an_explicit_layer_moves_diagonally_and_that_of_an_implicit_one_does_not(
    layer: int,
) -> None:
    explicit = step_after(one_layer("explicit", num_hidden_layers=2), torch.tensor([1, 2, 3, 4]), layer)
    assert off_diagonal_mass(explicit_jacobian(explicit)) == 0.0
    implicit = step_after(one_layer("implicit", num_hidden_layers=2), torch.tensor([1, 2, 3, 4]), layer)
    formula = implicit_jacobian(implicit)
    assert off_diagonal_mass(formula) > 1e-6
    assert relative_difference(implicit_jacobian_by_autograd(implicit), formula) < 1e-8


def test_a_fixed_point_that_is_not_reached_is_an_error() -> None:
    step = step_after(one_layer("implicit"), torch.tensor([1, 2, 3]))
    with pytest.raises(NotConverged, match="after 2 iterations"):
        fixed_point(step, max_iter=2)
