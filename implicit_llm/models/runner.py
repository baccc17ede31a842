"""Run the passes of a model kernel by kernel; `implicit_llm.cuda_graphs` runs them from CUDA graphs instead.

Shapes: `B` batch, `L` length, `D` model, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.stack import Prefix
from implicit_llm.solver.passes import evaluation_pass, training_solve
from implicit_llm.solver.stats import Block, SolverStats
from implicit_llm_contracts.config.solver import SolverConfig

# The sum of the cross entropies, the logits (B, L, V) if requested, the last hidden state (B, L, D), and the solver's
# statistics, which are None for an explicit model.
TrainingStep = tuple[Tensor, Tensor | None, Tensor, SolverStats | None]
Token = tuple[Tensor, SolverStats | None]  # the last hidden state (B, 1, D), statistics as above


class Runner:
    """A runner that runs the solver's part of each pass kernel by kernel.

    Assign another runner to `model.base.runner` to run the passes of a model in another way. Models import this module,
    so the types of models are `Any` here. `model` is the language model for `training_step` and its backbone for
    `next_token`; `f` is a `StackMap` of the backbone.
    reducer: the `training.gradients.GradientReducer` of several processes, for a runner that computes gradients in the
    forward pass.
    """

    reducer: Any = None

    def training_step(
        self,
        model: Any,
        ids_BL: Tensor,
        labels_BL: Tensor,
        cache: ConvergedStateCache | None,
        *,
        aligned: bool,
        return_logits: bool,
    ) -> TrainingStep | None:
        """Run a whole training pass with loss and gradients; return None if the model has to compute the pass itself.

        This class always returns None.
        cache: holds the states before the sequences, and the pass advances it; None if the sequences start from the
            empty state and their last states are not needed.
        """
        return None

    def next_token(self, model: Any, embedding_BLD: Tensor, cache: ConvergedStateCache) -> Token | None:
        """Run one token's pass and advance the cache; return None, as always here, if the model has to run the pass."""
        return None

    def training_solve(self, f: Any, embedding_BLD: Tensor, solver: SolverConfig) -> tuple[Tensor, list[Block]]:
        """Run `solver.passes.training_solve` from z = 0."""
        return training_solve(f, torch.zeros_like(embedding_BLD), solver, f.x.prefix)

    def evaluation_pass(
        self, f: Any, embedding_BLD: Tensor, solver: SolverConfig
    ) -> tuple[Tensor, Prefix, SolverStats]:
        """Run `solver.passes.evaluation_pass` from z = 0."""
        return evaluation_pass(f, torch.zeros_like(embedding_BLD), solver, f.x.prefix)
