"""RMSNorm as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implicit_llm.kernels.operations import gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Root mean square normalisation with a learned scale, of x silu(gate) where a gate is given."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BLD: Tensor, gate_BLD: Tensor | None = None) -> Tensor:
        if gate_BLD is None:
            return rms_norm(x_BLD, self.weight, self.eps)
        return gated_rms_norm(x_BLD, gate_BLD, self.weight, self.eps)
