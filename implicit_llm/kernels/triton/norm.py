"""RMS norm, plain and gated, with its gradient, in one kernel each way. Imported where Triton kernels run.

Every tensor is read once and written once. A few programs for every multiprocessor go through all rows, so that the
gradient of the weight stays in registers until one sum at the end. The backward pass has the whole row at hand and
sums its squares anew: there is nothing to keep but the inputs.
The plain PyTorch twin is `kernels.norm`.

Shapes: `...` any leading dimensions, `D` width, `T` rows, `S` programs.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import wide

ENTRIES_PER_THREAD = 8  # 16 bytes of bf16, the widest load there is
MIN_WARPS, MAX_WARPS = 4, 32
FORWARD_WARPS, BACKWARD_WARPS = 32, 16  # of a multiprocessor, all of them at once: 64 and 128 registers a thread
STAGES = 3  # rows under way: those to come are loaded while one is worked on
STAGED_ENTRIES = 4096  # of x, gate and dy each: at most 48 KiB of shared memory


def rms_norm(x_D: Tensor, gate_D: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As `kernels.norm`, in `dtype`. x and gate may be views whose rows lie apart: nothing is copied."""
    return _Norm.apply(x_D, gate_D, weight_D, eps, dtype)


class _Rows:
    """x and gate as rows, and how these are shared out: some at a time, as a power of two wide, to each program."""

    def __init__(self, x: Tensor, gate: Tensor | None, warps_at_once: int) -> None:
        self.x_TD, self.gate_TD = _as_rows(x), None if gate is None else _as_rows(gate)
        count, width = self.x_TD.shape
        columns = triton.next_power_of_2(width)
        rows = max(1, MIN_WARPS * 32 * ENTRIES_PER_THREAD // columns)
        warps = min(max(rows * columns // (32 * ENTRIES_PER_THREAD), MIN_WARPS), MAX_WARPS)
        programs = _multiprocessors(x.device) * max(1, warps_at_once // warps)
        self.programs = min(programs, triton.cdiv(count, rows))
        stages = min(STAGES, 1 + STAGED_ENTRIES // (rows * columns))
        self._how = {"ROWS": rows, "COLUMNS": columns, "STAGES": stages, "num_warps": warps}

    def launch(self, kernel: Any, weight_D: Tensor, *others: Any) -> None:
        """others: tensors, then what follows the strides of x and gate."""
        if not self.programs:
            return
        x_TD, gate_TD = self.x_TD, self.x_TD if self.gate_TD is None else self.gate_TD
        tensors = [t for t in others if isinstance(t, Tensor)]
        kernel[(self.programs,)](
            x_TD, gate_TD, weight_D.contiguous(), *tensors, *x_TD.shape, x_TD.stride(0), gate_TD.stride(0),
            *others[len(tensors) :], HAS_GATE=self.gate_TD is not None, **self._how,
        )  # fmt: skip


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _as_rows(t: Tensor) -> Tensor:
    """(T, D) with the entries of a row side by side: a view unless no stride leads from row to row."""
    t_TD = t.reshape(-1, t.shape[-1])
    return t_TD if t_TD.stride(1) == 1 else t_TD.contiguous()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, gate, weight_D)
        ctx.eps = eps
        rows = _Rows(x, gate, FORWARD_WARPS)
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        rows.launch(_forward_kernel, weight_D, y, eps)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight_D = ctx.saved_tensors
        rows, dy_TD = _Rows(x, gate, BACKWARD_WARPS), _as_rows(dy)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dgate = None if gate is None else torch.empty(x.shape, dtype=gate.dtype, device=x.device)
        dweight_SD = torch.empty(rows.programs, x.shape[-1], dtype=torch.float32, device=x.device)
        tensors = (dy_TD, dx, dx if dgate is None else dgate, dweight_SD)
        rows.launch(_backward_kernel, weight_D, *tensors, dy_TD.stride(0), ctx.eps)
        dweight = dweight_SD.sum(0).to(weight_D.dtype) if ctx.needs_input_grad[2] else None
        return dx, dgate, dweight, None, None


@triton.jit
def _forward_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr,
    rows, width, x_stride, gate_stride, eps,
    HAS_GATE: constexpr, ROWS: constexpr, COLUMNS: constexpr, STAGES: constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    weight = wide(weight_ptr + column, column < width)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        is_inside = (row < rows) & (column < width)
        gated = wide(x_ptr + row * x_stride + column, is_inside)
        if HAS_GATE:
            gate = wide(gate_ptr + row * gate_stride + column, is_inside)
            gated *= gate * tl.sigmoid(gate)
        scale = tl.rsqrt(tl.sum(gated * gated, axis=1) / width + eps)
        y = gated * scale[:, None] * weight
        tl.store(y_ptr + row * width + column, y, is_inside)


@triton.jit
def _backward_kernel(
    x_ptr, gate_ptr, weight_ptr, dy_ptr, dx_ptr, dgate_ptr, dweight_ptr,
    rows, width, x_stride, gate_stride, dy_stride, eps,
    HAS_GATE: constexpr, ROWS: constexpr, COLUMNS: constexpr, STAGES: constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    weight = wide(weight_ptr + column, column < width)
    dweight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        is_inside = (row < rows) & (column < width)
        x = wide(x_ptr + row * x_stride + column, is_inside)
        dy = wide(dy_ptr + row * dy_stride + column, is_inside)
        gated = x
        if HAS_GATE:
            gate = wide(gate_ptr + row * gate_stride + column, is_inside)
            sigmoid = tl.sigmoid(gate)
            gated = x * (gate * sigmoid)
        dnormed = dy * weight
        scale = tl.rsqrt(tl.sum(gated * gated, axis=1) / width + eps)[:, None]
        projection = tl.sum(dnormed * gated, axis=1)[:, None] / width
        dweight += tl.where(is_inside, dy * gated * scale, 0.0)
        dgated = (dnormed - gated * (projection * scale * scale)) * scale
        dx = dgated
        if HAS_GATE:
            dx = dgated * gate * sigmoid
            dgate = dgated * x * sigmoid * (1.0 + gate * (1.0 - sigmoid))
            tl.store(dgate_ptr + row * width + column, dgate, is_inside)
        tl.store(dx_ptr + row * width + column, dx, is_inside)
    to = dweight_ptr + tl.program_id(0).to(tl.int64) * width + tl.arange(0, COLUMNS)
    tl.store(to, tl.sum(dweight, axis=0), tl.arange(0, COLUMNS) < width)
