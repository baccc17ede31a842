"""What one application of the layer stack needs besides z: the x of z* = f(z*, x), for a block of tokens.

Shapes: `B` batch, `L` length of the block, `S` length of what precedes it, `D` model, `E` width of the injection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LayerState = tuple[Tensor, ...]  # one layer's converged state, every tensor with the batch first


@dataclass(frozen=True)
class Prefix:
    """Converged state of the tokens before a block: per layer its tensors; which of those tokens are padding.

    room: keys and values lie in tensors for so many tokens, of which the first `length` count; position: where the
    block's tokens go, on the device; seen: which keys of the room they see, (L, room), if it is known.
    """

    layers: tuple[LayerState, ...]
    length: int
    valid_BS: Tensor | None = None
    room: int | None = None
    position: Tensor | None = None
    seen_LS: Tensor | None = None

    def without_room(self) -> Prefix:
        """The same in tensors of the prefix's own length, as everything but captured graphs wants it."""
        if self.room is None:
            return self
        layers = tuple(tuple(t[:, :, : self.length] for t in layer) for layer in self.layers)
        return Prefix(layers, self.length, self.valid_BS)

    def select(self, index_B: Tensor) -> Prefix:
        """The state of some of the sequences, also repeated or reordered."""
        layers = tuple(tuple(t[index_B] for t in layer) for layer in self.layers)
        return replace(self, layers=layers, valid_BS=None if self.valid_BS is None else self.valid_BS[index_B])


@dataclass(frozen=True)
class StackInput:
    """The fixed input of f on a block.

    weights: per layer what `layer.weights()` returned, so that normalisation and casts happen once; None where its
        modules are called.
    injection_BLE: added to the in-projection of every layer; None for explicit models.
    valid_BL: False where padding; None if there is none.
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
        """Which keys a query sees, (1 or B, 1, L, S + L); None where plain causal attention says the same.

        A padded query sees itself, so that its softmax stays finite; nothing reads the result.
        """
        assert self.rope is not None
        length, device = self.rope[0].shape[1], self.rope[0].device
        before = 0 if self.prefix is None else self.prefix.length
        prefix_valid = None if self.prefix is None else self.prefix.valid_BS
        is_padded = self.valid_BL is not None or prefix_valid is not None
        if not is_padded and (before == 0 or length == 1):
            return None
        causal = torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
        if not is_padded:
            return causal[None, None]
        batch = len(self.valid_BL if self.valid_BL is not None else prefix_valid)  # type: ignore[arg-type]
        old = torch.ones(batch, before, dtype=torch.bool, device=device) if prefix_valid is None else prefix_valid
        new = torch.ones(batch, length, dtype=torch.bool, device=device) if self.valid_BL is None else self.valid_BL
        itself = torch.zeros(length, before + length, dtype=torch.bool, device=device)
        itself[:, before:].fill_diagonal_(True)
        keys = torch.cat([old, new], dim=1)[:, None]
        return ((causal & keys) | itself)[:, None]

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
        before = self.prefix
        seen = length + (before.length if before else 0)
        valid = None if before is None else before.valid_BS
        if self.valid_BL is not None or valid is not None:
            device, batch = layers[0][0].device, len(layers[0][0])
            old = torch.ones(batch, seen - length, dtype=torch.bool, device=device) if valid is None else valid
            new = torch.ones(batch, length, dtype=torch.bool, device=device) if self.valid_BL is None else self.valid_BL
            valid = torch.cat([old, new], dim=1)
        return Prefix(layers, seen, valid)
