"""Compute loss and gradients of a training pass on a GPU; one CUDA graph replays the forward and backward pass.

The differentiated part does the same work in every step: embedding, the differentiated evaluations of f (or the layers
of an explicit model), loss and gradients.
The solver's part of a free pass depends on the data. It runs before this graph, with the graphs of blocks.py.
With several processes and one micro-batch per step, the graph also sums the gradients over all ranks, while the rest of
the backward pass runs.
With state passing, a step also computes the states after its sequences, without a gradient.

Shapes: `B` batch, `L` length, `D` model, `V` vocabulary.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from implicit_llm.cuda_graphs.blocks import empty_prefix, rounded_dtype
from implicit_llm.cuda_graphs.capture import Recorder, autocast_dtype
from implicit_llm.models.backbone import ImplicitModel, StackMap
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.models.runner import TrainingStep
from implicit_llm.models.stack import LayerState, Prefix, StackInput
from implicit_llm.solver.passes import differentiated_steps, free_stats, unrolled_pass
from implicit_llm.solver.stats import Block, SolverStats, unrolled_stats
from implicit_llm_contracts.config.solver import SolverConfig

Solve = Callable[[ImplicitModel, Tensor, tuple[Tensor, ...] | None, Prefix | None], tuple[Tensor, list[Block]]]


@dataclass(frozen=True)
class StepSetting:
    """The setting for which a step was captured; any other setting needs another capture.

    with_state: whether the step starts from a state, carried or empty, and advances it. reducer: sums the gradients
    over ranks; None if the graph does not sum them.
    """

    shape: tuple[int, ...]
    solver: SolverConfig | None
    autocast: torch.dtype | None
    aligned: bool
    return_logits: bool
    with_state: bool
    parameters: tuple[tuple[int, bool], ...]  # their addresses, and whether they are trained
    reducer: Any

    @classmethod
    def of(
        cls, model: ImplicitForCausalLM, ids_BL: Tensor, aligned: bool, return_logits: bool, *, with_state: bool
    ) -> StepSetting:
        parameters = tuple((parameter.data_ptr(), parameter.requires_grad) for parameter in model.parameters())
        shape, autocast, reducer = tuple(ids_BL.shape), autocast_dtype(ids_BL.device.type), model.base.runner.reducer
        return cls(shape, model.solver, autocast, aligned, return_logits, with_state, parameters, reducer)


class StepGraph:
    """The training step of one model and setting, captured when the object is created. Raises: CaptureFailed."""

    def __init__(self, setting: StepSetting, model: ImplicitForCausalLM, ids_BL: Tensor) -> None:
        self.setting = setting
        self._reference = weakref.ref(model)  # weak because the model's runner owns this object
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._ids, self._labels = torch.zeros_like(ids_BL), torch.zeros_like(ids_BL)
        self._is_free = setting.solver is not None and setting.solver.mode == "fixed_point"
        width, dropout = model.config.hidden_size, model.config.dropout
        self._z = torch.zeros(*ids_BL.shape, width, dtype=model.dtype, device=ids_BL.device)
        self._masks: tuple[Tensor, ...] | None = None
        self._before = empty_prefix(model.base, self._z) if setting.with_state else None
        self._after: tuple[LayerState, ...] = ()
        self._rounded = rounded_dtype(model.base, setting.autocast)
        recorder = Recorder(setting.autocast)
        self._mask_graph = recorder.capture(self._draw_masks) if self._is_free and dropout > 0 else None
        learn, learn_alone = partial(self._learn, setting.reducer), partial(self._learn, None)
        self._graph = recorder.capture(learn, None if setting.reducer is None else learn_alone)
        self._stats: SolverStats | None = None
        self._failure: FloatingPointError | None = None
        self.num_replays = 0

    def prepare(self, ids_BL: Tensor, labels_BL: Tensor, before: Prefix | None, solve: Solve) -> None:
        """Copy in a batch and the state before it (None if empty); in a free pass, run the solver's part by `solve`.

        If an iterate is NaN or infinite, `replay` raises the error. Raises: CaptureFailed.
        """
        solver = self.setting.solver
        self._ids.copy_(ids_BL)
        self._labels.copy_(labels_BL)
        if self._before is not None:
            given = None if before is None else iter([t for layer in before.layers for t in layer])
            for mine in (t for layer in self._before.layers for t in layer):
                mine.zero_() if given is None else mine.copy_(next(given))
        self._failure = None
        if solver is not None and not self._is_free:
            self._stats = unrolled_stats(solver.num_unroll + self.setting.with_state, len(ids_BL), ids_BL.device)
        elif solver is not None:
            try:
                self._stats = self._solve(solve)
            except FloatingPointError as error:
                self._failure = error
                self._z.fill_(math.nan)

    def replay(self) -> TrainingStep:
        """Run the pass of the batch that `prepare` copied in.

        Of the returned tensors, only the sum of losses can be differentiated, once and before the next call. The next
        call overwrites the logits and the hidden states.
        Raises: NonFiniteState of the solver, but only after the replay, because other ranks wait for the gradients of
            this rank, which are then NaN.
        """
        self._graph.replay()
        self.num_replays += 1
        if self.setting.reducer is not None:
            self.setting.reducer.is_done = True
        if self._failure is not None:
            raise self._failure
        total = _Replayed.apply(self, self._total, *self._parameters)
        return total, self._logits, self._hidden, self._stats

    def states_after(self, length: int) -> Prefix:
        """Return the states after the sequences of the last replay; `length` tokens precede these sequences."""
        return Prefix(self._after, length + self._ids.shape[1]).map(Tensor.clone)

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
        z_BLD, blocks = solve(base, embedding_BLD, self._masks, self._before)
        self._z.copy_(z_BLD)
        stats = free_stats(blocks, self.setting.solver)
        stats.num_closing += self.setting.with_state  # f is evaluated once more for the state
        return stats

    def _draw_masks(self) -> None:
        with torch.no_grad():
            self._masks = self._model.base.draw_dropout(self._z)

    def _learn(self, reducer: Any) -> None:
        # We differentiate aliases that share the parameters' memory. Other code, such as DDP, may store the parameters'
        # own autograd nodes, which are then tied to streams that the capture must not touch.
        pass_of = _Pass(self._model, self._forward)
        aliases = {name: p.detach().requires_grad_(p.requires_grad) for name, p in pass_of.named_parameters()}
        trained = [alias for alias in aliases.values() if alias.requires_grad]
        total, hidden_BLD, logits = functional_call(pass_of, aliases, ())
        with nullcontext() if reducer is None else reducer.over_ranks(trained):
            total.backward()
        self.gradients = [alias.grad for alias in trained]
        self._total, self._hidden = total.detach(), hidden_BLD.detach()
        self._logits = None if logits is None else logits.detach()

    def _forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        base, solver = self._model.base, self.setting.solver
        embedding_BLD = base.get_input_embeddings()(self._ids)
        x = StackInput(
            weights=cast("tuple[Any, ...]", _WeightsInTurn(base.layers)),
            injection_BLE=None if solver is None else base.injection(embedding_BLD),
            dropout_masks=base.draw_dropout(embedding_BLD) if self._masks is None else self._masks,
            rope=base.rope(torch.arange(embedding_BLD.shape[1], device=embedding_BLD.device)[None]),
            prefix=None if self._before is None or solver is None else self._before.rounded(self._rounded),
        )
        f = StackMap(base, x)
        if solver is None:
            x = replace(x, prefix=self._before)
            hidden_BLD, self._after = base.apply_stack(embedding_BLD, x, return_states=self.setting.with_state)
            self._after = tuple(tuple(state.detach() for state in layer) for layer in self._after)
        elif self._is_free:
            hidden_BLD = differentiated_steps(f, self._z, solver)
        else:
            hidden_BLD = unrolled_pass(f, torch.zeros_like(embedding_BLD), solver)[0]
        if solver is not None and self._before is not None:
            with torch.no_grad():
                self._after = base.apply_stack(hidden_BLD, replace(x, prefix=self._before), return_states=True)[1]
        total, logits = self._model.total_loss(
            hidden_BLD, self._labels, self.setting.aligned, self.setting.return_logits
        )
        return total, hidden_BLD, logits


class _WeightsInTurn:
    """The `layer.weights()` of each layer, computed when the layer is first applied.

    Autograd runs in the reverse order of the forward pass. If all weights were computed before the first layer, the
    gradient of every parameter would be complete only at the very end, and no sum over ranks could begin earlier.
    With `gradient="series"`, the steps without gradient compute weights of their own, which the last step replaces.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = layers
        self._found: dict[int, tuple[bool, Any]] = {}

    def __getitem__(self, index: int) -> Any:
        is_trained, weights = self._found.get(index, (None, None))
        if is_trained != torch.is_grad_enabled():
            weights = self._layers[index].weights()  # type: ignore[operator]
            self._found[index] = torch.is_grad_enabled(), weights
        return weights


class _Pass(nn.Module):
    """A module that runs a computation with a model, so that `functional_call` can replace the model's parameters."""

    def __init__(self, model: nn.Module, compute: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.forward = model, compute


class _Replayed(torch.autograd.Function):
    """The loss of a replayed step; its gradients exist already, so the backward pass only scales them."""

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
