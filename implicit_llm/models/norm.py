"""RMSNorm as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implicit_llm.kernels.operations import rms_norm


class RMSNorm(nn.Module):
    """Root mean square normalisation with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BLD: Tensor) -> Tensor:
        return rms_norm(x_BLD, self.weight, self.eps)
