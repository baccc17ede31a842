"""Compute RMS norms with one kernel for the forward and one for the backward pass (imported only if Triton runs).

A kernel reads every input once and writes every output once. A few programs per multiprocessor loop over all rows, so
that the gradient of the weight stays in registers until one sum at the end. The backward pass loads the whole row
anyway and sums its squares again, so no scale is stored. `kernels.norm` does the same in plain PyTorch.

Shapes: `...` any leading dimensions, `D` width, `T` rows, `S` programs.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import load, wide
from implicit_llm.kernels.triton.sums import sum_rows

ENTRIES_PER_THREAD = 8  # 16 bytes of bf16, the widest load of a thread
MIN_WARPS, MAX_WARPS = 4, 32
FORWARD_WARPS, BACKWARD_WARPS = 32, 16  # warps of a multiprocessor at once, with 64 and 128 registers per thread
STAGES = 3  # at most; the pipeline loads the rows of later iterations while it processes the rows of this one
STAGED_ENTRIES = 4096  # of x, gate and dy each, in at most 48 KiB of shared memory

Scale = tuple[Tensor, int, float]  # squares, width and eps of `kernels.norm.Unscaled`


def rms_norm(x_D: Tensor, gate_D: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Implement `kernels.norm.rms_norm`. Views x and gate with gaps between their rows are not copied."""
    return _Norm.apply(x_D, gate_D, weight_D, eps, dtype)


def add_and_norm(
    h_D: Tensor, branch_D: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype, scale: Scale | None = None
) -> tuple[Tensor, Tensor]:
    """Implement `kernels.norm.add_and_norm`: return the sum in the dtype of h, and its norm in `dtype`.

    If `scale` is given, the branch is `Unscaled.rows`, and the call has no gradient.
    """
    if scale is not None:
        return _added_norm(h_D, branch_D, weight_D, eps, dtype, scale)
    return _AddedNorm.apply(h_D, branch_D, weight_D, eps, dtype)


