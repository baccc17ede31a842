"""Multiply single tokens by weights in fp32, fused with what comes before and after (imported only if Triton runs).

A decoded token is little work for a GPU, and most of its time passes while kernels wait for each other. These kernels
do more than a product: `project` first takes the norm of a token, and then adds the injection or applies SwiGLU;
`add` adds the product to the residual stream. For one sequence a program sums over rows of the weight; for several it
multiplies tiles in matrix units.

On a Hopper GPU a kernel starts while the kernel before it still runs (programmatic dependent launch). Before it waits
for that kernel, it loads what no kernel of the stack writes, such as weights and the injection. Every program waits
before it loads or stores anything else. So when a kernel stores, all kernels before it have ended, and the layers of a
stack can share the tensors between the kernels. The kernels between the products must wait as well (`EARLY`).

Shapes: `B` batch, `W` width of the input, `R` rows of the weight, `D` model, `S` parts of a sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import load

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an old Triton, with which no kernel starts early
    gdc_launch_dependents = gdc_wait = None

ROW_ENTRIES, MAX_ROWS = 8192, 8  # entries and rows of a weight that one program holds in registers
PROJECT_TILE, ADD_TILE = (64, 32), (32, 16)  # sequences (at most) and rows, in products for several sequences
TILE_ENTRIES, STAGES = 64, 3  # entries of a row that these products load at once, and such loads in flight
WARPS = 4


def starts_early(device: torch.device) -> bool:
    """Return whether a kernel can start before the kernel ahead of it has ended."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None and gdc_wait is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


