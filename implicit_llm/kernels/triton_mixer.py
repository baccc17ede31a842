"""Convolution, SSD and gate of a Mamba2 mixer as one operation with a gradient. Imported where Triton kernels run.

Autograd would copy the gradients of gate, convolution and dt into one tensor of the width of the in-projection; here
each is written to its place. Kept between the passes: the projection, what was convolved, the states between chunks.
The plain PyTorch twin is `models.mamba2.Mamba2Mixer._mix`.

Shapes: as in `triton_scan`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_llm.kernels import triton_backend
from implicit_llm.kernels.triton_scan import Sizes, gated_scan_for_gradient
from implicit_llm.kernels.triton_scan_backward import ScanInputs, chunk_len, gated_scan_gradient


def gated_mix(
    projected_BLE: Tensor, convolution: tuple[Tensor, Tensor], per_head: tuple[Tensor, Tensor, Tensor], sizes: Sizes
) -> Tensor:
    """silu(gate) * (SSD(silu(convolution)) + D x), (B, L, I): as `triton_scan.gated_scan`, from an empty state."""
    return _GatedMix.apply(projected_BLE.contiguous(), *convolution, *per_head, sizes)


class _GatedMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected_BLE: Tensor, *weights: Any) -> Tensor:
        conv_CK, conv_bias_C, *per_head, sizes = weights
        channels_BLC = _channels(projected_BLE, conv_CK, per_head[1], sizes)
        convolved_BLC = triton_backend.causal_conv(channels_BLC, conv_CK, conv_bias_C, None, silu=True).contiguous()
        out_BLI, kept_BSHNP = gated_scan_for_gradient(
            projected_BLE, convolved_BLC, tuple(per_head), sizes, chunk_len(projected_BLE.shape[1])
        )
        ctx.save_for_backward(projected_BLE, convolved_BLC, kept_BSHNP, conv_CK, conv_bias_C, *per_head)
        ctx.sizes = sizes
        return out_BLI

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_BLI: Tensor) -> tuple[Tensor | None, ...]:
        projected_BLE, convolved_BLC, kept_BSHNP, conv_CK, conv_bias_C, *per_head = ctx.saved_tensors
        dprojected_BLE = torch.empty_like(projected_BLE)
        inputs = ScanInputs(projected_BLE, convolved_BLC, tuple(per_head), kept_BSHNP)
        dconvolved_BLC, dper_head = gated_scan_gradient(inputs, ctx.sizes, dout_BLI, dprojected_BLE)
        channels_BLC, dchannels_BLC = (
            _channels(t, conv_CK, per_head[1], ctx.sizes) for t in (projected_BLE, dprojected_BLE)
        )
        dconvolution = triton_backend.causal_conv_gradient(
            channels_BLC, conv_CK, conv_bias_C, dconvolved_BLC, dchannels_BLC
        )
        gradients = (gradient.to(t.dtype) for gradient, t in zip(dper_head, per_head, strict=True))
        return dprojected_BLE, *dconvolution, *gradients, None


def _channels(t_BLE: Tensor, conv_CK: Tensor, A_H: Tensor, sizes: Sizes) -> Tensor:
    """The columns of the in-projection that are convolved, as a view."""
    start = len(A_H) * sizes.head_dim
    return t_BLE[..., start : start + len(conv_CK)]
