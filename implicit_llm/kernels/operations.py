"""The operations of the blocks: one signature each, run by the kernels that `kernels.selection` decides on.

Shapes: `B` batch, `L` length, `S` room for keys, `H` heads, `P` head width, `G` groups, `N` state, `C` channels,
`K` kernel width, `D` width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_llm.kernels import attention as torch_attention
from implicit_llm.kernels import causal_conv as torch_conv
from implicit_llm.kernels import norm as torch_norm
from implicit_llm.kernels import selection
from implicit_llm.kernels import ssd as torch_ssd


def ssd(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    initial_state_BHPN: Tensor | None = None,
    *,
    D_H: Tensor | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t + D x_t over the whole sequence.

    Args: dt is positive (after softplus), 0 where a position is padding: it then neither decays nor feeds the state.
        A is negative. Any L. B and C are taken to the dtype of x.
    Returns: y of shape (B, L, H, P) in the dtype of x; the state after the last position (B, H, P, N) in fp32 (fp64
        if x is), or None unless asked for.
    """
    if selection.ssd_runs_on_triton(x_BLHP, B_BLGN):
        from implicit_llm.kernels.triton import mamba_ssm

        return mamba_ssm.ssd(
            x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_state_BHPN, D_H=D_H, return_state=return_state
        )
    B_BLGN, C_BLGN = B_BLGN.to(x_BLHP.dtype), C_BLGN.to(x_BLHP.dtype)
    y_BLHP, state = torch_ssd.ssd(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_state_BHPN, return_state=return_state)
    if D_H is not None:
        y_BLHP = torch.addcmul(y_BLHP, x_BLHP, D_H.to(x_BLHP.dtype)[:, None])
    return y_BLHP, state


class ScanWeights(NamedTuple):
    """Parameters of a Mamba2 mixer between its projections."""

    conv_CK: Tensor
    conv_bias_C: Tensor
    dt_bias_H: Tensor
    A_H: Tensor
    D_H: Tensor


