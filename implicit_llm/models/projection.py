"""Linear and convolution weights with weight normalisation, materialised once per forward pass.

An implicit model applies the same weights dozens of times in one pass. Normalising (and under autocast casting) them in
every iteration is waste, so a layer asks for `effective_weight()` once and hands the tensors to each iteration.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init


class NormedWeight(nn.Module):
    """A weight of any shape, plain (`weight`) or weight-normalised (`g`, `v`) over all dimensions but the first.

    The parameters are not called weight_g and weight_v: transformers would rename them on loading.
    Source: Salimans and Kingma 2016, w = g v / ||v||; the published models normalise every linear and convolution
    weight.
    """

    def __init__(self, shape: tuple[int, ...], *, bias: bool, weight_norm: bool, init_scale: float = 1.0) -> None:
        super().__init__()
        self.shape = shape
        self.init_scale = init_scale
        if weight_norm:
            self.g = nn.Parameter(torch.empty(shape[0], *(1,) * (len(shape) - 1)))
            self.v = nn.Parameter(torch.empty(shape))
        else:
            self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None

    @property
    def is_normed(self) -> bool:
        return hasattr(self, "g")

    def effective_weight(self) -> Tensor:
        """The weight as it is applied, differentiable in its parameters; in autocast's dtype where autocast is on."""
        weight = self.v * (self.g / gain_of(self.v)) if self.is_normed else self.weight
        device = weight.device.type
        return weight.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else weight

    @torch.no_grad()
    def reset(self) -> None:
        """Uniform in +-1/sqrt(fan in), PyTorch's range for such layers, times init_scale; g = ||v||."""
        bound = 1 / math.sqrt(math.prod(self.shape[1:]))
        weight = self.v if self.is_normed else self.weight
        init.uniform_(weight, -bound * self.init_scale, bound * self.init_scale)
        if self.is_normed:
            init.copy_(self.g, gain_of(weight))
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        return f"shape={self.shape}, weight_norm={self.is_normed}"


def gain_of(weight: Tensor) -> Tensor:
    """Norm over all dimensions but the first, which stay with length 1: the g with which `weight` is its own v."""
    return torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)
