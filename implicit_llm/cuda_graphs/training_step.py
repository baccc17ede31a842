"""Loss and gradients of a training pass on a GPU, forward and backward replayed as one CUDA graph.

The solver's part of a free pass depends on the data and comes before, from the graphs of blocks.py; what is
differentiated, from the embedding over unrolled or phantom steps to the gradients, is the same work in every step.

Shapes: `B` batch, `L` length, `D` model, `V` vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from implicit_llm.cuda_graphs.capture import Recorder, autocast_dtype
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.models.runner import TrainingStep
from implicit_llm.models.stack import StackMap
from implicit_llm.solver.passes import free_stats, phantom_steps, unrolled_pass
from implicit_llm.solver.stats import SolverStats, unrolled_stats
from implicit_llm_contracts.config.solver import SolverConfig

if TYPE_CHECKING:
    from implicit_llm.models.backbone import ImplicitModel
    from implicit_llm.solver.stats import Blocks

    Solve = Callable[[ImplicitModel, Tensor, tuple[Tensor, ...] | None], tuple[Tensor, Blocks]]


@dataclass(frozen=True)
class StepSetting:
    """What a captured step was made for; anything else needs another."""

    shape: tuple[int, ...]
    solver: SolverConfig | None
    autocast: torch.dtype | None
    aligned: bool
    return_logits: bool
    parameters: tuple[tuple[int, bool], ...]  # where they lie, and whether they are trained

    @classmethod
    def of(cls, model: ImplicitForCausalLM, ids_BL: Tensor, aligned: bool, return_logits: bool) -> StepSetting:
        parameters = tuple((parameter.data_ptr(), parameter.requires_grad) for parameter in model.parameters())
        autocast = autocast_dtype(ids_BL.device.type)
        return cls(tuple(ids_BL.shape), model.solver, autocast, aligned, return_logits, parameters)


class StepGraph:
    """The captured step of one model and setting."""

    def __init__(self, setting: StepSetting, model: ImplicitForCausalLM, ids_BL: Tensor) -> None:
        self.setting = setting
        self._reference = weakref.ref(model)  # weak, because the model's runner owns this object
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._ids, self._labels = torch.zeros_like(ids_BL), torch.zeros_like(ids_BL)
        self._is_free = setting.solver is not None and setting.solver.mode == "fixed_point"
        width, dropout = model.config.hidden_size, model.config.dropout
        self._z = torch.zeros(*ids_BL.shape, width, dtype=model.dtype, device=ids_BL.device)
        self._masks: tuple[Tensor, ...] | None = None
        recorder = Recorder(setting.autocast)
        self._mask_graph = recorder.capture(self._draw_masks) if self._is_free and dropout > 0 else None
        self._graph = recorder.capture(self._learn)
        self.num_replays = 0

    def __call__(self, ids_BL: Tensor, labels_BL: Tensor, solve: Solve) -> TrainingStep:
        """The pass of a batch, whose solver's part is `solve`.

        Only the sum can be differentiated, once, before the next call; the next call overwrites the others.
        """
        solver, stats = self.setting.solver, None
        self._ids.copy_(ids_BL)
        self._labels.copy_(labels_BL)
        if self._is_free:
            stats = self._solve(solve)
        elif solver is not None:
            stats = unrolled_stats(solver.num_unroll, len(ids_BL), ids_BL.device)
        self._graph.replay()
        self.num_replays += 1
        total = _Replayed.apply(self, self._total, *self._parameters)
        return total, self._logits, self._hidden, stats

    @property
    def _model(self) -> ImplicitForCausalLM:
        model = self._reference()
        assert model is not None
        return model

    @torch.no_grad()
    def _solve(self, solve: Solve) -> SolverStats:
        assert self.setting.solver is not None
        base = self._model.base
        if self._mask_graph is not None:
            self._mask_graph.replay()
        embedding_BLD = base.get_input_embeddings()(self._ids)
        z_BLD, blocks = solve(base, embedding_BLD, self._masks)
        self._z.copy_(z_BLD)
        return free_stats(blocks, self.setting.solver, positions=False)

    def _draw_masks(self) -> None:
        with torch.no_grad():
            self._masks = self._model.base.draw_dropout(self._z)

    def _learn(self) -> None:
        # Of tensors in the parameters' memory, since what others keep of the parameters' autograd nodes (DDP does) ties
        # them to streams that the capture must not touch.
        pass_of = _Pass(self._model, self._forward)
        aliases = {name: p.detach().requires_grad_(p.requires_grad) for name, p in pass_of.named_parameters()}
        total, hidden_BLD, logits = functional_call(pass_of, aliases, ())
        self.gradients = torch.autograd.grad(total, [p for p in aliases.values() if p.requires_grad], allow_unused=True)
        self._total, self._hidden = total.detach(), hidden_BLD.detach()
        self._logits = None if logits is None else logits.detach()

    def _forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        base, solver = self._model.base, self.setting.solver
        embedding_BLD = base.get_input_embeddings()(self._ids)
        x = base.stack_input(embedding_BLD, None, None, None, dropout_masks=self._masks)
        f = StackMap(base, x)
        if solver is None:
            hidden_BLD = f(embedding_BLD)
        elif self._is_free:
            hidden_BLD = phantom_steps(f, self._z, solver)
        else:
            hidden_BLD = unrolled_pass(f, torch.zeros_like(embedding_BLD), solver)[0]
        total, logits = self._model.total_loss(
            hidden_BLD, self._labels, self.setting.aligned, self.setting.return_logits
        )
        return total, hidden_BLD, logits


class _Pass(nn.Module):
    """A computation with a model, called with other tensors for its parameters."""

    def __init__(self, model: nn.Module, compute: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.forward = model, compute


class _Replayed(torch.autograd.Function):
    """The loss of a replayed step, whose gradients are there already: the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, step: StepGraph, total: Tensor, *parameters: Tensor) -> Tensor:
        ctx.step, ctx.num_replays = step, step.num_replays
        return total.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.step.num_replays != ctx.num_replays:
            raise RuntimeError("a later training pass has overwritten these gradients: call backward() before the next")
        found = ctx.step.gradients
        scaled = iter(torch._foreach_mul([gradient for gradient in found if gradient is not None], grad))
        return None, None, *(None if gradient is None else next(scaled) for gradient in found)
