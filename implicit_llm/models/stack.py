"""Define the input x of the layer stack in z* = f(z*, x), for a block of tokens.

Shapes: `B` batch, `L` length of the block, `S` number of tokens before it, `D` model, `E` width of the injection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_llm.kernels.norm import Branch
from implicit_llm.kernels.selection import is_reference, shared_gradient_runs_on_triton
from implicit_llm.models.errors import REENTRANT, LostGradient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LayerState = tuple[Tensor, ...]  # one layer's converged state; every tensor has the batch first
Mixed = tuple[Branch, LayerState | None]  # a layer's branch on a block and, if requested, its state after the block
# One kernel sums the injection's gradients from this many layers. Until it runs, all of them are in memory.
SHARED_BY = 8


@dataclass(frozen=True)
class Prefix:
    """The converged state after the tokens before a block: the tensors of each layer, and which keys are padding.

    length: the number of these tokens, padding included.
    valid_BS: False where a key is padding; None if there is no padding, or if no layer stores keys.
    room: the number of tokens for which the tensors of keys and values have space; only the first `length` are valid.
    None means no extra space. position: a tensor on the device, the indices (L) in the room at which the block's keys
    and values are written. seen_LS: which keys of the room each token of the block attends to, (L, room), if known.
    """

    layers: tuple[LayerState, ...]
    length: int
    valid_BS: Tensor | None = None
    room: int | None = None
    position: Tensor | None = None
    seen_LS: Tensor | None = None

    def without_room(self) -> Prefix:
        """Return this prefix in tensors of its own length; only CUDA graphs need room, for fixed addresses."""
        return self if self.room is None else self.first(self.length)

    def first(self, length: int) -> Prefix:
        """Return the prefix of the first `length` tokens, without room; its states must be keys and values."""
        layers = self.map(lambda t: t[:, :, :length]).layers
        return Prefix(layers, length, None if self.valid_BS is None else self.valid_BS[:, :length])

    def select(self, index_B: Tensor) -> Prefix:
        """Return the prefix of some of the sequences, which may be repeated or reordered."""
        valid_BS = None if self.valid_BS is None else self.valid_BS[index_B]
        return replace(self.map(lambda t: t[index_B]), valid_BS=valid_BS)

    def rounded(self, dtype: torch.dtype | None) -> Prefix:
        """Return this prefix with fp32 states cast to `dtype`, the dtype of products; None leaves them unchanged."""
        return self if dtype is None else self.map(lambda t: t.to(dtype) if t.dtype == torch.float32 else t)

    def map(self, change: Callable[[Tensor], Tensor]) -> Prefix:
        """Return this prefix with `change` applied to every tensor of the layers."""
        return replace(self, layers=tuple(tuple(map(change, layer)) for layer in self.layers))


@dataclass(frozen=True)
class Padding:
    """The padding of a batch, and the order that moves it behind the tokens of each sequence.

    The stack gets the tokens in this order. Blocks, states and residuals therefore depend on the tokens alone, wherever
    the padding was.
    order_BL: the old position of the token at each new position. valid_BL: True for tokens, which come first in the new
    order.
    """

    order_BL: Tensor
    valid_BL: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor | None, embedding_BLD: Tensor, past: int) -> Padding | None:
        """Return the padding of the input after the `past` tokens of a cache, or None if the input has none.

        Raises: ValueError for a mask of another shape than (B, past + L).
        """
        if attention_mask is None:
            return None
        batch, length, _ = embedding_BLD.shape
        if attention_mask.shape != (batch, past + length):
            raise ValueError(
                f"attention_mask must be (batch, length of cache and input) = {(batch, past + length)}, 0 where "
                f"padding; got {tuple(attention_mask.shape)}"
            )
        valid_BL = attention_mask[:, past:].bool()
        if bool(valid_BL.all()):
            return None
        order_BL = valid_BL.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        return cls(order_BL, valid_BL.gather(1, order_BL))

    def move_behind(self, t_BLX: Tensor) -> Tensor:
        """Return `t_BLX` (B, L, ...) with the padding of each sequence moved behind its tokens."""
        return _reorder(t_BLX, self.order_BL)

    def move_back(self, t_BLX: Tensor) -> Tensor:
        """Undo `move_behind`."""
        return _reorder(t_BLX, self.order_BL.argsort(dim=1))

    def move_back_keys(self, prefix: Prefix) -> Prefix:
        """Return `prefix` with its last L keys and values in the order of the input; other states do not change."""
        if prefix.valid_BS is None:
            return prefix
        batch, length = self.order_BL.shape
        old_BS = torch.arange(prefix.length - length, device=self.order_BL.device).expand(batch, -1)
        order_BS = torch.cat([old_BS, prefix.length - length + self.order_BL.argsort(dim=1)], dim=1)
        layers = tuple(tuple(t.take_along_dim(order_BS[:, None, :, None], dim=2) for t in kv) for kv in prefix.layers)
        return replace(prefix, layers=layers, valid_BS=prefix.valid_BS.gather(1, order_BS))


def _reorder(t_BLX: Tensor, order_BL: Tensor) -> Tensor:
    return t_BLX[torch.arange(len(t_BLX), device=t_BLX.device)[:, None], order_BL]


@dataclass(frozen=True)
class StackInput:
    """The input x of f on a block, which is the same in every iteration.

    weights: `layer.weights()` of each layer, so that normalisation and casts happen once; None for a layer whose
        modules are called.
    injection_BLE: the tensor that every layer adds to its in-projection; None for explicit models.
    valid_BL: False for padding, which comes last in each sequence; None without padding.
    dropout_masks: a scaled keep-mask (B, L, D) for each layer; None without dropout or outside training.
    rope: the cosines and sines (1 or B, L, half a head's width) of attention layers; None for other layers.
    prefix: the converged state before the block; None if no tokens precede it.
    mesh: the processes over which the layers are sharded (`fully_shard`); None if they are not sharded.
    has_own_positions: whether the tokens have other positions than the default, which CUDA graphs compute themselves.
    """

    weights: tuple[Any, ...]
    injection_BLE: Tensor | None = None
    valid_BL: Tensor | None = None
    dropout_masks: tuple[Tensor, ...] | None = None
    rope: tuple[Tensor, Tensor] | None = None
    prefix: Prefix | None = None
    mesh: DeviceMesh | None = None
    has_own_positions: bool = False

    @cached_property
    def attention_mask(self) -> Tensor | None:
        """The mask (1 or B, 1, L, S + L), True for the keys that a query attends to; None if no mask is needed.

        Without padding in the prefix, two cases need no mask: a block without a prefix, for which causal attention
        suffices, and a single token, which attends to all keys. Padding in the block itself comes after every token, so
        it needs no mask.
        """
        assert self.rope is not None
        length, device = self.rope[0].shape[1], self.rope[0].device
        before = 0 if self.prefix is None else self.prefix.length
        old_BS = None if self.prefix is None else self.prefix.valid_BS
        if old_BS is None and (before == 0 or length == 1):
            return None
        causal = torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
        if old_BS is None:
            return causal[None, None]
        return (causal & F.pad(old_BS, (0, length), value=True)[:, None])[:, None]

    def _map(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        masks = None if self.dropout_masks is None else tuple(change(mask) for mask in self.dropout_masks)
        return {
            "injection_BLE": None if self.injection_BLE is None else change(self.injection_BLE),
            "valid_BL": None if self.valid_BL is None else change(self.valid_BL),
            "dropout_masks": masks,
        }

    def select(self, index_B: Tensor) -> StackInput:
        """Return the input of some of the sequences."""
        rope = self.rope
        if rope is not None and len(rope[0]) > 1:
            rope = rope[0][index_B], rope[1][index_B]
        prefix = None if self.prefix is None else self.prefix.select(index_B)
        return replace(self, **self._map(lambda t: t[index_B]), rope=rope, prefix=prefix)

    def block(self, start: int, end: int, prefix: Prefix | None) -> StackInput:
        """Return the input of the tokens `start` to `end` - 1, which follow `prefix`."""
        # Without `contiguous`, kernels would copy the injection and the rotary tables in every iteration.
        rope = self.rope
        if rope is not None:
            rope = rope[0][:, start:end].contiguous(), rope[1][:, start:end].contiguous()
        return replace(self, **self._map(lambda t: t[:, start:end].contiguous()), rope=rope, prefix=prefix)

    def shared(self, layers: int) -> list[StackInput]:
        """Return this input for each of the next `layers`, at most SHARED_BY, and once more for all later layers.

        Call this right before the first of these layers runs, so that one kernel may sum the injection's gradients.
        """
        injection_BLE = self.injection_BLE
        if injection_BLE is None or layers == 1 or not shared_gradient_runs_on_triton(injection_BLE):
            return [self] * (layers + 1)
        from implicit_llm.kernels.triton.sums import aliases

        found = [replace(self, injection_BLE=alias_BLE) for alias_BLE in aliases(injection_BLE, layers + 1)]
        if self.rope is not None:
            for x in found:  # all layers use one mask
                x.__dict__["attention_mask"] = self.attention_mask
        return found

    def extend_prefix(self, layers: tuple[LayerState, ...], length: int) -> Prefix:
        """Return the prefix of the next block, given the layers' states after the `length` tokens of this one."""
        before = 0 if self.prefix is None else self.prefix.length
        old_BS = None if self.prefix is None else self.prefix.valid_BS
        if self.rope is None or (self.valid_BL is None and old_BS is None):
            return Prefix(layers, before + length)
        like = self.valid_BL if self.valid_BL is not None else old_BS
        assert like is not None
        old_BS = like.new_ones(len(like), before) if old_BS is None else old_BS
        new_BL = like.new_ones(len(like), length) if self.valid_BL is None else self.valid_BL
        return Prefix(layers, before + length, torch.cat([old_BS, new_BL], dim=1))


def refuse_lost_gradient(out_BLD: Branch, module: nn.Module, x: StackInput) -> None:
    """Raise LostGradient if `out_BLD` requires no gradient, but a weight of `module` or the injection requires one.

    Activation checkpointing with use_reentrant=True causes this at z = 0, which requires no gradient: the weights and
    the injection reach the checkpointed function through a closure, and only gradients of its argument z are computed.
    The check is for implicit models. It is skipped with the `reference` kernels and if gradients are disabled.
    """
    if not torch.is_grad_enabled() or out_BLD.requires_grad or is_reference():
        return
    injection_BLE = x.injection_BLE
    if injection_BLE is not None and (
        injection_BLE.requires_grad or any(weight.requires_grad for weight in module.parameters())
    ):
        raise LostGradient(REENTRANT)
