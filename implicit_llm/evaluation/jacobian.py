"""Measures of the state's Jacobian at one token: how far it is from diagonal, and how the fixed point contracts there.

Everything is in fp64. Shapes: `L` length, `S` entries of a layer's state, `K` coordinates, `D` model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModel

import implicit_llm
from implicit_llm.analysis.jacobian import (
    FixedPoint,
    JacobianStep,
    NotConverged,
    explicit_jacobian,
    fixed_point,
    implicit_jacobian,
    implicit_jacobian_by_autograd,
    off_diagonal_mass,
    output_jacobian,
    relative_difference,
    step_after,
    transition_radius,
)
from implicit_llm.evaluation.solver_tally import finite
from implicit_llm.models.backbone import ImplicitMamba2Model

log = logging.getLogger(__name__)

MEASURES = ("off_diagonal_share", "transition_radius", "f_radius", "relative_difference", "num_iter", "residual")
SHOWN = 48  # coordinates of a heat map
MAX_ITER, TOL, TAU = 2000, 1e-12, 0.8
# Derivatives converge at the pace of the iterates, so as many iterations again and half as many leave no error.
UNROLL_FACTOR, MIN_UNROLL = 1.5, 20

# The paper's own check: one random layer with one state entry for each channel.
RANDOM_LAYER = {"hidden_size": 64, "expand": 1, "head_dim": 64, "state_size": 1, "num_hidden_layers": 1}
RANDOM_VOCAB, RANDOM_TOKENS, RANDOM_SEEDS = 60, 6, (0, 1, 2, 3)


@dataclass(frozen=True)
class JacobianConfig:
    """Which tokens of the test rows, and how much of the state.

    `positions` count tokens from 1; `num_sequences` are the first rows of the shortest test set. Of the state of layer
    `layer`, at most `max_state` entries, drawn with a fixed seed, are looked at as coordinates; `checked_rows` of their
    rows are compared with autograd through the iteration, which costs a solve each.
    """

    kind: Literal["jacobian"]
    positions: tuple[int, ...] = (8, 16)
    num_sequences: int = 2
    max_state: int = 256
    layer: int = 0
    checked_rows: int = 4

    def __post_init__(self) -> None:
        if not self.positions or min(self.positions) < 2:
            raise ValueError(
                f"positions: {list(self.positions)} must name tokens from the second on, which have a state before them"
            )
        for key in ("num_sequences", "max_state", "checked_rows"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: {getattr(self, key)} is not a positive integer; use 1 or more")
        if self.layer < 0:
            raise ValueError(f"layer: {self.layer} is negative; layers count from 0")


def prepare(model: ImplicitMamba2Model) -> ImplicitMamba2Model:
    """The model in fp64 and evaluation mode, its states found token by token to a tight tolerance; in place."""
    model = model.double().eval()
    if model.solver is not None:
        model.solver = replace(model.solver, tol=TOL, eval_mode="sequential", eval_stop="sequence", eval_max_iter=512)
    return model


def measure(model: ImplicitMamba2Model, input_ids_L: Tensor, config: JacobianConfig) -> dict[str, Any]:
    """The measures at the last token of `input_ids`; None where the fixed point was not reached.

    `entries` are absolute values between the first SHOWN coordinates, for a picture.
    """
    known: dict[str, Any] = dict.fromkeys((*MEASURES, "entries"))
    try:
        step = step_after(model, input_ids_L, config.layer)
    except FloatingPointError as error:
        log.warning("token %d: %s", len(input_ids_L), error)
        return known | {"state_size": None, "num_coordinates": None}
    coordinates_K = choose_coordinates(len(step.state_S), config.max_state).to(step.state_S.device)
    known |= {"state_size": len(step.state_S), "num_coordinates": len(coordinates_K)}
    if not step.is_implicit:
        jacobian_KK = explicit_jacobian(step, coordinates_K)
        return known | _of_jacobian(jacobian_KK) | {"transition_radius": finite(transition_radius(step, None))}
    try:
        found = fixed_point(step, tol=TOL, max_iter=MAX_ITER, tau=TAU)
    except NotConverged as error:
        log.warning("token %d: %s", len(input_ids_L), error)
        return known
    return known | _of_fixed_point(step, coordinates_K, found, config.checked_rows)


def _of_fixed_point(step: JacobianStep, coordinates_K: Tensor, found: FixedPoint, checked_rows: int) -> dict[str, Any]:
    jacobian_KK = implicit_jacobian(step, coordinates_K, found.z_D)
    rows = torch.linspace(0, len(coordinates_K) - 1, min(checked_rows, len(coordinates_K))).long()
    num_unroll = MIN_UNROLL + int(UNROLL_FACTOR * found.num_iter)
    checked = implicit_jacobian_by_autograd(
        step, coordinates_K[rows], coordinates_K, z_D=found.z_D, num_unroll=num_unroll, tau=TAU
    )
    return _of_jacobian(jacobian_KK) | {
        "transition_radius": finite(transition_radius(step, found.z_D)),
        "f_radius": finite(float(torch.linalg.eigvals(output_jacobian(step, found.z_D)).abs().max())),
        "relative_difference": finite(relative_difference(jacobian_KK[rows], checked)),
        "num_iter": found.num_iter,
        "residual": finite(found.residual),
    }


def _of_jacobian(jacobian_KK: Tensor) -> dict[str, Any]:
    shown = jacobian_KK[:SHOWN, :SHOWN].abs().tolist()
    return {
        "off_diagonal_share": finite(off_diagonal_mass(jacobian_KK)),
        "entries": [[float(f"{value:.3g}") for value in row] for row in shown],
    }


def choose_coordinates(state_size: int, max_state: int) -> Tensor:
    """Entries of the state, in order: all of them, or `max_state` drawn with a fixed seed."""
    if state_size <= max_state:
        return torch.arange(state_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(state_size, generator=generator)[:max_state].sort().values


def random_layer(seed: int, *, is_implicit: bool) -> tuple[ImplicitMamba2Model, Tensor]:
    """One random layer in the paper's setting, and tokens for it; leaves the random state as it was."""
    name = f"mamba2-state-tracking-{'implicit' if is_implicit else 'explicit'}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = implicit_llm.load_config(name, vocab_size=RANDOM_VOCAB, **RANDOM_LAYER)
        model = prepare(AutoModel.from_config(config))
        return model, torch.randint(RANDOM_VOCAB, (RANDOM_TOKENS,))
