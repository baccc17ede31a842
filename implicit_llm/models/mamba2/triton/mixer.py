"""Convolution, SSD and gate of a Mamba2 mixer as one operation with a gradient. Imported where Triton kernels run.

Autograd would copy the gradients of gate, convolution and dt into one tensor of the width of the in-projection; here
each is written to its place. Kept between the passes: the projection, what the scan read, the states between chunks.
The plain PyTorch twin is `models.mamba2.model.Mamba2Mixer._mix`.

Shapes: as in `scan`.
"""

from typing import Any

import torch
from torch import Tensor

from implicit_llm.models.mamba2.chunked_scan import ScanWeights
from implicit_llm.models.mamba2.triton.scan import gated_scan_for_gradient
from implicit_llm.models.mamba2.triton.scan_backward import gated_scan_gradient
from implicit_llm.models.mamba2.triton.scan_inputs import Mixer, MixerInputs, convolution_gradient, mixer_inputs


def gated_mix(mixer: Mixer, state: tuple[Tensor, ...] | None) -> Tensor:
    """silu(gate) * (SSD(silu(convolution)) + D x), (B, L, I): as `scan.gated_scan`, without a gradient of `state`."""
    return _GatedMix.apply(mixer.projected_BLE, *mixer.weights, mixer.sizes, *(state or (None, None)))


class _GatedMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected_BLE: Tensor, *others: Any) -> Tensor:
        *weights, ctx.sizes, before_BHPN, before_BKC = others
        mixer = Mixer(projected_BLE, None, ScanWeights(*weights), ctx.sizes)
        inputs = mixer_inputs(mixer, before_BKC)
        out_BLI, kept_BSHPN = gated_scan_for_gradient(mixer, inputs, before_BHPN)
        ctx.save_for_backward(projected_BLE, kept_BSHPN, before_BHPN, before_BKC, *inputs, *weights)
        return out_BLI

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_BLI: Tensor) -> tuple[Tensor | None, ...]:
        projected_BLE, kept_BSHPN, before_BHPN, before_BKC, *others = ctx.saved_tensors
        inputs, weights = MixerInputs(*others[:3]), ScanWeights(*others[3:])
        mixer, dprojected_BLE = Mixer(projected_BLE, None, weights, ctx.sizes), torch.empty_like(projected_BLE)
        states = before_BHPN, kept_BSHPN
        dconvolved_BLC, dper_head = gated_scan_gradient(mixer, inputs, states, dout_BLI, dprojected_BLE)
        dweights = (*convolution_gradient(mixer, before_BKC, dconvolved_BLC, dprojected_BLE), *dper_head)
        of_weights = (gradient.to(t.dtype) for gradient, t in zip(dweights, weights, strict=True))
        return dprojected_BLE, *of_weights, None, None, None
