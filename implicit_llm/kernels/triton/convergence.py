"""Check and record one fixed-point iteration in three kernels (imported only if Triton kernels run).

The first kernel measures each token, the second decides for each sequence, and the third stores better iterates. With
the rule "token", an iterate is better for a token if the worst residual up to that token is lower. With "sequence", it
is better for all tokens of a sequence if the sequence's residual is lower. `solver.residual` and `solver.fixed_point`
do the same in plain PyTorch.

Shapes: `B` sequences of the whole batch, `A` sequences still being solved, `L` length, `D` width.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import load, wide

TILE = 8192
EPS = 1e-8


def judge(
    best: Any,
    active_A: Tensor,
    z: tuple[Tensor, Tensor, Tensor],
    stop: str,
    tol: float,
    tau: float | None = None,
) -> None:
    """Record an iteration in `best`, for the sequences of `active_A` that are not done.

    best: the record of all B sequences, a `solver.fixed_point.Best`, which is written in place.
    z: z, f(z) and the next z, each (A, L, D). With `tau`, the kernel computes the next z, z + tau (f(z) - z), for all A
        sequences and writes it to the third tensor, which may be the same as the first.
    stop: the rule "sequence" or "token".
    """
    z_ALD, fz_ALD = z[0].contiguous(), z[1].contiguous()
    next_ALD = z[2].contiguous() if tau is None else z[2]
    batch, length, width = z_ALD.shape
    columns = triton.next_power_of_2(width)
    rows = max(1, min(triton.next_power_of_2(length), TILE // columns))
    squares = z_ALD.new_empty(2, batch, length, dtype=torch.float32)  # |f(z) - z|^2 and |f(z)|^2 by token
    is_better_AL = torch.empty(batch, length, dtype=torch.int32, device=z_ALD.device)
    tiles = (triton.cdiv(length, rows), batch)  # the other axes of a launch have at most 65,535 programs
    _measure_kernel[tiles](
        active_A, z_ALD, fz_ALD, squares[0], squares[1], best.done, best.non_finite, length, width, EPS,
        ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    _decide_kernel[(batch,)](
        active_A, squares[0], squares[1], is_better_AL, best.rank_BL, best.done, best.num_iter, length, tol, EPS,
        BY_TOKEN=stop == "token", ROWS=min(triton.next_power_of_2(length), 1024),
    )  # fmt: skip
    _keep_kernel[tiles](
        active_A, z_ALD, fz_ALD, next_ALD, squares[0], squares[1], is_better_AL, best.z, best.residual_BL,
        length, width, tau or 0.0, EPS, IS_MADE=tau is not None, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


@triton.jit
def _measure_kernel(
    active_ptr, z_ptr, fz_ptr, change_ptr, size_ptr, done_ptr, bad_ptr, length, width, eps,
    ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    entry = tl.program_id(1).to(tl.int64)
    sequence = tl.load(active_ptr + entry)
    if tl.load(done_ptr + sequence) == 0:
        row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        is_inside = (row < length)[:, None] & (column < width)[None, :]
        at = (entry * length + row)[:, None] * width + column[None, :]
        z = wide(z_ptr + at, is_inside)
        fz = wide(fz_ptr + at, is_inside)
        change = tl.sum((fz - z) * (fz - z), axis=1)
        size = tl.sum(fz * fz, axis=1)
        tl.store(change_ptr + entry * length + row, change, row < length)
        tl.store(size_ptr + entry * length + row, size, row < length)
        here = sequence * length + row
        bad = tl.load(bad_ptr + here, mask=row < length, other=0) != 0
        tl.store(bad_ptr + here, bad | is_bad(relative(change, size, eps)), row < length)


@triton.jit
def _decide_kernel(
    active_ptr, change_ptr, size_ptr, better_ptr, rank_ptr, done_ptr, iterations_ptr, length, tol, eps,
    BY_TOKEN: constexpr, ROWS: constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    sequence = tl.load(active_ptr + entry)
    is_open = tl.load(done_ptr + sequence) == 0
    change_all, size_all, worst = 0.0, 0.0, 0.0
    for start in range(0, length, ROWS):
        row = start + tl.arange(0, ROWS)
        change = load(change_ptr + entry * length + row, (row < length) & is_open)
        size = load(size_ptr + entry * length + row, (row < length) & is_open)
        if BY_TOKEN:
            token = relative(change, size, eps)
            up_to = tl.associative_scan(tl.where(is_bad(token), float("inf"), token), 0, larger)
            rank = tl.maximum(up_to, worst)
            _offer(rank, is_open, better_ptr + entry * length, rank_ptr + sequence * length, row, length)
            worst = tl.max(rank, axis=0)
        else:
            change_all += tl.sum(change, axis=0)
            size_all += tl.sum(size, axis=0)
    if not BY_TOKEN:
        worst = relative(change_all, size_all, eps)
        for start in range(0, length, ROWS):
            row = start + tl.arange(0, ROWS)
            rank = tl.full((ROWS,), 0.0, dtype=tl.float32) + worst
            _offer(rank, is_open, better_ptr + entry * length, rank_ptr + sequence * length, row, length)
    if is_open:
        tl.store(iterations_ptr + sequence, tl.load(iterations_ptr + sequence) + 1.0)
        tl.store(done_ptr + sequence, worst < tol)


@triton.jit
def _offer(rank, is_open, better_ptr, rank_ptr, row, length):
    is_better = is_open & (rank < tl.load(rank_ptr + row, mask=row < length, other=0.0))
    tl.store(better_ptr + row, is_better.to(tl.int32), row < length)
    tl.store(rank_ptr + row, rank, (row < length) & is_better)


@triton.jit
def _keep_kernel(
    active_ptr, z_ptr, fz_ptr, next_ptr, change_ptr, size_ptr, better_ptr, best_ptr, token_ptr, length, width, tau, eps,
    IS_MADE: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    entry = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_inside = (row < length)[:, None] & (column < width)[None, :]
    at = (entry * length + row)[:, None] * width + column[None, :]
    is_better = tl.load(better_ptr + entry * length + row, mask=row < length, other=0) != 0
    is_kept = is_inside & is_better[:, None]
    if IS_MADE:  # the formula of torch.lerp for weights from 1/2 up; with tau = 1 its result is exactly f(z)
        fz = wide(fz_ptr + at, is_inside)
        kept = fz - (fz - wide(z_ptr + at, is_inside)) * (1.0 - tau)
        tl.store(next_ptr + at, kept, is_inside)
    else:
        kept = wide(next_ptr + at, is_kept)
    sequence = tl.load(active_ptr + entry)
    to = (sequence * length + row)[:, None] * width + column[None, :]
    tl.store(best_ptr + to, kept, is_kept)
    change = load(change_ptr + entry * length + row, is_better)
    size = load(size_ptr + entry * length + row, is_better)
    tl.store(token_ptr + sequence * length + row, relative(change, size, eps), is_better)


@triton.jit
def relative(change, size, eps):
    return tl.sqrt(change) / (tl.sqrt(size) + eps)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def is_bad(token):
    return (token != token) | (token == float("inf"))
