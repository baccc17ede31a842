"""Slow, plain references of the kernels, one position at a time, and random inputs for them.

Shapes: `B` batch, `L` length, `H` heads, `P` head width, `G` groups, `N` state, `C` channels, `K` kernel width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class ScanCase:
    """Sizes of one SSD call; `steps` bounds dt, so that decays reach from nearly 1 to nearly 0."""

    batch: int
    length: int
    heads: int
    groups: int
    width: int
    state: int
    has_initial: bool = False
    steps: float = 0.5

    def __str__(self) -> str:
        sizes = f"B{self.batch}-L{self.length}-H{self.heads}-G{self.groups}-P{self.width}-N{self.state}"
        return sizes + ("-initial" if self.has_initial else "")

    def inputs(self, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0) -> ScanInputs:
        make = torch.Generator().manual_seed(seed)
        b, length, h, g, p, n = self.batch, self.length, self.heads, self.groups, self.width, self.state

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make, dtype=torch.float64).to(device, dtype)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=make, dtype=torch.float64)

        accurate = torch.promote_types(dtype, torch.float32)
        return ScanInputs(
            x=normal(b, length, h, p),
            dt=(uniform(b, length, h) * self.steps).to(device, accurate),
            A=-(1 + 15 * uniform(h)).to(device, accurate),
            B=normal(b, length, g, n) / n**0.5,
            C=normal(b, length, g, n),
            initial=normal(b, h, p, n).to(accurate) if self.has_initial else None,
        )


class ScanInputs(NamedTuple):
    """In the order of the arguments."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    initial: Tensor | None

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is there."""
        return tuple(value for value in self if value is not None)

    def map(self, change: Callable[[Tensor], Tensor]) -> ScanInputs:
        """The same inputs, each tensor changed."""
        return ScanInputs(*(None if value is None else change(value) for value in self))

    def part(self, start: int, end: int, initial: Tensor | None) -> ScanInputs:
        """The positions from start to end, from the state `initial`."""
        x, dt, B, C = (t[:, start:end] for t in (self.x, self.dt, self.B, self.C))
        return ScanInputs(x, dt, self.A, B, C, initial)

    def learnable(self) -> ScanInputs:
        return self.map(lambda t: t.detach().clone().requires_grad_())


def sequential_ssd(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """The recurrence itself, position by position: y (B, L, H, P) and the last state."""
    x, dt, A, B, C = inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C
    share = x.shape[2] // B.shape[2]
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3]) if inputs.initial is None else inputs.initial
    y = []
    for t in range(x.shape[1]):
        fed = torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t].repeat_interleave(share, dim=1))
        state = (dt[:, t] * A).exp()[:, :, None, None] * state + fed
        y.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t].repeat_interleave(share, dim=1)))
    return torch.stack(y, dim=1), state


def sequential_conv(x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None) -> Tensor:
    """y_t from its K inputs, position by position."""
    width = weight.shape[1]
    before = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if initial is None else initial
    seen = torch.cat([before, x], dim=1)
    y = [torch.einsum("bkc,ck->bc", seen[:, t : t + width], weight) for t in range(x.shape[1])]
    return torch.stack(y, dim=1) + (0 if bias is None else bias)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """The norm of the difference over the norm of the reference; NaN if either holds one."""
    difference = (ours.double() - reference.double()).norm()
    return (difference / reference.double().norm().clamp_min(1e-30)).item()
