"""How the input enters an implicit model.

Shapes: `B` batch, `L` length, `D` model, `E` width of the injection.
"""

from __future__ import annotations

from torch import Tensor, nn

from implicit_llm.models.norm import RMSNorm
from implicit_llm.models.projection import Projection


class Injection(nn.Module):
    """Linear(RMSNorm(embedding)), added to the in-projection of every layer."""

    def __init__(self, width: int, out_width: int, eps: float, weight_norm: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps)
        self.proj = Projection((out_width, width), bias=True, weight_norm=weight_norm)

    def forward(self, embedding_BLD: Tensor) -> Tensor:
        return self.proj(self.norm(embedding_BLD))
