"""Compute the causal depthwise convolution of Mamba2, by the package causal_conv1d or in plain PyTorch.

Shapes: `B` batch, `L` length, `C` channels, `K` kernel width. The axis K of `initial_BKC` and of returned
states has the length K-1.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_llm.kernels import selection


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
    """Compute y_t = bias + sum_k weight_k x_{t-K+1+k}, and silu(y) if `silu`; `initial_BKC` or zeros precede x.

    Args: `initial_BKC` holds the last K-1 inputs before this sequence. `valid_BL` is False at padding, which must be at
        the end of each sequence.
    Returns: y (B, L, C) in the dtype of x; with `return_state` the last K-1 inputs before the padding (B, K-1, C), else
        None.
    """
    width = weight_CK.shape[1]
    state = last_inputs(x_BLC, initial_BKC, width - 1, valid_BL) if return_state else None
    if selection.conv_runs_on_triton(x_BLC, weight_CK):
        return _conv_of_package(x_BLC, weight_CK, bias_C, initial_BKC, silu=silu), state
    if initial_BKC is None:
        padded = F.pad(x_BLC, (0, 0, width - 1, 0))
    else:
        padded = torch.cat([initial_BKC.to(x_BLC.dtype), x_BLC], dim=1)
    with torch.autocast(x_BLC.device.type, enabled=False):
        correlate = _DepthwiseConv.apply if torch.is_grad_enabled() and not selection.is_reference() else _correlate
        y = correlate(padded, weight_CK.to(x_BLC.dtype))
    if bias_C is not None:
        y = y + bias_C.to(x_BLC.dtype)
    return F.silu(y) if silu else y, state


def _conv_of_package(
    x_BLC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, initial_BKC: Tensor | None, *, silu: bool
) -> Tensor:
    """Return y of `causal_conv`, computed by causal_conv1d >= 1.5, which sums in fp32."""
    if not _is_aligned(x_BLC):
        x_BLC = x_BLC.clone(memory_format=torch.contiguous_format)
    initial = None if initial_BKC is None else initial_BKC.to(x_BLC.dtype).contiguous().transpose(1, 2)
    bias = None if bias_C is None else bias_C.to(weight_CK.dtype)
    _, conv = selection.mamba_functions()
    y_BCL = conv(x_BLC.transpose(1, 2), weight_CK, bias, initial_states=initial, activation="silu" if silu else None)
    return y_BCL.transpose(1, 2)


def _is_aligned(x_BLC: Tensor) -> bool:
    """Return whether causal_conv1d can use x without a copy: it loads 16 bytes at a time, from contiguous channels."""
    return x_BLC.stride(2) == 1 and not (x_BLC.stride(1) % 8 or x_BLC.stride(0) % 8 or x_BLC.data_ptr() % 16)


def last_inputs(x_BLC: Tensor, initial_BKC: Tensor | None, count: int, valid_BL: Tensor | None = None) -> Tensor:
    """Return the last `count` inputs (B, count, C), which are the `initial_BKC` of `causal_conv` for the next block.

    If x has fewer, `initial_BKC` or zeros precede them. With `valid_BL`, only valid positions count, which must be at
    the start of each sequence.
    """
    batch, length, channels = x_BLC.shape
    if valid_BL is not None:
        before = x_BLC.new_zeros(batch, count, channels) if initial_BKC is None else initial_BKC.to(x_BLC.dtype)
        last_BK = valid_BL.sum(1, keepdim=True) + torch.arange(count, device=x_BLC.device)
        return torch.cat([before, x_BLC], dim=1).take_along_dim(last_BK[..., None], dim=1)
    if length >= count:
        return x_BLC[:, length - count :].clone()  # a view would keep the whole block alive
    if initial_BKC is None:
        return F.pad(x_BLC, (0, 0, count - length, 0))
    return torch.cat([initial_BKC[:, length:].to(x_BLC.dtype), x_BLC], dim=1)


def _correlate(padded_BLC: Tensor, weight_CK: Tensor) -> Tensor:
    """Convolve a sequence that is already padded.

    A 2D convolution with channels last needs no transposed copy. On a CPU it is ten times as fast as conv1d or
    shifted products.
    """
    image = padded_BLC.transpose(1, 2).unsqueeze(2)  # (B, C, 1, L): channels last in memory
    out = F.conv2d(image, weight_CK[:, None, None], groups=weight_CK.shape[0])
    return out.squeeze(2).transpose(1, 2)


class _DepthwiseConv(torch.autograd.Function):
    """The correlation with an explicit gradient, which on a CPU is five times as fast as PyTorch's own."""

    @staticmethod
    def forward(ctx: Any, padded_BLC: Tensor, weight_CK: Tensor) -> Tensor:
        ctx.save_for_backward(padded_BLC, weight_CK)
        return _correlate(padded_BLC, weight_CK)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BLC: Tensor) -> tuple[Tensor | None, Tensor | None]:
        padded_BLC, weight_CK = ctx.saved_tensors
        length, width = grad_BLC.shape[1], weight_CK.shape[1]
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = _correlate(F.pad(grad_BLC, (0, 0, width - 1, width - 1)), weight_CK.flip(1))
        if ctx.needs_input_grad[1]:
            products = [(padded_BLC[:, k : k + length] * grad_BLC).sum((0, 1)) for k in range(width)]
            grad_weight = torch.stack(products, dim=1)
        return grad_input, grad_weight
