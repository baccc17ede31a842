"""Reading the same tokens in several ways.

An implicit model is read in each of its modes. An explicit model is read in parallel and token by token with its cache:
the two agree but for rounding, which says how much of an implicit model's difference is arithmetic.

Shapes: `B` batch, `L` length, `D` model, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm_contracts.config.evaluation import PARALLEL, SEQUENTIAL, ModeConfig

# How near a mode is to generation: the nearer one of a pair is the reference.
_NEARNESS = {"sequential": 0, "blockwise": 1, "simultaneous": 2}


@dataclass(frozen=True)
class ModeOutput:
    """Hidden states (B, L, D), or logits (B, L, V) where `head` is None; the solver's statistics, None if explicit."""

    states: Tensor
    head: nn.Module | None
    stats: Any

    def logits(self, positions: slice) -> Tensor:
        """fp32 logits at some positions."""
        states = self.states[:, positions]
        return (states if self.head is None else self.head(states)).float()


class AllModes(nn.Module):
    """A model whose output holds that of every mode, by name; the model's solver stays as it was."""

    def __init__(self, model: Any, modes: Sequence[ModeConfig]) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.modes = tuple(modes)
        self.solver = getattr(model, "solver", None)

    def forward(self, input_ids: Tensor) -> Mapping[str, ModeOutput]:
        if self.solver is None:
            by_token = mode_output(self.model, input_ids, is_by_token=True)
            return {PARALLEL: mode_output(self.model, input_ids), SEQUENTIAL: by_token}
        found = {}
        try:
            for mode in self.modes:
                self.model.solver = mode.solver(self.solver)
                found[mode.name] = mode_output(self.model, input_ids)
        finally:
            self.model.solver = self.solver
        return found


def mode_output(model: Any, input_ids: Tensor, *, is_by_token: bool = False) -> ModeOutput:
    """One pass over all tokens, or one for each of them with the cache of those before."""
    is_own = isinstance(model, ImplicitForCausalLM)
    inner = model.base if is_own else model
    head = model.lm_head if is_own else None
    key = "last_hidden_state" if is_own else "logits"
    if not is_by_token:
        out = inner(input_ids=input_ids)
        return ModeOutput(getattr(out, key), head, getattr(out, "solver_stats", None))
    cache, states = None, []
    for position in range(input_ids.shape[1]):
        token = input_ids[:, position : position + 1]
        out = inner(input_ids=token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        states.append(getattr(out, key))
    return ModeOutput(torch.cat(states, dim=1), head, None)


def pairs_of(modes: Sequence[ModeConfig], *, is_implicit: bool) -> list[tuple[str, str]]:
    """Every two modes, the reference second: the one nearer to generation, of equals the one named first.

    Of a sweep, modes with the same value of the same setting.
    """
    if not is_implicit:
        return [(PARALLEL, SEQUENTIAL)]
    ordered = sorted(modes, key=lambda mode: _NEARNESS[mode.eval_mode])
    pairs = [(mode, other) for index, other in enumerate(ordered) for mode in ordered[index + 1 :]]
    return [(mode.name, other.name) for mode, other in pairs if _swept(mode) == _swept(other)]


def _swept(mode: ModeConfig) -> tuple[str, float] | None:
    return None if mode.sweep is None else (mode.sweep.key, mode.sweep.value)


def goes_by_token(model: Any) -> bool:
    """Whether an explicit model can be read token by token here: it returns its cache as `past_key_values`."""
    token = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
    with torch.inference_mode():
        return getattr(model(input_ids=token, use_cache=True), "past_key_values", None) is not None
