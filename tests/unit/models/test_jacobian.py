"""Theorem 1 in numbers: the state-to-state Jacobian is diagonal for an explicit layer and not for an implicit one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

import implicit_llm
from implicit_llm.analysis.jacobian import (
    NotConverged,
    fixed_point,
    relative_difference,
    state_jacobian,
    state_jacobian_by_autograd,
    step_after,
)

TOKENS = torch.tensor([1, 2, 3, 4])


def one_layer(kind: str, seed: int = 0, **changes: int) -> Any:
    """A random Mamba2 layer with one state entry per head channel, as in the paper's check, in fp64."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "expand": 1, "head_dim": 16, "state_size": 1, "vocab_size": 11} | changes
    config = implicit_llm.load_config(f"mamba2-state-tracking-{kind}", **sizes)
    model = AutoModel.from_config(config).double().eval()
    if kind == "implicit":
        model.solver = replace(model.solver, tol=1e-12, eval_mode="sequential", eval_max_iter=2000)
    return model


def off_diagonal_share(jacobian_SS: Tensor) -> float:
    return float((jacobian_SS - jacobian_SS.diagonal().diag()).norm() / jacobian_SS.norm())


@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (0, {}),
        (1, {"state_size": 3}),
        (0, {"expand": 2, "head_dim": 8, "n_groups": 2, "state_size": 2}),
        (0, {"num_hidden_layers": 2}),
    ],
    ids=["one entry a channel", "three entries", "four heads in two groups", "the second of two layers"],
)
def test_the_low_rank_jacobian_and_its_share_off_the_diagonal_are_those_of_the_full_matrix(
    seed: int,
    changes: dict[str, int],
) -> None:
    step = step_after(one_layer("implicit", seed, **changes), TOKENS, changes.get("num_hidden_layers", 1) - 1)
    z_D = fixed_point(step).z_D
    found, full_SS = state_jacobian(step, z_D), state_jacobian_by_autograd(step, z_D=z_D, num_unroll=150)
    assert relative_difference(found.dense(), full_SS) < 1e-8
    assert 1e-5 < off_diagonal_share(full_SS) < 1
    assert found.off_diagonal_share() == pytest.approx(off_diagonal_share(full_SS), rel=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_an_explicit_transition_is_diagonal(layer: int) -> None:
    step = step_after(one_layer("explicit", num_hidden_layers=2), TOKENS, layer)
    found, full_SS = state_jacobian(step), state_jacobian_by_autograd(step, num_unroll=1)
    assert found.off_diagonal_share() == off_diagonal_share(full_SS) == 0.0
    assert torch.equal(found.dense(), full_SS)


def test_rows_are_formed_in_parts_where_the_state_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_after(one_layer("implicit"), TOKENS)
    whole_SS = state_jacobian(step).dense()
    monkeypatch.setattr("implicit_llm.analysis.jacobian.ROW_ENTRIES", 3 * len(step.state_S))
    assert torch.allclose(state_jacobian(step).dense(), whole_SS, atol=1e-12)


@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_the_radius_of_the_transition_is_that_of_the_whole_jacobian(kind: str) -> None:
    found = state_jacobian(step_after(one_layer(kind, 1, state_size=3), TOKENS))
    exact = torch.linalg.eigvals(found.dense()).abs().max().item()
    assert found.spectral_radius(num_products=400) == pytest.approx(exact, rel=0.02)


def test_rows_and_columns_of_the_jacobian_are_those_of_the_whole() -> None:
    found = state_jacobian(step_after(one_layer("implicit"), TOKENS))
    rows, columns = torch.tensor([7, 3]), torch.tensor([1, 3, 15])
    assert torch.allclose(found.dense(rows, columns), found.dense()[rows][:, columns], atol=1e-15)


def test_a_fixed_point_that_is_not_reached_is_an_error() -> None:
    step = step_after(one_layer("implicit"), TOKENS)
    with pytest.raises(NotConverged, match="after 2 iterations"):
        fixed_point(step, max_iter=2)
