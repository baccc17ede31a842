"""Causal depthwise convolution of Mamba2 in plain PyTorch, as a sum of shifted products.

Shapes: `B` batch, `L` length, `C` channels, `K` kernel width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(
    x_BLC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    initial_BKC: Tensor | None = None,
    *,
    return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """y_t = bias + sum_k weight_k x_{t-K+1+k}; positions before the sequence are `initial_BKC` or zero.

    Args: initial holds the last K-1 inputs before this sequence, (B, K-1, C).
    Returns: y (B, L, C); the last K-1 inputs (B, K-1, C) if asked for.

    K shifted multiply-adds on contiguous channels beat `conv1d(groups=C)`, which wants (B, C, L) and is slow on CPUs.
    """
    length, width = x_BLC.shape[1], weight_CK.shape[1]
    if initial_BKC is None:
        padded = torch.nn.functional.pad(x_BLC, (0, 0, width - 1, 0))
    else:
        padded = torch.cat([initial_BKC.to(x_BLC.dtype), x_BLC], dim=1)
    weight_KC = weight_CK.t().to(x_BLC.dtype)
    y = padded[:, width - 1 :] * weight_KC[width - 1]
    if bias_C is not None:
        y = y + bias_C.to(x_BLC.dtype)
    for k in range(width - 1):
        y = torch.addcmul(y, padded[:, k : k + length], weight_KC[k])
    return y, padded[:, length:] if return_state else None
