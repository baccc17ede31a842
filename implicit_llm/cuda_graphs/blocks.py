"""Solve blocks of tokens on a GPU with CUDA graphs, which iterate every sequence of a batch to its fixed point.

An iteration launches dozens of small kernels per layer, and launching them takes longer than running them. So the work
on a block is captured once, over tensors at fixed addresses. `begin` computes the injection. `iterate` evaluates f,
updates z and marks the sequences that are done. `compact` moves the sequences that are not done into tensors for half
as many sequences. `close` evaluates one undamped f and replaces the old states. The host checks only every few
iterations how many sequences are not done. Decoding and sequential mode solve blocks of one token; blockwise evaluation
and training solve longer blocks. An explicit model needs only `close`.

Shapes: `B` sequences, `A` of them not known to be done, `W` tokens of a block, `D` model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from implicit_llm.cuda_graphs.capture import Recorder, autocast_dtype
from implicit_llm.kernels.selection import selected_kernels
from implicit_llm.models.backbone import ImplicitModel
from implicit_llm.models.layers import modules_below
from implicit_llm.models.llama3.attention import seen_in_room
from implicit_llm.models.stack import LayerState, Prefix, StackInput
from implicit_llm.solver.fixed_point import Best
from implicit_llm.solver.passes import Search
from implicit_llm.solver.stats import BlockStats
from implicit_llm_contracts.config.solver import SolverConfig

CHECK_EVERY = 2  # iterations between two checks of how many sequences are not done, in blocks of several tokens
MIN_COMPACTED = 16  # number of sequences below which a smaller batch saves nothing


@torch.no_grad()
def empty_prefix(model: ImplicitModel, embedding_BWD: Tensor) -> Prefix:
    """Return the state before the first token in the layers' own shapes: zeros, or keys and values of no tokens."""
    x = model.stack_input(embedding_BWD, None, None, None)
    after = Prefix(model.apply_stack(torch.zeros_like(embedding_BWD), x, return_states=True)[1], 0)
    return after.first(0) if model.has_growing_state else after.map(torch.zeros_like)