class _Rows:
    """A pair of tensors as rows; each program processes a few rows at a time, padded to a power of two entries.

    The second tensor is the gate or None. With `is_sum` it is the branch in the forward pass, and in the backward pass
    the gradient of the sum.
    """

    def __init__(self, x: Tensor, second: Tensor | None, warps_at_once: int, *, is_sum: bool = False) -> None:
        self.x_TD, second_TD = _as_rows(x), None if second is None else _as_rows(second)
        self.second_TD = self.x_TD if second_TD is None else second_TD
        count, width = self.x_TD.shape
        columns = triton.next_power_of_2(width)
        rows = max(1, MIN_WARPS * 32 * ENTRIES_PER_THREAD // columns)
        warps = min(max(rows * columns // (32 * ENTRIES_PER_THREAD), MIN_WARPS), MAX_WARPS)
        programs = _multiprocessors(x.device) * max(1, warps_at_once // warps)
        self.programs = min(programs, triton.cdiv(count, rows))
        stages = min(STAGES, 1 + STAGED_ENTRIES // (rows * columns))
        self._how = {"ROWS": rows, "COLUMNS": columns, "STAGES": stages, "num_warps": warps}
        self._how |= {"IS_GATED": second is not None and not is_sum, "IS_SUM": is_sum}

    def launch(self, kernel: Any, weight_D: Tensor, *others: Any, **constants: int) -> None:
        """Launch a kernel over the rows; `others` are tensors, then the arguments that follow the rows' strides."""
        if not self.programs:
            return
        tensors = [t for t in others if isinstance(t, Tensor)]
        strides = self.x_TD.stride(0), self.second_TD.stride(0)
        kernel[(self.programs,)](
            self.x_TD, self.second_TD, weight_D.contiguous(), *tensors, *self.x_TD.shape, *strides,
            *others[len(tensors) :], **self._how, **constants,
        )  # fmt: skip


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _as_rows(t: Tensor) -> Tensor:
    """Return t as rows (T, D) with contiguous entries; a view if one stride leads from row to row."""
    t_TD = t.reshape(-1, t.shape[-1])
    return t_TD if t_TD.stride(1) == 1 else t_TD.contiguous()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, gate, weight_D)
        ctx.eps = eps
        rows = _Rows(x, gate, FORWARD_WARPS)
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        rows.launch(_forward_kernel, weight_D, y, y, y, eps, 1, 0.0, PARTS=0, ALL_PARTS=1)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight_D = ctx.saved_tensors
        rows = _Rows(x, gate, BACKWARD_WARPS)
        dx, dgate, dweight = _gradients(rows, x, None if gate is None else gate.dtype, weight_D, dy, ctx.eps)
        return dx, dgate, dweight, None, None


class _AddedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, branch: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total, y = _added_norm(h, branch, weight_D, eps, dtype)
        ctx.save_for_backward(total, weight_D)
        ctx.eps, ctx.branch_dtype = eps, branch.dtype
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight_D = ctx.saved_tensors
        dy = torch.zeros_like(total) if dy is None else dy
        rows = _Rows(total, dtotal, BACKWARD_WARPS, is_sum=dtotal is not None)
        narrow = None if dtotal is None or ctx.branch_dtype == total.dtype else ctx.branch_dtype
        dh, dbranch, dweight = _gradients(rows, total, narrow, weight_D, dy, ctx.eps)
        return dh, dh.to(ctx.branch_dtype) if dbranch is None else dbranch, dweight, None, None


def _added_norm(
    h: Tensor, branch: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype, scale: Scale | None = None
) -> tuple[Tensor, Tensor]:
    total = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    y = torch.empty(h.shape, dtype=dtype, device=h.device)
    squares, width, scale_eps = (y, 1, 0.0) if scale is None else scale
    parts = 0 if scale is None else squares.shape[-1]
    _Rows(h, branch, FORWARD_WARPS, is_sum=True).launch(
        _forward_kernel, weight_D, y, total, squares.contiguous(), eps, width, scale_eps,
        PARTS=parts, ALL_PARTS=triton.next_power_of_2(max(parts, 1)),
    )  # fmt: skip
    return total, y


def _gradients(
    rows: _Rows, x: Tensor, second_dtype: torch.dtype | None, weight_D: Tensor, dy: Tensor, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of x, of the gate or branch (None if `second_dtype` is None), and of the weight."""
    dy_TD = _as_rows(dy)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dsecond = None if second_dtype is None else torch.empty(x.shape, dtype=second_dtype, device=x.device)
    dweight_1SD = torch.empty(1, rows.programs, x.shape[-1], dtype=torch.float32, device=x.device)
    tensors = (dy_TD, dx, dx if dsecond is None else dsecond, dweight_1SD)
    rows.launch(_backward_kernel, weight_D, *tensors, dy_TD.stride(0), eps)
    return dx, dsecond, sum_rows(dweight_1SD)[0].to(weight_D.dtype)


@triton.jit
def _forward_kernel(
    x_ptr, second_ptr, weight_ptr, y_ptr, sum_ptr, squares_ptr,
    rows, width, x_stride, second_stride, eps, scale_width, scale_eps,
    IS_GATED: constexpr, IS_SUM: constexpr, ROWS: constexpr, COLUMNS: constexpr, STAGES: constexpr,
    PARTS: constexpr, ALL_PARTS: constexpr,
):  # fmt: skip
    """Normalise rows, gated rows or sums; with `PARTS` > 0, scale the second summand (`kernels.norm.Unscaled`)."""
    column, part = tl.arange(0, COLUMNS)[None, :], tl.arange(0, ALL_PARTS)[None, :]
    weight = wide(weight_ptr + column, column < width)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        is_inside = (row < rows) & (column < width)
        x = wide(x_ptr + row * x_stride + column, is_inside)
        if IS_GATED:
            gate = wide(second_ptr + row * second_stride + column, is_inside)
            x *= gate * tl.sigmoid(gate)
        if IS_SUM:
            branch = wide(second_ptr + row * second_stride + column, is_inside)
            if PARTS > 0:
                squares = load(squares_ptr + row * PARTS + part, (row < rows) & (part < PARTS))
                branch *= tl.rsqrt(tl.sum(squares, axis=1) / scale_width + scale_eps)[:, None]
            x += branch
            rounded = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * width + column, rounded, is_inside)
            x = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
        y = x * scale[:, None] * weight
        tl.store(y_ptr + row * width + column, y, is_inside)


@triton.jit
def _backward_kernel(
    x_ptr, second_ptr, weight_ptr, dy_ptr, dx_ptr, dsecond_ptr, dweight_ptr,
    rows, width, x_stride, second_stride, dy_stride, eps,
    IS_GATED: constexpr, IS_SUM: constexpr, ROWS: constexpr, COLUMNS: constexpr, STAGES: constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    weight = wide(weight_ptr + column, column < width)
    dweight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        is_inside = (row < rows) & (column < width)
        x = wide(x_ptr + row * x_stride + column, is_inside)
        dy = wide(dy_ptr + row * dy_stride + column, is_inside)
        normed = x
        if IS_GATED:
            gate = wide(second_ptr + row * second_stride + column, is_inside)
            sigmoid = tl.sigmoid(gate)
            normed = x * (gate * sigmoid)
        dnormed = dy * weight
        scale = tl.rsqrt(tl.sum(normed * normed, axis=1) / width + eps)[:, None]
        projection = tl.sum(dnormed * normed, axis=1)[:, None] / width
        dweight += tl.where(is_inside, dy * normed * scale, 0.0)
        dx = (dnormed - normed * (projection * scale * scale)) * scale
        if IS_GATED:
            dgate = dx * x * sigmoid * (1.0 + gate * (1.0 - sigmoid))
            tl.store(dsecond_ptr + row * width + column, dgate, is_inside)
            dx = dx * gate * sigmoid
        if IS_SUM:
            dx += wide(second_ptr + row * second_stride + column, is_inside)
            tl.store(dsecond_ptr + row * width + column, dx, is_inside)
        tl.store(dx_ptr + row * width + column, dx, is_inside)
    to = dweight_ptr + tl.program_id(0).to(tl.int64) * width + tl.arange(0, COLUMNS)
    tl.store(to, tl.sum(dweight, axis=0), tl.arange(0, COLUMNS) < width)
