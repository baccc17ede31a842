"""Rotary positions, attention in a room for keys, and SwiGLU in plain PyTorch.

Shapes: `B` batch, `L` length, `S` room for keys, `H` heads, `P` head width, `E` query, key and value side by
side; there may be fewer heads of keys and values than of queries.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from implicit_llm.kernels.selection import is_reference


def rotate(t_BLHP: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + P/2) of each head by their angle."""
    cos, sin = rope[0].unsqueeze(2), rope[1].unsqueeze(2)
    first, second = t_BLHP.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(t_BLHP.dtype)


def rotated_heads(
    qkv_BLE: Tensor, injection_BLE: Tensor | None, rope: tuple[Tensor, Tensor], heads: int, key_heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.operations.rotated_heads`."""
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
    """Softmax attention, (B, H, L, P). The faster implementations have no second derivative and no forward mode."""
    is_grouped = q_BHLP.shape[1] != k_BHSP.shape[1]
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": is_grouped}
    if not is_reference():
        return F.scaled_dot_product_attention(q_BHLP, k_BHSP, v_BHSP, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q_BHLP, k_BHSP, v_BHSP, **options)


def seen_in_room(position_L: Tensor, room: int) -> Tensor:
    """Which keys of the room a block's tokens see, (L, S): those up to their own."""
    return torch.arange(room, device=position_L.device) <= position_L[:, None]


def write_and_attend(
    qkv_BHLP: tuple[Tensor, Tensor, Tensor], room_BHSP: tuple[Tensor, Tensor], position_L: Tensor, seen_LS: Tensor
) -> Tensor:
    """Write keys and values into the room at their positions; what attends to it, (B, H, L, P)."""
    q, k, v = qkv_BHLP
    keys, values = room_BHSP
    keys.index_copy_(2, position_L, k.to(keys.dtype))
    values.index_copy_(2, position_L, v.to(values.dtype))
    return attend(q, keys.to(q.dtype), values.to(q.dtype), seen_LS)


def swiglu(gate_up: Tensor) -> Tensor:
    """As `kernels.operations.swiglu`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