def gated_scan(
    projected_BLE: Tensor,
    injection_BLE: Tensor | None,
    weights: ScanWeights,
    sizes: tuple[int, int, int],
    state: tuple[Tensor, ...] | None,
    *,
    return_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """silu(gate) * (SSD(silu(convolution)) + D x) of projected + injection; `scan_runs_on_triton` must hold, or with a
    gradient, from an empty state and without injection, `trained_scan_runs_on_triton`.

    Args: projected holds gate (H P), what is convolved (H P + 2 G N) and dt (H) side by side; sizes are (P, G, N);
        state is the SSM state (B, H, P, N) and the last K-1 inputs of the convolution (B, K-1, C) before the sequence.
    Returns: (B, L, H P) in the dtype of `projected`; the SSM state after the last position in fp32 if asked for.
    """
    from implicit_llm.kernels.triton import scan as triton_scan

    convolution = (weights.conv_CK.contiguous(), weights.conv_bias_C)
    per_head = (weights.dt_bias_H, weights.A_H, weights.D_H)
    shape = triton_scan.Sizes(*sizes)
    if torch.is_grad_enabled():
        assert state is None
        assert injection_BLE is None
        assert not return_state
        from implicit_llm.kernels.triton import mixer as triton_mixer

        return triton_mixer.gated_mix(projected_BLE, convolution, per_head, shape), None
    projected_BLE = projected_BLE.contiguous()
    injection_BLE = None if injection_BLE is None else injection_BLE.contiguous()
    if projected_BLE.shape[1] == 1 and state is not None:
        return triton_scan.gated_token(projected_BLE, injection_BLE, convolution, per_head, shape, state, return_state)
    return triton_scan.gated_scan(projected_BLE, injection_BLE, convolution, per_head, shape, state, return_state)


def causal_conv(
    x_BLC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    initial_BKC: Tensor | None = None,
    *,
    silu: bool = False,
    return_state: bool = False,
    valid_BL: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y_t = bias + sum_k weight_k x_{t-K+1+k}, then silu if asked for; before the sequence come `initial_BKC` or zeros.

    Args: initial holds the last K-1 inputs before this sequence, (B, K-1, C). valid: False where padding, which comes
        last in each row.
    Returns: y (B, L, C) in the dtype of x; the last K-1 inputs (B, K-1, C) before padding if asked for.
    """
    if selection.conv_runs_on_triton(x_BLC, weight_CK):
        from implicit_llm.kernels.triton import mamba_ssm

        y_BLC = mamba_ssm.causal_conv(x_BLC, weight_CK, bias_C, initial_BKC, silu=silu)
    else:
        y_BLC = torch_conv.causal_conv(x_BLC, weight_CK, bias_C, initial_BKC, silu=silu)
    state = torch_conv.last_inputs(x_BLC, initial_BKC, weight_CK.shape[1] - 1, valid_BL) if return_state else None
    return y_BLC, state


def rms_norm(x_BLD: Tensor, gate_BLD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (fp64 if x is), returned in the dtype of x.

    With a gate, of x silu(gate): Mamba2's output norm.
    """
    if selection.norm_runs_on_triton(x_BLD):
        from implicit_llm.kernels.triton import norm as triton_norm

        return triton_norm.rms_norm(x_BLD, gate_BLD, weight_D, eps)
    return torch_norm.rms_norm(x_BLD, gate_BLD, weight_D, eps)


def rotated_heads(
    qkv_BLE: Tensor, injection_BLE: Tensor | None, rope: tuple[Tensor, Tensor], heads: int, key_heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value (B, H, L, P) of qkv + injection; in the first two the pairs (i, i + P/2) turned by `rope`.

    Args: qkv holds query, key and value side by side, as does the injection; rope is cosines and sines (1 or B, L, P/2)
        in fp32, to which there is no gradient; key_heads is the number of heads of keys and of values (None: heads).
    Returns: in the dtype of qkv. The value may be a view of qkv.
    """
    if selection.rotation_runs_on_triton(qkv_BLE, is_grouped=key_heads not in (None, heads)):
        from implicit_llm.kernels.triton import attention as triton_attention

        return triton_attention.rotated_heads(qkv_BLE, injection_BLE, rope, heads)
    return torch_attention.rotated_heads(qkv_BLE, injection_BLE, rope, heads, key_heads)


class Room(NamedTuple):
    """Keys and values (B, H, S, P), written in place where a block's tokens lie.

    position is an integer tensor on their device, so that a captured graph serves every block; seen (L, S) says which
    keys each token sees, and is made anew if it is not given.
    """

    keys_BHSP: Tensor
    values_BHSP: Tensor
    position_L: Tensor
    seen_LS: Tensor | None = None


def room_attention(qkv_BLE: Tensor, injection_BLE: Tensor | None, rope: tuple[Tensor, Tensor], room: Room) -> Tensor:
    """Causal attention (B, L, H P) of a block to what lies in the room before it and to itself, which is written there.

    Args: qkv, injection and rope as for `rotated_heads`. Without gradient.
    """
    kept_BHSP = (room.keys_BHSP, room.values_BHSP)
    if selection.room_attention_runs_on_triton(qkv_BLE, kept_BHSP):
        from implicit_llm.kernels.triton import attention as triton_attention

        return triton_attention.token_attention(qkv_BLE, injection_BLE, rope, kept_BHSP, room.position_L)
    _, key_heads, _, width = kept_BHSP[0].shape
    heads = qkv_BLE.shape[2] // width - 2 * key_heads
    qkv_BHLP = rotated_heads(qkv_BLE, injection_BLE, rope, heads, key_heads)
    seen_LS = room.seen_LS
    if seen_LS is None:
        seen_LS = torch_attention.seen_in_room(room.position_L, kept_BHSP[0].shape[2])
    out_BHLP = torch_attention.write_and_attend(qkv_BHLP, kept_BHSP, room.position_L, seen_LS)
    return out_BHLP.transpose(1, 2).flatten(2)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (..., M) of gate and up side by side (..., 2 M), in their dtype."""
    if selection.swiglu_runs_on_triton(gate_up):
        from implicit_llm.kernels.triton import swiglu as triton_swiglu

        return triton_swiglu.swiglu(gate_up)
    return torch_attention.swiglu(gate_up)
