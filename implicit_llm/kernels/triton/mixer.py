"""Convolution, SSD and gate of a Mamba2 mixer as one operation with a gradient. Imported where Triton kernels run.

Autograd would copy the gradients of gate, convolution and dt into one tensor of the width of the in-projection; here
each is written to its place. Kept between the passes: the projection, what the scan read, the states between chunks.
The plain PyTorch twin is `models.mamba2.Mamba2Mixer._mix`.

Shapes: as in `scan`.
"""

from typing import Any

import torch
from torch import Tensor

from implicit_llm.kernels.triton.scan import gated_scan_for_gradient
from implicit_llm.kernels.triton.scan_backward import ScanPass, gated_scan_gradient
from implicit_llm.kernels.triton.scan_inputs import MixerInputs, Sizes, convolution_gradient, mixer_inputs


def gated_mix(
    projected_BLE: Tensor, convolution: tuple[Tensor, Tensor], per_head: tuple[Tensor, Tensor, Tensor], sizes: Sizes
) -> Tensor:
    """silu(gate) * (SSD(silu(convolution)) + D x), (B, L, I): as `scan.gated_scan`, from an empty state."""
    return _GatedMix.apply(projected_BLE.contiguous(), *convolution, *per_head, sizes)


class _GatedMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected_BLE: Tensor, *weights: Any) -> Tensor:
        conv_CK, conv_bias_C, *per_head, sizes = weights
        inputs = mixer_inputs(projected_BLE, (conv_CK, conv_bias_C), tuple(per_head), sizes)
        out_BLI, kept_BSHPN = gated_scan_for_gradient(projected_BLE, inputs, tuple(per_head), sizes)
        ctx.save_for_backward(projected_BLE, *inputs, kept_BSHPN, conv_CK, conv_bias_C, *per_head)
        ctx.sizes = sizes
        return out_BLI

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_BLI: Tensor) -> tuple[Tensor | None, ...]:
        projected_BLE, *inputs, kept_BSHPN, conv_CK, conv_bias_C, dt_bias_H, A_H, D_H = ctx.saved_tensors
        per_head = (dt_bias_H, A_H, D_H)
        scan = ScanPass(projected_BLE, MixerInputs(*inputs), kept_BSHPN, per_head, ctx.sizes)
        dprojected_BLE = torch.empty_like(projected_BLE)
        dconvolved_BLC, dper_head = gated_scan_gradient(scan, dout_BLI, dprojected_BLE)
        dconvolution = convolution_gradient(
            projected_BLE, (conv_CK, conv_bias_C), len(A_H), ctx.sizes, dconvolved_BLC, dprojected_BLE
        )
        gradients = (gradient.to(t.dtype) for gradient, t in zip(dper_head, per_head, strict=True))
        return dprojected_BLE, *dconvolution, *gradients, None
