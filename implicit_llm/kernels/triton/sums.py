"""Sum gradients in few passes over memory: of a weight over programs, of a tensor over its uses (only if Triton runs).

PyTorch's sum of a few hundred rows starts few programs, which mostly wait for their loads.
For each further use of a tensor, autograd adds the gradient to the sum so far: it loads two tensors and stores one. The
kernel here loads each gradient once, adds in fp32 and rounds once. It adds the gradient of the last use first, as
autograd does.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import load, wide

ROWS, COLUMNS = 512, 16  # a program's tile, whose rows of 64 bytes are no shorter than a transfer from memory
BLOCK, WARPS = 2048, 4  # a thread loads 32 bytes of each bf16 gradient
MAX_ALIASES = 9  # one for each pointer of the kernel


def sum_rows(t_KRC: Tensor) -> Tensor:
    """Return the sum (K, C) of the rows of each of K contiguous fp32 matrices, always added in the same order."""
    matrices, rows, width = t_KRC.shape
    sums_KC = t_KRC.new_empty(matrices, width)
    _sum_rows_kernel[(triton.cdiv(width, COLUMNS), matrices)](t_KRC, sums_KC, rows, width, ROWS, COLUMNS, num_warps=8)
    return sums_KC


def aliases(shared: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return `count` aliases of `shared`, at most MAX_ALIASES, whose gradients one kernel sums.

    All of these gradients are in memory until the kernel runs. Autograd runs it after the backward passes of all
    aliases, and before the backward pass of anything that ran before this call.
    """
    return _Aliases.apply(shared, count)


class _Aliases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(shared.view_as(shared) for _ in range(count))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        found = [gradient.contiguous() for gradient in reversed(gradients) if gradient is not None]
        if len(found) < 2:
            return (found[0] if found else None), None
        out, size = torch.empty_like(found[0]), found[0].numel()
        given = found + [out] * (MAX_ALIASES - len(found))
        _sum_uses_kernel[(triton.cdiv(size, BLOCK),)](*given, out, size, COUNT=len(found), BLOCK=BLOCK, num_warps=WARPS)
        return out, None


@triton.jit
def _sum_rows_kernel(t_ptr, sums_ptr, rows, width, ROWS: constexpr, COLUMNS: constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = tl.program_id(1).to(tl.int64)
    t_ptr += matrix * rows * width
    total_RC = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        total_RC += load(t_ptr + row * width + column[None, :], (row < rows) & (column < width)[None, :])
    tl.store(sums_ptr + matrix * width + column, tl.sum(total_RC, axis=0), column < width)


@triton.jit
def _sum_uses_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr, i_ptr, out_ptr, size, COUNT: constexpr, BLOCK: constexpr
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = entry < size
    total = wide(a_ptr + entry, is_there) + wide(b_ptr + entry, is_there)
    if COUNT > 2:
        total += wide(c_ptr + entry, is_there)
    if COUNT > 3:
        total += wide(d_ptr + entry, is_there)
    if COUNT > 4:
        total += wide(e_ptr + entry, is_there)
    if COUNT > 5:
        total += wide(f_ptr + entry, is_there)
    if COUNT > 6:
        total += wide(g_ptr + entry, is_there)
    if COUNT > 7:
        total += wide(h_ptr + entry, is_there)
    if COUNT > 8:
        total += wide(i_ptr + entry, is_there)
    tl.store(out_ptr + entry, total, is_there)
