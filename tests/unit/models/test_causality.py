"""Later tokens change earlier logits through the number of iterations alone: within the tolerance, often not at all.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_llm import SolverConfig

LENGTH, BLOCK = 12, 4
METHODS, STOPS = ("plain", "damped", "anderson"), ("sequence", "token", "batch")
TOL = 1e-3
MULTIPLE = 10  # of tol: how far logits may move, in their standard deviations, where a solve converges
NEVER: dict[str, Any] = {"tol": 1e-14, "max_iter": 6, "eval_max_iter": 6}  # so that every solve takes all iterations
GRID = [  # a method sets training alone
    *(pytest.param(method, stop, True, id=f"{method}-{stop}-train") for method, stop in product(METHODS, STOPS)),
    *(pytest.param("plain", stop, False, id=f"{stop}-eval") for stop in STOPS),
]


def moved(model: Any, position: int, is_training: bool) -> Tensor:
    """How far the logits before `position` move if later tokens change, in standard deviations (B, L, V)."""
    generator = torch.Generator().manual_seed(position)
    ids_BL, other_BL = torch.randint(1, 23, (2, 3, LENGTH), generator=generator)
    other_BL[:, :position] = ids_BL[:, :position]
    with torch.no_grad():
        before_BLV, after_BLV = (model.train(is_training)(ids).logits[:, :position] for ids in (ids_BL, other_BL))
    return (before_BLV - after_BLV).abs() / before_BLV.std()


def set_solver(model: Any, method: str, stop: str, **settings: Any) -> None:
    model.solver = SolverConfig(**{"method": method, "stop": stop, "eval_stop": stop, "tol": TOL} | settings)


@pytest.mark.parametrize(
    ("settings", "most"), [(NEVER, 0.0), ({"max_iter": 100}, MULTIPLE * TOL)], ids=["equal numbers", "converged"]
)
@pytest.mark.parametrize(("method", "stop", "is_training"), GRID)
def test_in_one_block_logits_move_by_a_few_tolerances_and_not_at_all_with_equal_numbers_of_iterations(
    make_model, family, method, stop, is_training, settings, most
) -> None:
    model = make_model(family, num_hidden_layers=2)
    set_solver(model, method, stop, eval_mode="simultaneous", **settings)
    for position in (1, 5, LENGTH - 1):
        assert moved(model, position, is_training).max() <= most


@pytest.mark.parametrize(("method", "stop", "is_training"), GRID)
def test_across_the_border_of_blocks_no_logit_moves(make_model, family, method, stop, is_training) -> None:
    model = make_model(family, num_hidden_layers=2)
    set_solver(model, method, stop, eval_mode="blockwise", eval_block_len=BLOCK, block_len=BLOCK)
    for position in range(BLOCK, LENGTH, BLOCK):
        assert moved(model, position, is_training).max() == 0


@pytest.mark.parametrize("stop", STOPS)
def test_in_sequential_evaluation_no_logit_moves(make_model, family: str, stop: str) -> None:
    model = make_model(family, num_hidden_layers=2)
    set_solver(model, "plain", stop, eval_mode="sequential")
    for position in (1, 5, LENGTH - 1):
        assert moved(model, position, is_training=False).max() == 0


def test_in_an_unrolled_pass_and_in_an_explicit_model_no_logit_moves(make_model, family: str) -> None:
    unrolled, explicit = (make_model(family, kind, num_hidden_layers=2) for kind in ("implicit", "explicit"))
    set_solver(unrolled, "plain", "sequence", mode="unrolled", eval_mode="as_trained")
    for model, is_training, position in product((unrolled, explicit), (True, False), (1, 5, LENGTH - 1)):
        assert moved(model, position, is_training).max() == 0