class TokenProducts:
    """The products of a stack with one token of each sequence.

    launch: the options of every kernel of the stack but the first. The first waits for everything before it, which may
        have written the injection or the states.
    """

    def __init__(self, batch: int, eps: float, device: torch.device) -> None:
        self._batch, self._eps = batch, eps
        self._first = {"EARLY": starts_early(device), "num_warps": WARPS}
        self.launch = self._first | ({"launch_pdl": True} if self._first["EARLY"] else {})
        matmul = torch.get_float32_matmul_precision()
        self._precision = "ieee" if matmul == "highest" else "tf32"

    def project(
        self,
        h: Tensor,
        norm_W: Tensor,
        weight_RW: Tensor,
        out: Tensor,
        *,
        added: Tensor | None = None,
        has_gates: bool = False,
        is_first: bool = False,
    ) -> None:
        """Write norm(h) weight^T + added to `out`; with `has_gates`, silu(gate) * up of gate and up side by side.

        Args: h is (B, 1, W); out and added are (B, 1, R), or (B, 1, R / 2) with gates.
        """
        rows, width = weight_RW.shape
        rows = rows // 2 if has_gates else rows
        how = self._cut(width * (1 + has_gates), width, PROJECT_TILE)
        how |= {"WIDTH": width, "ADDS": added is not None, "GATES": has_gates}
        how |= self._first if is_first else self.launch
        kernel = _project_kernel if self._batch == 1 else _project_tile_kernel
        kernel[self._programs(rows, how)](
            h, norm_W, weight_RW, out if added is None else added, out, self._batch, rows, self._eps, **how
        )

    def add(
        self, y: Tensor, weight_DW: Tensor, from_B1D: Tensor, h_B1D: Tensor, squares_BS: Tensor | None = None
    ) -> None:
        """Write from + scale y weight^T to h, which may be the same tensor.

        The scale is that of the norm of a token, given parts of its sum of squares; without these it is 1.
        """
        rows, width = weight_DW.shape
        parts = 0 if squares_BS is None else squares_BS.shape[1]
        how = self._cut(width, width, ADD_TILE) | self.launch
        how |= {"WIDTH": width, "PARTS": parts, "ALL_PARTS": triton.next_power_of_2(max(parts, 1))}
        kernel = _add_kernel if self._batch == 1 else _add_tile_kernel
        kernel[self._programs(rows, how)](
            y, y if squares_BS is None else squares_BS, weight_DW, from_B1D, h_B1D, self._batch, rows, self._eps, **how
        )

    def _cut(self, entries: int, width: int, tile: tuple[int, int]) -> dict[str, Any]:
        """Return how the programs cut a product in which each result needs `entries` entries of the weight."""
        if self._batch > 1:
            sequences = min(tile[0], max(16, triton.next_power_of_2(self._batch)))  # matrix units need 16
            cut = {"BATCH": sequences, "ROWS": tile[1], "ENTRIES": TILE_ENTRIES, "num_stages": STAGES}
            return cut | {"PRECISION": self._precision}
        # A row consists of a power of two and the rest, which is padded to another power of two.
        first = triton.next_power_of_2(width) // 2
        rows = max(1, min(MAX_ROWS, ROW_ENTRIES // entries))
        rest = triton.next_power_of_2(width - first)
        return {"FIRST": first, "REST": rest, "ROWS": 1 << (rows.bit_length() - 1)}

    def _programs(self, rows: int, how: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(rows, how["ROWS"]), triton.cdiv(self._batch, how.get("BATCH", 1))


@triton.jit
def _row_parts(weight_ptr, of_R, is_row, of_F, of_G, is_there, WIDTH: constexpr):
    at = weight_ptr + of_R[:, None] * WIDTH
    first_RF = load(at + of_F[None, :], is_row[:, None])
    return first_RF, load(at + of_G[None, :], is_row[:, None] & is_there[None, :])


@triton.jit
def _sums(first_RF, rest_RG, x_F, x_G):
    return tl.sum(first_RF * x_F[None, :], axis=1) + tl.sum(rest_RG * x_G[None, :], axis=1)


@triton.jit
def _project_kernel(
    h_ptr, norm_ptr, weight_ptr, added_ptr, out_ptr, batch, rows, eps,
    WIDTH: constexpr, FIRST: constexpr, REST: constexpr, ROWS: constexpr,
    ADDS: constexpr, GATES: constexpr, EARLY: constexpr,
):  # fmt: skip
    of_R, of_F, of_G = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    is_row, is_there = of_R < rows, of_G < WIDTH
    if EARLY:
        gdc_launch_dependents()
    first_RF, rest_RG = _row_parts(weight_ptr, of_R, is_row, of_F, of_G, is_there, WIDTH)
    if GATES:
        up_RF, up_RG = _row_parts(weight_ptr + rows * WIDTH, of_R, is_row, of_F, of_G, is_there, WIDTH)
    norm_F, norm_G = tl.load(norm_ptr + of_F), load(norm_ptr + of_G, is_there)
    if ADDS:
        added_R = load(added_ptr + of_R, is_row)
    if EARLY:
        gdc_wait()
    h_F, h_G = tl.load(h_ptr + of_F), load(h_ptr + of_G, is_there)
    scale = tl.rsqrt((tl.sum(h_F * h_F, axis=0) + tl.sum(h_G * h_G, axis=0)) / WIDTH + eps)
    h_F, h_G = h_F * norm_F, h_G * norm_G
    y_R = _sums(first_RF, rest_RG, h_F, h_G) * scale
    if GATES:
        y_R *= tl.sigmoid(y_R) * _sums(up_RF, up_RG, h_F, h_G) * scale
    if ADDS:
        y_R += added_R
    tl.store(out_ptr + of_R, y_R, is_row)


@triton.jit
def _project_tile_kernel(
    h_ptr, norm_ptr, weight_ptr, added_ptr, out_ptr, batch, rows, eps,
    WIDTH: constexpr, BATCH: constexpr, ROWS: constexpr, ENTRIES: constexpr, PRECISION: constexpr,
    ADDS: constexpr, GATES: constexpr, EARLY: constexpr,
):  # fmt: skip
    of_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    of_B = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    is_row, is_sequence = of_R < rows, of_B < batch
    of_BR, is_BR = of_B[:, None] * rows + of_R[None, :], is_sequence[:, None] & is_row[None, :]
    if EARLY:
        gdc_launch_dependents()
    if ADDS:
        added_BR = load(added_ptr + of_BR, is_BR)
    if EARLY:
        gdc_wait()
    y_BR = tl.zeros((BATCH, ROWS), dtype=tl.float32)
    up_BR = tl.zeros((BATCH, ROWS), dtype=tl.float32)
    squares_B = tl.zeros((BATCH,), dtype=tl.float32)
    for start in range(0, WIDTH, ENTRIES):
        of_W = start + tl.arange(0, ENTRIES)
        is_there = (of_W < WIDTH)[None, :]
        h_BW = load(h_ptr + of_B[:, None] * WIDTH + of_W[None, :], is_sequence[:, None] & is_there)
        at_RW, is_RW = weight_ptr + of_R[:, None] * WIDTH + of_W[None, :], is_row[:, None] & is_there
        squares_B += tl.sum(h_BW * h_BW, axis=1)
        h_BW *= load(norm_ptr + of_W, of_W < WIDTH)[None, :]
        y_BR = tl.dot(h_BW, tl.trans(load(at_RW, is_RW)), y_BR, input_precision=PRECISION)
        if GATES:
            up_BR = tl.dot(h_BW, tl.trans(load(at_RW + rows * WIDTH, is_RW)), up_BR, input_precision=PRECISION)
    scale_B = tl.rsqrt(squares_B / WIDTH + eps)
    y_BR *= scale_B[:, None]
    if GATES:
        y_BR *= tl.sigmoid(y_BR) * up_BR * scale_B[:, None]
    if ADDS:
        y_BR += added_BR
    tl.store(out_ptr + of_BR, y_BR, is_BR)


@triton.jit
def _add_kernel(
    y_ptr, squares_ptr, weight_ptr, from_ptr, h_ptr, batch, rows, eps,
    WIDTH: constexpr, PARTS: constexpr, ALL_PARTS: constexpr,
    FIRST: constexpr, REST: constexpr, ROWS: constexpr, EARLY: constexpr,
):  # fmt: skip
    of_R, of_F, of_G = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    is_row, is_there = of_R < rows, of_G < WIDTH
    if EARLY:
        gdc_launch_dependents()
    first_RF, rest_RG = _row_parts(weight_ptr, of_R, is_row, of_F, of_G, is_there, WIDTH)
    if EARLY:
        gdc_wait()
    h_R = load(from_ptr + of_R, is_row)
    y_R = _sums(first_RF, rest_RG, tl.load(y_ptr + of_F), load(y_ptr + of_G, is_there))
    if PARTS > 0:
        of_S = tl.arange(0, ALL_PARTS)
        y_R *= tl.rsqrt(tl.sum(load(squares_ptr + of_S, of_S < PARTS), axis=0) / WIDTH + eps)
    tl.store(h_ptr + of_R, h_R + y_R, is_row)


@triton.jit
def _add_tile_kernel(
    y_ptr, squares_ptr, weight_ptr, from_ptr, h_ptr, batch, rows, eps,
    WIDTH: constexpr, PARTS: constexpr, ALL_PARTS: constexpr,
    BATCH: constexpr, ROWS: constexpr, ENTRIES: constexpr, PRECISION: constexpr, EARLY: constexpr,
):  # fmt: skip
    of_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    of_B = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    is_row, is_sequence = of_R < rows, of_B < batch
    of_BR, is_BR = of_B[:, None] * rows + of_R[None, :], is_sequence[:, None] & is_row[None, :]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    h_BR = load(from_ptr + of_BR, is_BR)
    y_BR = tl.zeros((BATCH, ROWS), dtype=tl.float32)
    for start in range(0, WIDTH, ENTRIES):
        of_W = start + tl.arange(0, ENTRIES)
        is_there = (of_W < WIDTH)[None, :]
        x_BW = load(y_ptr + of_B[:, None] * WIDTH + of_W[None, :], is_sequence[:, None] & is_there)
        weight_RW = load(weight_ptr + of_R[:, None] * WIDTH + of_W[None, :], is_row[:, None] & is_there)
        y_BR = tl.dot(x_BW, tl.trans(weight_RW), y_BR, input_precision=PRECISION)
    if PARTS > 0:
        of_S = tl.arange(0, ALL_PARTS)
        is_part = is_sequence[:, None] & (of_S < PARTS)[None, :]
        squares_B = tl.sum(load(squares_ptr + of_B[:, None] * PARTS + of_S[None, :], is_part), axis=1)
        y_BR *= tl.rsqrt(squares_B / WIDTH + eps)[:, None]
    tl.store(h_ptr + of_BR, h_BR + y_BR, is_BR)
