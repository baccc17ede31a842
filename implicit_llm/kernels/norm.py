"""Compute the RMS norm of a tensor, a gated tensor or a sum, by Triton kernels or in PyTorch with explicit gradients.

Autograd would store five fp32 tensors per call. This code stores the inputs, or their sum, and at most one number per
row, and needs half as many passes over memory.
Shapes: `...` any leading dimensions, `D` width.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_llm.kernels import selection


@dataclass(frozen=True, eq=False)
class Unscaled:
    """A branch without gradient whose rows must still be divided by a root mean square each.

    This number is that of the RMS norm before the branch's last product. The product commutes with the division, which
    can therefore move into the sum after the product, where `add_and_norm` loads the branch anyway.
    rows (..., D): the branch before the division. squares (..., S), fp32: parts of the sum of squares of the `width`
        entries that are normed. eps: that of the norm.
    """

    rows: Tensor
    squares: Tensor
    width: int
    eps: float
    requires_grad = False

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def __mul__(self, mask: Tensor) -> "Unscaled":
        return replace(self, rows=self.rows * mask)

    def __radd__(self, h: Tensor) -> Tensor:
        scale = self.squares.sum(-1, keepdim=True).div_(self.width).add_(self.eps).rsqrt_()
        return h + (self.rows * scale).to(self.rows.dtype)


Branch = Tensor | Unscaled


def rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight in `dtype`, by default that of x; computed in fp32 (fp64 if x is fp64).

    With a gate, x silu(gate) replaces x, as in Mamba2's output norm.
    """
    dtype = dtype or x.dtype
    if selection.norm_runs_on_triton(x):
        from implicit_llm.kernels.triton import norm as triton_norm

        return triton_norm.rms_norm(x, gate, weight, eps, dtype)
    if selection.is_reference():
        gated = _gate(x, gate)
        return F.rms_norm(gated, weight.shape, weight.to(gated.dtype), eps).to(dtype)
    if not torch.is_grad_enabled():  # entering an autograd function takes a fifth of the time of a decoded token's norm
        return _scaled(x, gate, weight, eps, dtype)[0]
    return _GatedNorm.apply(x, gate, weight, eps, dtype)


def add_and_norm(
    h: Tensor, branch: Branch, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return h + branch and the `rms_norm` of this sum; the norm is in `dtype`, by default that of the sum.

    One Triton kernel computes both in one pass over memory, if the dtype of branch is not wider than that of h.
    """
    if h.dtype == torch.promote_types(h.dtype, branch.dtype) and selection.norm_runs_on_triton(h):
        from implicit_llm.kernels.triton import norm as triton_norm

        if isinstance(branch, Unscaled):
            scale = branch.squares, branch.width, branch.eps
            return triton_norm.add_and_norm(h, branch.rows, weight, eps, dtype or h.dtype, scale)
        return triton_norm.add_and_norm(h, branch, weight, eps, dtype or h.dtype)
    h = h + branch
    return h, rms_norm(h, None, weight, eps, dtype)


def _gate(x: Tensor, gate: Tensor | None) -> Tensor:
    accurate = torch.promote_types(x.dtype, torch.float32)
    return x.to(accurate) if gate is None else x.to(accurate) * F.silu(gate.to(accurate))


def _scaled(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the normed tensor in `dtype`, and 1 / sqrt(mean square + eps) of x or, with a gate, of x silu(gate)."""
    gated = _gate(x, gate)
    scale = gated.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (gated * scale).mul_(weight).to(dtype), scale


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        y, scale = _scaled(x, gate, weight, eps, dtype)
        ctx.save_for_backward(x, gate, weight, scale)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, scale = ctx.saved_tensors
        normed = _gate(x, gate) * scale
        dy = dy.to(normed.dtype)
        product = dy * normed
        dweight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        projection = (product @ weight.to(normed.dtype)).unsqueeze(-1) / x.shape[-1]
        dgated = (dy * weight).addcmul_(normed, projection, value=-1).mul_(scale)
        if gate is None:
            return dgated.to(x.dtype), None, dweight, None, None
        wide = gate.to(normed.dtype)
        sigmoid = wide.sigmoid()
        dgate = dgated * x * sigmoid * (1 + wide * (1 - sigmoid))
        return (dgated * wide * sigmoid).to(x.dtype), dgate.to(gate.dtype), dweight, None, None