def rounded_dtype(model: ImplicitModel, autocast: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to which iterations may round the states to load them in half the time; None if they may not."""
    return autocast if model.layer_class.rounds_state and selected_kernels() == "triton" else None


@dataclass(frozen=True)
class BlockSetting:
    """The setting for which graphs were captured; any other setting needs other graphs.

    width: the tokens of a block. with_state: whether each block starts from the state before it and can advance this
    state. parameters: the addresses of the model's parameters.
    """

    batch: int
    width: int
    solver: SolverConfig | None
    is_training: bool
    with_state: bool
    dtype: torch.dtype
    autocast: torch.dtype | None
    is_inference: bool
    parameters: tuple[int, ...]

    @classmethod
    def of(cls, model: ImplicitModel, embedding_BWD: Tensor, *, with_state: bool = True) -> BlockSetting:
        """Return the setting of a block in the model's current mode."""
        batch, width, _ = embedding_BWD.shape
        parameters = (of_module for module in modules_below(model) for of_module in module._parameters.values())
        return cls(
            batch,
            width,
            model.solver,
            model.training,
            with_state,
            embedding_BWD.dtype,
            autocast_dtype(embedding_BWD.device.type),
            torch.is_inference_mode_enabled(),
            tuple(parameter.data_ptr() for parameter in parameters if parameter is not None),
        )


@dataclass
class OpenSequences:
    """The sequences that are iterated together: their indices in the whole batch, z, and the input of f."""

    active_A: Tensor
    z_AWD: Tensor
    x: StackInput


class BlockGraph:
    """The graphs of one model and setting, with the states that they carry from block to block. Raises: CaptureFailed.

    prefix: the state before the first block, which is copied; required if the setting has `with_state`. room: the
    number of tokens that fit into growing states, including those of the prefix. has_masks: whether each `begin` gets
    dropout masks (B, W, D), one per layer. open: the whole batch, then the smaller batches to which the sequences that
    are not done move.
    """

    def __init__(
        self,
        setting: BlockSetting,
        model: ImplicitModel,
        prefix: Prefix | None,
        *,
        room: int | None = None,
        has_masks: bool = False,
    ) -> None:
        self.setting = setting
        self.length = 0 if prefix is None else prefix.length
        self._model = cast("ImplicitModel", weakref.proxy(model))  # weak because the model's runner owns this object
        self.room = room
        parameter = next(model.parameters())
        shape = (setting.batch, setting.width, model.config.hidden_size)
        self._embedding = torch.zeros(shape, dtype=setting.dtype, device=parameter.device)
        self._position = torch.arange(self.length, self.length + setting.width, device=parameter.device)
        self._layers = () if prefix is None else prefix.map(self._with_room).layers
        # Iterations may load a rounded copy of the states; `close` loads the states themselves and advances them. A
        # block of one token loads states too few times to repay the copy.
        is_rounded = setting.solver is not None and setting.width > 1
        dtype = rounded_dtype(model, setting.autocast) if is_rounded else None
        self._read = Prefix(self._layers, self.length).rounded(dtype).layers
        self._masks = tuple(torch.ones_like(self._embedding) for _ in model.layers) if has_masks else None
        self._out = torch.zeros_like(self._embedding)
        self.open: list[OpenSequences] = []
        solver = setting.solver
        if solver is not None:
            self._best = Best(self._embedding)
            self._search = Search.of(solver, is_training=setting.is_training)
            self._num_iter = 0  # the most iterations of a sequence in the previous block of one token
            self._update = self._search.update()  # shared by all blocks, because no captured method remembers iterates
        self._capture_all()

    @torch.no_grad()
    def begin(self, embedding_BWD: Tensor, masks: tuple[Tensor, ...] | None = None) -> None:
        """Copy in the next block's input and dropout masks; the block starts from the states after the previous one."""
        self._embedding.copy_(embedding_BWD)
        for mine, mask in zip(self._masks or (), masks or (), strict=True):
            mine.copy_(mask)
        if self.setting.solver is not None:
            self._graphs["begin"].replay()

    @torch.no_grad()
    def solve(self) -> BlockStats:
        """Iterate until every sequence is done or `max_iter` is reached; return statistics. Raises: NonFiniteState."""
        max_iter = self._search.max_iter
        level, check_every, next_check = 0, CHECK_EVERY, CHECK_EVERY
        if self.setting.width == 1:
            # A token takes about as many iterations as the previous token, so the host starts to check just before that
            # number, and then checks after each iteration. A needless iteration changes no result, but took 7 % of a
            # token's time without `token_stack`.
            check_every, next_check = 1, max(CHECK_EVERY, self._num_iter - 1)
        for iteration in range(1, max_iter + 1):
            self._graphs[f"iterate {level}"].replay()
            if iteration < next_check or iteration == max_iter:
                continue
            next_check += check_every
            num_open = self.setting.batch - int(self._best.done.sum())
            if num_open == 0:
                break
            while level + 1 < len(self.open) and num_open <= len(self.open[level + 1].active_A):
                level += 1
                self._graphs[f"compact {level}"].replay()
        best = self._best
        best.raise_if_not_finite()
        if self.setting.width == 1:
            self._num_iter = int(best.num_iter.max())
        is_open_BW = best.residual_BL >= self._search.rule.tol
        return BlockStats(best.num_iter.clone(), best.residual.clone(), best.done.clone(), is_open_BW)

    @property
    def best_BWD(self) -> Tensor:
        """The solution, which the next block overwrites."""
        return self._best.z

    @torch.no_grad()
    def close(self) -> Tensor:
        """Evaluate one undamped f at the solution; the states after the block become the prefix of the next block.

        For an explicit model, evaluate f at the embedding instead.
        Returns: f(z) (B, W, D), which the next `close` overwrites.
        """
        self._graphs["close"].replay()
        self.length += self.setting.width
        return self._out

    def prefix(self) -> Prefix:
        """Return the state before the next block, in this object's own tensors, which the next `close` overwrites."""
        return Prefix(self._layers, self.length, room=self.room)

    def fits(self, setting: BlockSetting, tokens: int) -> bool:
        """Return whether these graphs can serve this setting in sequences of `tokens` tokens, prefix included."""
        return self.setting == setting and (self.room is None or tokens <= self.room)

    def holds(self, prefix: Prefix) -> bool:
        """Return whether `prefix` is the state before the next block, in this object's own tensors."""
        return prefix.layers is self._layers and prefix.length == self.length

    @torch.no_grad()
    def restart(self, prefix: Prefix | None = None) -> None:
        """Copy in the state before the next block (None: the empty state). Growing states must fit into the room."""
        self.length = 0 if prefix is None else prefix.length
        self._position.copy_(torch.arange(self.length, self.length + self.setting.width, device=self._position.device))
        if prefix is None:
            for state in self._states(self._layers):
                state.zero_()
            return
        for state, given in zip(self._states(self._layers), (t for layer in prefix.layers for t in layer), strict=True):
            (state if self.room is None else state[:, :, : self.length]).copy_(given)

    def refresh_weights(self) -> None:
        """Recompute the effective weights, because an optimizer may have changed the parameters."""
        self._graphs["refresh"].replay()

    # ---- the captured parts

    def _refresh(self) -> None:
        for mine, layer in zip(self._weights, self._model.layers, strict=True):
            for old, new in zip(mine or (), layer.weights() or (), strict=True):  # type: ignore[operator]
                if new is not old:  # a weight that needs no computation is the parameter itself
                    old.copy_(new)

    def _begin(self) -> None:
        model, setting = self._model, self.setting
        injection = model.injection(self._embedding) if setting.solver is not None else None
        prefix = None
        if setting.with_state:
            for read, state in zip(self._states(self._read), self._states(self._layers), strict=True):
                if read is not state:
                    read.copy_(state)
            prefix = Prefix(self._read, self.length)
            if self.room is not None:
                seen = seen_in_room(self._position, self.room) if setting.width > 1 else None
                prefix = replace(prefix, room=self.room, position=self._position, seen_LS=seen)
        x = StackInput(self._weights, injection, None, self._masks, model.rope(self._position[None]), prefix)
        if setting.solver is None:
            self.open = [OpenSequences(self._position, self._embedding, x)]
            return
        everyone = torch.arange(setting.batch, device=self._embedding.device)
        self.open[:1] = [OpenSequences(everyone, torch.zeros_like(self._embedding), x)]
        self._best.reset()

    def _iterate(self, level: int) -> None:
        here = self.open[level]
        apply = self._token_stack
        fz = self._model.apply_stack(here.z_AWD, here.x)[0] if apply is None else apply(here.z_AWD, here.x)
        rule, damping = self._search.rule, self._search.damping
        if damping is not None and self._best.advance(here.active_A, here.z_AWD, fz, rule, damping):
            return
        z_next = self._update(here.z_AWD, fz)
        self._best.take(here.active_A, (here.z_AWD, fz, z_next), rule)
        here.z_AWD.copy_(z_next)

    def _compact(self, level: int, size: int) -> None:
        before = self.open[level - 1]
        first = torch.argsort(self._best.done[before.active_A].to(torch.uint8), stable=True)[:size]
        self.open[level : level + 1] = [
            OpenSequences(before.active_A[first], before.z_AWD[first], before.x.select(first))
        ]

    def _close(self) -> None:
        if self.setting.solver is None:  # an explicit model does all its work in this graph
            self._begin()
        z, x = self._embedding if self.setting.solver is None else self._best.z, self.open[0].x
        assert x.prefix is not None
        x = replace(x, prefix=replace(x.prefix, layers=self._layers))
        out, layers = self._model.apply_stack(z, x, return_states=True)
        self._out.copy_(out)
        for mine, new in zip(self._layers, layers, strict=True):
            for old_state, state in zip(mine, new, strict=True):
                if state is not old_state:  # keys and values are already written in place
                    old_state.copy_(state)
        self._position += self.setting.width

    def _capture_all(self) -> None:
        recorder, position = Recorder(self.setting.autocast), self._position.clone()
        kept = [state.clone() for state in self._states(self._layers)]
        with torch.no_grad():
            with torch.autocast("cuda", dtype=self.setting.autocast, enabled=self.setting.autocast is not None):
                self._weights = tuple(layer.weights() for layer in self._model.layers)  # type: ignore[operator]
            self._token_stack = self._make_token_stack()
            self._graphs = {name: recorder.capture(part) for name, part in self._parts()}
            for state, before in zip(self._states(self._layers), kept, strict=True):
                state.copy_(before)
            self._position.copy_(position)

    def _make_token_stack(self) -> Callable[[Tensor, StackInput], Tensor] | None:
        """Return a faster evaluation of f for one token of one sequence, or None if this setting has none."""
        setting = self.setting
        if setting.solver is None or setting.width * setting.batch > 1 or not setting.with_state:
            return None
        if self._masks is not None or setting.dtype != torch.float32 or setting.autocast is not None:
            return None
        return self._model.token_stack(self._weights)

    def _parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "refresh", self._refresh
        if self.setting.solver is not None:
            yield "begin", self._begin
            yield "iterate 0", partial(self._iterate, 0)
            for level, size in enumerate(self._smaller_batches(), start=1):
                yield f"compact {level}", partial(self._compact, level, size)
                yield f"iterate {level}", partial(self._iterate, level)
        if self.setting.with_state:
            yield "close", self._close

    def _smaller_batches(self) -> list[int]:
        """Return the sizes to which the batch shrinks; none for a small batch, single tokens, or the rule "batch"."""
        sizes, size = [], self.setting.batch // 2
        while size >= MIN_COMPACTED and self.setting.width > 1 and self._search.rule.stop != "batch":
            sizes.append(size)
            size //= 2
        return sizes

    @staticmethod
    def _states(layers: tuple[LayerState, ...]) -> list[Tensor]:
        return [state for layer in layers for state in layer]

    def _with_room(self, state: Tensor) -> Tensor:
        """Return a copy of a state; keys and values (batch, heads, tokens, head width) get room for later tokens."""
        if self.room is None:
            return state.clone()
        batch, heads, _, width = state.shape
        roomy = state.new_zeros(batch, heads, self.room, width)
        roomy[:, :, : state.shape[2]] = state
        return roomy
