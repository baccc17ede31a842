"""What one application of the layer stack needs besides z: the x of z* = f(z*, x), for a block of tokens.

Shapes: `B` batch, `L` length of the block, `S` length of what precedes it, `D` model, `E` width of the injection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_llm.kernels.selection import is_reference
from implicit_llm.models.errors import REENTRANT, LostGradient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LayerState = tuple[Tensor, ...]  # one layer's converged state, every tensor with the batch first
Mixed = tuple[Tensor, LayerState | None]  # what a layer makes of a block, and its state after it if asked for


@dataclass(frozen=True)
class Prefix:
    """Converged state of the tokens before a block: tensors per layer, and which of the keys are padding.

    valid_BS: False where a key is padding; None if none is, or if no layer keeps keys.
    room: tokens that the tensors of keys and values can hold; only the first `length` are valid. position: where the
    block's tokens are written, on the device. seen_LS: which keys of the room they see, (L, room), if known.
    """

    layers: tuple[LayerState, ...]
    length: int
    valid_BS: Tensor | None = None
    room: int | None = None
    position: Tensor | None = None
    seen_LS: Tensor | None = None

    def without_room(self) -> Prefix:
        """The same prefix in tensors of its own length; only a runner whose tensors stay in place needs the room."""
        return self if self.room is None else self.first(self.length)

    def first(self, length: int) -> Prefix:
        """The first tokens of a prefix of keys and values."""
        layers = self.map(lambda t: t[:, :, :length]).layers
        return Prefix(layers, length, None if self.valid_BS is None else self.valid_BS[:, :length])

    def select(self, index_B: Tensor) -> Prefix:
        """The state of some of the sequences, also repeated or reordered."""
        valid_BS = None if self.valid_BS is None else self.valid_BS[index_B]
        return replace(self.map(lambda t: t[index_B]), valid_BS=valid_BS)

    def rounded(self, dtype: torch.dtype | None) -> Prefix:
        """The same with states of fp32 in the dtype of products, None if that is their own."""
        return self if dtype is None else self.map(lambda t: t.to(dtype) if t.dtype == torch.float32 else t)

    def map(self, change: Callable[[Tensor], Tensor]) -> Prefix:
        """The same with every tensor of the layers changed."""
        return replace(self, layers=tuple(tuple(map(change, layer)) for layer in self.layers))


@dataclass(frozen=True)
class Padding:
    """The padding of a batch, and the order that moves it behind the tokens of each row.

    The stack only sees rows in that order, so that blocks, states and residuals depend on a row's tokens alone,
    wherever the padding is: before them, after them or between them.
    valid_BL: True for tokens, in the new order: the first positions of each row.
    """

    order_BL: Tensor
    valid_BL: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor | None, embedding_BLD: Tensor, past: int) -> Padding | None:
        """The padding of the tokens after the `past` ones of a cache, None without any.

        Raises: ValueError for a mask of another shape.
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
        """Move padding behind the tokens of each row."""
        return _reorder(t_BLX, self.order_BL)

    def move_back(self, t_BLX: Tensor) -> Tensor:
        """Undo `move_behind`."""
        return _reorder(t_BLX, self.order_BL.argsort(dim=1))

    def move_back_keys(self, prefix: Prefix) -> Prefix:
        """Undo `move_behind` for keys and values: these tokens are the last ones of `prefix`."""
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
    """The fixed input of f on a block.

    weights: `layer.weights()` of each layer, so that normalisation and casts happen once; None for a layer whose
        modules are called.
    injection_BLE: added to the in-projection of every layer; None for explicit models.
    valid_BL: False where padding, which comes last in each row; None if there is none.
    dropout_masks: per layer a scaled keep-mask (B, L, D), the same in every iteration; None outside training.
    rope: cosines and sines (1 or B, L, head width) of attention layers.
    mesh: the processes over which the layers are sharded (`fully_shard`); None if they are not.
    """

    weights: tuple[Any, ...]
    injection_BLE: Tensor | None = None
    valid_BL: Tensor | None = None
    dropout_masks: tuple[Tensor, ...] | None = None
    rope: tuple[Tensor, Tensor] | None = None
    prefix: Prefix | None = None
    mesh: DeviceMesh | None = None

    @cached_property
    def attention_mask(self) -> Tensor | None:
        """Return which keys a query sees, (1 or B, 1, L, S + L), or None where plain causal attention gives the same.

        Padding of the block itself comes after every token and so needs no mask.
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
        """The input of some of the sequences."""
        rope = self.rope
        if rope is not None and len(rope[0]) > 1:
            rope = rope[0][index_B], rope[1][index_B]
        prefix = None if self.prefix is None else self.prefix.select(index_B)
        return replace(self, **self._map(lambda t: t[index_B]), rope=rope, prefix=prefix)

    def block(self, start: int, end: int, prefix: Prefix | None) -> StackInput:
        """The input of tokens start to end, after `prefix`."""
        # Contiguous, or kernels would copy injection and tables in every iteration.
        rope = self.rope
        if rope is not None:
            rope = rope[0][:, start:end].contiguous(), rope[1][:, start:end].contiguous()
        return replace(self, **self._map(lambda t: t[:, start:end].contiguous()), rope=rope, prefix=prefix)

    def extend_prefix(self, layers: tuple[LayerState, ...], length: int) -> Prefix:
        """The prefix of the next block, whose tokens follow the `length` tokens of this one."""
        before = 0 if self.prefix is None else self.prefix.length
        old_BS = None if self.prefix is None else self.prefix.valid_BS
        if self.rope is None or (self.valid_BL is None and old_BS is None):
            return Prefix(layers, before + length)
        like = self.valid_BL if self.valid_BL is not None else old_BS
        assert like is not None
        old_BS = like.new_ones(len(like), before) if old_BS is None else old_BS
        new_BL = like.new_ones(len(like), length) if self.valid_BL is None else self.valid_BL
        return Prefix(layers, before + length, torch.cat([old_BS, new_BL], dim=1))


def refuse_lost_gradient(out_BLD: Tensor, module: nn.Module, x: StackInput) -> None:
    """Refuse an output of `module` that carries no gradient to its weights, as of a reentrant checkpoint from z = 0.

    Such a checkpoint sees its arguments alone, and z is the only one; weights and injection come by closure.
    Raises: LostGradient.
    """
    if not torch.is_grad_enabled() or out_BLD.requires_grad or is_reference():
        return
    injection_BLE = x.injection_BLE
    if injection_BLE is not None and (
        injection_BLE.requires_grad or any(weight.requires_grad for weight in module.parameters())
    ):
        raise LostGradient(REENTRANT)
