"""One iteration of a fixed point judged and recorded in one kernel. Imported where Triton kernels run.

The plain PyTorch twin is `solver.residual` with `solver.best`. Shapes: `B` sequences of the whole batch, `A` of them
still being solved, `L` length, `D` width.
"""

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

TILE = 8192
EPS = 1e-8


class Record(Protocol):
    """What is known of all sequences, written in place (solver.best.Best)."""

    z: Tensor
    residual: Tensor
    residual_BL: Tensor
    done: Tensor
    num_iter: Tensor
    non_finite: Tensor


def judge(best: Record, active_A: Tensor, z: tuple[Tensor, Tensor, Tensor], stop: str, tol: float) -> None:
    """Record an iteration of the sequences `active_A` that are not done; z are z, f(z) and what is kept, (A, L, D)."""
    z_ALD, fz_ALD, next_ALD = (t.contiguous() for t in z)
    _, length, width = z_ALD.shape
    columns = triton.next_power_of_2(width)
    _judge_kernel[(len(active_A),)](
        active_A, z_ALD, fz_ALD, next_ALD,
        best.z, best.residual, best.residual_BL, best.done, best.num_iter, best.non_finite,
        length, width, tol, EPS,
        BY_TOKEN=stop == "token", ROWS=max(1, min(triton.next_power_of_2(length), TILE // columns)), COLUMNS=columns,
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _judge_kernel(
    active_ptr, z_ptr, fz_ptr, next_ptr,
    best_ptr, residual_ptr, token_ptr, done_ptr, iterations_ptr, bad_ptr,
    length, width, tol, eps,
    BY_TOKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    sequence = tl.load(active_ptr + entry)
    if tl.load(done_ptr + sequence) == 0:
        column = tl.arange(0, COLUMNS)
        change_all, size_all, worst = 0.0, 0.0, 0.0
        for start in range(0, length, ROWS):
            row = start + tl.arange(0, ROWS)
            is_inside = (row < length)[:, None] & (column < width)[None, :]
            at = (entry * length + row)[:, None] * width + column[None, :]
            z = tl.load(z_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
            fz = tl.load(fz_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
            change = tl.sum((fz - z) * (fz - z), axis=1)
            size = tl.sum(fz * fz, axis=1)
            token = tl.sqrt(change) / (tl.sqrt(size) + eps)
            is_bad = (token != token) | (token == float("inf"))
            here = sequence * length + row
            bad = tl.load(bad_ptr + here, mask=row < length, other=0) != 0
            tl.store(bad_ptr + here, bad | is_bad, mask=row < length)
            change_all += tl.sum(change, axis=0)
            size_all += tl.sum(size, axis=0)
            worst = tl.maximum(worst, tl.max(tl.where(is_bad, float("inf"), token), axis=0))
        residual = worst
        if not BY_TOKEN:
            residual = tl.sqrt(change_all) / (tl.sqrt(size_all) + eps)
        if residual < tl.load(residual_ptr + sequence):
            for start in range(0, length, ROWS):
                row = start + tl.arange(0, ROWS)
                is_inside = (row < length)[:, None] & (column < width)[None, :]
                at = (entry * length + row)[:, None] * width + column[None, :]
                to = (sequence * length + row)[:, None] * width + column[None, :]
                kept = tl.load(next_ptr + at, mask=is_inside, other=0.0)
                tl.store(best_ptr + to, kept.to(best_ptr.dtype.element_ty), mask=is_inside)
                z = tl.load(z_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
                fz = tl.load(fz_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
                token = tl.sqrt(tl.sum((fz - z) * (fz - z), axis=1)) / (tl.sqrt(tl.sum(fz * fz, axis=1)) + eps)
                tl.store(token_ptr + sequence * length + row, token, mask=row < length)
            tl.store(residual_ptr + sequence, residual)
        tl.store(iterations_ptr + sequence, tl.load(iterations_ptr + sequence) + 1.0)
        tl.store(done_ptr + sequence, residual < tol)
