"""RMS normalisation, plain and gated."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x_BLD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32, returned in the dtype of x."""
    x = x_BLD.float()
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight_D).to(x_BLD.dtype)


def gated_rms_norm(x_BLD: Tensor, gate_BLD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Mamba2's output norm: the gate silu(gate) is applied before the norm."""
    return rms_norm(x_BLD * F.silu(gate_BLD), weight_D, eps)
