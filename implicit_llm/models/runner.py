"""Run the passes of a model kernel by kernel; `implicit_llm.cuda_graphs` runs them from CUDA graphs instead.

Shapes: `B` batch, `L` length, `D` model, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.stack import Prefix
from implicit_llm.solver.passes import evaluation_pass, training_solve
from implicit_llm.solver.stats import SolverStats
from implicit_llm_contracts.config.solver import SolverConfig

if TYPE_CHECKING:
    from implicit_llm.solver.stats import Blocks

# The summed cross entropy, logits (B, L, V) if requested, last hidden state (B, L, D), solver statistics if implicit.
TrainingStep = tuple[Tensor, Tensor | None, Tensor, SolverStats | None]
Token = tuple[Tensor, SolverStats | None]  # last hidden state (B, 1, D), solver statistics if implicit


class Reducer(Protocol):
    """An object that sums gradients over ranks. is_done: whether the gradients of this step are summed already."""

    is_done: bool

    def over_ranks(self, leaves: Sequence[Tensor] | None = None) -> AbstractContextManager[None]:
        """Sum the gradients that a backward pass in this context adds to `leaves` (default: the trained parameters)."""
        ...

    def is_true_anywhere(self, is_true: bool) -> bool:
        """Return whether `is_true` is true on any rank. The call is collective."""
        ...


class Runner:
    """A runner that runs the solver's part of each pass kernel by kernel.

    A model calls `model.base.runner`; assign another runner to replay the solver's part, or whole steps and tokens.
    Models import this module, so it cannot import their types: `model` is the calling model, `f` its StackMap.
    reducer: sums gradients over ranks, for a runner that computes gradients in the forward pass.
    """

    reducer: Reducer | None = None

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

        cache: the states before the sequences, which the pass advances; None if the sequences start from the empty
            state and their last states are not needed.
        """
        return None

    def next_token(self, model: Any, embedding_BLD: Tensor, cache: ConvergedStateCache) -> Token | None:
        """Run the pass of a single token and advance the cache; return None if the model has to compute it itself."""
        return None

    def training_solve(self, f: Any, embedding_BLD: Tensor, solver: SolverConfig) -> tuple[Tensor, Blocks]:
        """Run `solver.passes.training_solve` from z = 0."""
        return training_solve(f, torch.zeros_like(embedding_BLD), solver, f.x.prefix)

    def evaluation_pass(
        self, f: Any, embedding_BLD: Tensor, solver: SolverConfig
    ) -> tuple[Tensor, Prefix, SolverStats]:
        """Run `solver.passes.evaluation_pass` from z = 0."""
        return evaluation_pass(f, torch.zeros_like(embedding_BLD), solver, f.x.prefix)
