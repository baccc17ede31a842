"""Sum the rows of matrices, such as the gradients of a weight from many programs (imported only if Triton kernels run).

PyTorch's sum of a few hundred rows starts few programs, which mostly wait for their loads.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import load

ROWS, COLUMNS = 512, 16  # a program's tile, whose rows of 64 bytes are no shorter than a transfer from memory


def sum_rows(t_KRC: Tensor) -> Tensor:
    """Return the sum (K, C) of the rows of each of K contiguous fp32 matrices, always added in the same order."""
    matrices, rows, width = t_KRC.shape
    sums_KC = t_KRC.new_empty(matrices, width)
    _sum_kernel[(triton.cdiv(width, COLUMNS), matrices)](t_KRC, sums_KC, rows, width, ROWS, COLUMNS, num_warps=8)
    return sums_KC


@triton.jit
def _sum_kernel(t_ptr, sums_ptr, rows, width, ROWS: constexpr, COLUMNS: constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = tl.program_id(1).to(tl.int64)
    t_ptr += matrix * rows * width
    total_RC = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        total_RC += load(t_ptr + row * width + column[None, :], (row < rows) & (column < width)[None, :])
    tl.store(sums_ptr + matrix * width + column, tl.sum(total_RC, axis=0), column < width)
