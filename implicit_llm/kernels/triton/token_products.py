"""Multiply a single token by weights in fp32, fused with what comes before and after (imported only if Triton runs).

A decoded token is little work for a GPU, and most of its time passes while kernels wait for each other. These kernels
do more than a product: `project` computes the norm of a token before the product, and can add the injection or apply
SwiGLU after it; `add` adds the product to the residual stream. A program multiplies the token by a few rows of
the weight, without matrix units. For several sequences, PyTorch's own products, which use these units, are faster.

On a Hopper GPU a kernel starts while the kernel before it still runs (programmatic dependent launch). Before it waits
for that kernel, it loads what no kernel of the stack writes, such as weights and the injection. Every program waits
before it loads or stores anything else. So when a kernel stores, all kernels before it have ended, and the layers of a
stack can share the tensors between the kernels. The kernels between the products must wait as well (`EARLY`).

Shapes: `W` width of the input, `R` rows of the weight, `D` model, `S` parts of a sum, `F` and `G` the first part and
the rest of a row (`_cut`).
"""

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

# A program holds at most MAX_ROWS rows of a weight in registers, and about ROW_ENTRIES entries, but at least one row.
ROW_ENTRIES, MAX_ROWS = 8192, 8
WARPS = 4


def starts_early(device: torch.device) -> bool:
    """Return whether a kernel can start before the kernel ahead of it has ended."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None and gdc_wait is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


class TokenProducts:
    """The products of a stack with one token of one sequence.

    launch: the launch options of every kernel of the stack except the first, which starts only after all earlier work
        has ended, because that work may have written the injection or the states.
    """

    def __init__(self, eps: float, device: torch.device) -> None:
        self._eps = eps
        self._first = {"EARLY": starts_early(device), "num_warps": WARPS}
        self.launch = self._first | ({"launch_pdl": True} if self._first["EARLY"] else {})

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
        """Write norm(h) weight^T + added to `out`; with `has_gates`, silu(gate) * up replaces the product (gate, up).

        Args: h has W entries; out and added have R entries, or R / 2 with gates. is_first: whether this is the first
            kernel of the stack.
        """
        rows, width = weight_RW.shape
        rows = rows // 2 if has_gates else rows
        cut = _cut(width, width * (1 + has_gates))
        launch = self._first if is_first else self.launch
        _project_kernel[(triton.cdiv(rows, cut["ROWS"]),)](
            h, norm_W, weight_RW, out if added is None else added, out, rows, self._eps,
            ADDS=added is not None, GATES=has_gates, **cut, **launch,
        )  # fmt: skip

    def add(
        self, y: Tensor, weight_DW: Tensor, from_11D: Tensor, h_11D: Tensor, squares_S: Tensor | None = None
    ) -> None:
        """Write from + scale y weight^T to `h_11D`, which may be the tensor `from_11D`.

        The scale is that of an RMS norm whose sum of squares is the sum of `squares_S`; without `squares_S` it is 1.
        """
        rows, width = weight_DW.shape
        parts, cut = 0 if squares_S is None else len(squares_S), _cut(width, width)
        _add_kernel[(triton.cdiv(rows, cut["ROWS"]),)](
            y, y if squares_S is None else squares_S, weight_DW, from_11D, h_11D, rows, self._eps,
            PARTS=parts, ALL_PARTS=triton.next_power_of_2(max(parts, 1)), **cut, **self.launch,
        )  # fmt: skip


def _cut(width: int, entries: int) -> dict[str, int]:
    """Return the kernels' constants for rows of `width` entries, if each result needs `entries` entries of the weight.

    The first part of a row has a power of two entries; the rest of the row is padded to another power of two.
    """
    first, rows = triton.next_power_of_2(width) // 2, max(1, min(MAX_ROWS, ROW_ENTRIES // entries))
    rest = triton.next_power_of_2(width - first)
    return {"WIDTH": width, "FIRST": first, "REST": rest, "ROWS": 1 << (rows.bit_length() - 1)}


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
    h_ptr, norm_ptr, weight_ptr, added_ptr, out_ptr, rows, eps,
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
def _add_kernel(
    y_ptr, squares_ptr, weight_ptr, from_ptr, h_ptr, rows, eps,
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
