"""Compute rotary positions, attention (also to preallocated keys) and SwiGLU, by Triton kernels or in plain PyTorch.

Shapes: `B` batch, `L` length, `S` room for keys, `H` heads (there may be fewer of keys and values than of queries), `P`
head width, `E` query, key and value side by side, `M` MLP width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from implicit_llm.kernels import selection


def rotate(t_BLHP: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + P/2) of each head by the angles whose cosines and sines (1 or B, L, P/2) are `rope`."""
    cos, sin = rope[0].unsqueeze(2), rope[1].unsqueeze(2)
    first, second = t_BLHP.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(t_BLHP.dtype)


def rotated_heads(
    qkv_BLE: Tensor, injection_BLE: Tensor | None, rope: tuple[Tensor, Tensor], heads: int, key_heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of qkv + injection; `rope` rotates the pairs (i, i + P/2) of query and key.

    Args: qkv and the injection hold query, key and value side by side. rope holds cosines and sines (1 or B, L, P/2) in
        fp32 or fp64, which get no gradient. key_heads is the number of heads of keys and of values; None means `heads`.
    Returns: three tensors (B, H, L, P) in the dtype of qkv. The value may be a view of qkv.
    """
    if selection.rotation_runs_on_triton(qkv_BLE, is_grouped=key_heads not in (None, heads)):
        from implicit_llm.models.llama3.triton import attention as triton_attention

        return triton_attention.rotated_heads(qkv_BLE, injection_BLE, rope, heads)
    if injection_BLE is not None:
        qkv_BLE = (qkv_BLE + injection_BLE).to(qkv_BLE.dtype)
    key_heads = key_heads or heads
    batch, length, columns = qkv_BLE.shape
    width = columns // (heads + 2 * key_heads)
    q, k, v = qkv_BLE.split([heads * width, key_heads * width, key_heads * width], dim=-1)
    q = q.view(batch, length, heads, width)
    k, v = k.view(batch, length, key_heads, width), v.view(batch, length, key_heads, width)
    return rotate(q, rope).transpose(1, 2), rotate(k, rope).transpose(1, 2), v.transpose(1, 2)


def attend(q_BHLP: Tensor, k_BHSP: Tensor, v_BHSP: Tensor, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
    """Return softmax attention (B, H, L, P); `mask` is True for the keys that a query attends to, or None.

    Forward-mode differentiation and second derivatives require the `reference` kernels.
    """
    is_grouped = q_BHLP.shape[1] != k_BHSP.shape[1]
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": is_grouped}
    if not selection.is_reference():
        return F.scaled_dot_product_attention(q_BHLP, k_BHSP, v_BHSP, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q_BHLP, k_BHSP, v_BHSP, **options)


def seen_in_room(position_L: Tensor, room: int) -> Tensor:
    """Return which keys of the room each token of a block attends to, (L, S): the keys up to the token's own."""
    return torch.arange(room, device=position_L.device) <= position_L[:, None]


class Room(NamedTuple):
    """The preallocated keys and values (B, H, S, P), written in place at the positions of a block's tokens.

    position_L is an integer tensor on the same device, so that one CUDA graph serves every block. seen_LS is True for
    the keys that each token attends to; if it is None, `room_attention` computes it.
    """

    keys_BHSP: Tensor
    values_BHSP: Tensor
    position_L: Tensor
    seen_LS: Tensor | None = None


def room_attention(qkv_BLE: Tensor, injection_BLE: Tensor | None, rope: tuple[Tensor, Tensor], room: Room) -> Tensor:
    """Write a block's keys and values into the room; return the block's causal attention to the keys, (B, L, H P).

    Args: qkv, injection and rope are those of `rotated_heads`. Call this function without gradient.
    """
    keys, values = room.keys_BHSP, room.values_BHSP
    if selection.room_attention_runs_on_triton(qkv_BLE, (keys, values)):
        from implicit_llm.models.llama3.triton import attention as triton_attention

        return triton_attention.token_attention(qkv_BLE, injection_BLE, rope, (keys, values), room.position_L)
    _, key_heads, _, width = keys.shape
    heads = qkv_BLE.shape[2] // width - 2 * key_heads
    q, k, v = rotated_heads(qkv_BLE, injection_BLE, rope, heads, key_heads)
    seen_LS = room.seen_LS
    if seen_LS is None:
        seen_LS = seen_in_room(room.position_L, keys.shape[2])
    keys.index_copy_(2, room.position_L, k.to(keys.dtype))
    values.index_copy_(2, room.position_L, v.to(values.dtype))
    out_BHLP = attend(q, keys.to(q.dtype), values.to(q.dtype), seen_LS)
    return out_BHLP.transpose(1, 2).flatten(2)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (..., M) of gate and up side by side (..., 2 M), in their dtype."""
    if selection.swiglu_runs_on_triton(gate_up):
        from implicit_llm.models.llama3.triton import attention as triton_attention

        return triton_attention.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
