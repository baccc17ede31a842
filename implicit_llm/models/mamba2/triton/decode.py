"""Evaluate a Mamba2 stack on one token of each sequence, in three kernels per layer (imported only if Triton runs).

A decoded token is little work for a GPU, and most of its time passes while kernels wait for each other. So an iteration
of a layer has only three kernels. `in` multiplies the norm of h by the in-projection and adds the injection. `token`
convolves and applies the state and the gate. `out` multiplies by the out-projection, applies the scale of the gated
norm to the result, and adds the result to h. An iteration does not need the state after the token, because
C (decay state + dt x B) = decay (C state) + dt x (C B).

On a Hopper GPU a kernel starts while the kernel before it still runs (programmatic dependent launch). Before it waits
for that kernel, it loads what no kernel of the stack writes: weights, injection and states. Every program waits before
it loads or stores anything else. So when a kernel stores, all kernels before it have ended, and the layers can share
the tensors between the kernels.
The plain PyTorch twin is `models.backbone.ImplicitModel.apply_stack`.

Shapes: `B` batch, `D` model, `E` in-projection (gate I, convolved C = I + 2 G N, dt H), `I` = H P inner, `H` heads,
`P` head width, `G` groups, `N` state, `K` convolution, `S` parts of all heads, `R` rows of a weight.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import load
from implicit_llm.models.mamba2.chunked_scan import ScanWeights
from implicit_llm.models.mamba2.triton.scan import precision
from implicit_llm.models.mamba2.triton.scan_inputs import softplus
from implicit_llm.models.stack import LayerState

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an old Triton, with which no kernel starts early
    gdc_launch_dependents = gdc_wait = None

ROW_ENTRIES, MAX_ROWS = 8192, 8  # entries and rows of a weight that one program holds in registers
STATE_ENTRIES = 4096  # of a state that one program holds in registers
MIN_PART = 16  # channels of a head that one program processes if there are few programs
FEW_PROGRAMS = 128  # about the number of multiprocessors
IN_TILE, OUT_TILE = (64, 32), (32, 16)  # sequences (at most) and rows of a weight, in products for several sequences
TILE_ENTRIES, STAGES = 64, 3  # entries of a row that these products load at once, and such loads in flight
WARPS = 4


@dataclass(frozen=True)
class TokenLayer:
    """The effective weights of one layer, in fp32 and contiguous."""

    norm_D: Tensor
    in_proj_ED: Tensor
    scan: ScanWeights
    gated_norm_I: Tensor
    out_proj_DI: Tensor


def starts_early(device: torch.device) -> bool:
    """Return whether a kernel can start before the kernel ahead of it has ended."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None and gdc_wait is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


class TokenStack:
    """The layers of a stack, and the tensors between their kernels for a batch of single tokens."""

    def __init__(self, layers: list[TokenLayer], sizes: tuple[int, int, int], eps: float, batch: int) -> None:
        """Allocate the tensors; `sizes` are (P, G, N)."""
        self._layers, self._sizes, self._eps, self._batch = layers, sizes, eps, batch
        first, (width, groups, size) = layers[0], sizes
        self._width, self._inner = first.out_proj_DI.shape
        columns, heads, device = len(first.in_proj_ED), len(first.scan.A_H), first.in_proj_ED.device
        self._part = min(width, STATE_ENTRIES // size)
        while self._part > MIN_PART and batch * self._inner // self._part < FEW_PROGRAMS:
            self._part //= 2
        self._projected_BE = torch.empty(batch, columns, device=device)
        self._y_BI = torch.empty(batch, self._inner, device=device)
        self._squares_BS = torch.empty(batch, self._inner // self._part, device=device)
        self._token = {"HEADS": heads, "GROUPS": groups, "P": width, "N": size, "K": first.scan.conv_CK.shape[1]}
        # The first kernel waits for everything before it, which may have written the injection or the states.
        self._first = {"EARLY": starts_early(device), "num_warps": WARPS}
        self._how = self._first | ({"launch_pdl": True} if self._first["EARLY"] else {})

    def __call__(self, z_B1D: Tensor, injection_B1E: Tensor, states: tuple[LayerState, ...]) -> Tensor:
        """Return the residual stream (B, 1, D) after the last layer, before the final norm.

        Args: states are those before the token: the SSM state (B, H, P, N) and the last K-1 inputs of the convolution
            (B, K-1, C) of each layer. All tensors are in fp32.
        """
        injection_B1E, from_B1D = injection_B1E.contiguous(), z_B1D.contiguous()
        h_B1D, how = torch.empty_like(from_B1D), self._first
        for layer, before in zip(self._layers, states, strict=True):
            state_BHPN, before_BKC = (state.contiguous() for state in before)
            self._project_in(layer, from_B1D, injection_B1E, how)
            _token_kernel[(self._token["HEADS"], self._token["P"] // self._part, self._batch)](
                self._projected_BE, *layer.scan, layer.gated_norm_I, state_BHPN, before_BKC, self._y_BI,
                self._squares_BS, **self._token, PART=self._part, **self._how,
            )  # fmt: skip
            self._project_out(layer, from_B1D, h_B1D)
            from_B1D, how = h_B1D, self._how
        return h_B1D

    def _project_in(self, layer: TokenLayer, h_B1D: Tensor, injection_B1E: Tensor, launch: dict[str, Any]) -> None:
        columns = self._projected_BE.shape[1]
        tensors = h_B1D, layer.norm_D, layer.in_proj_ED, injection_B1E, self._projected_BE
        if self._batch == 1:
            how = _rows(self._width) | launch
            _in_kernel[(triton.cdiv(columns, how["ROWS"]),)](*tensors, columns, self._eps, WIDTH=self._width, **how)
            return
        how = _tiles(self._batch, IN_TILE) | launch
        programs = triton.cdiv(columns, how["ROWS"]), triton.cdiv(self._batch, how["BATCH"])
        _in_tile_kernel[programs](*tensors, self._batch, columns, self._eps, WIDTH=self._width, **how)

    def _project_out(self, layer: TokenLayer, from_B1D: Tensor, h_B1D: Tensor) -> None:
        tensors = self._y_BI, self._squares_BS, layer.out_proj_DI, from_B1D, h_B1D
        parts = self._squares_BS.shape[1]
        known = {"INNER": self._inner, "PARTS": parts, "ALL_PARTS": triton.next_power_of_2(parts)}
        if self._batch == 1:
            how = known | _rows(self._inner) | self._how
            _out_kernel[(triton.cdiv(self._width, how["ROWS"]),)](*tensors, self._width, self._eps, **how)
            return
        how = known | _tiles(self._batch, OUT_TILE) | self._how
        programs = triton.cdiv(self._width, how["ROWS"]), triton.cdiv(self._batch, how["BATCH"])
        _out_tile_kernel[programs](*tensors, self._batch, self._width, self._eps, **how)


def _rows(width: int) -> dict[str, int]:
    """Return how a program holds rows of this width: as a power of two and the rest, padded to another one."""
    first = triton.next_power_of_2(width) // 2
    rest = triton.next_power_of_2(max(1, width - first))
    rows = max(1, min(MAX_ROWS, ROW_ENTRIES // (first + rest)))
    return {"FIRST": first, "REST": rest, "ROWS": 1 << (rows.bit_length() - 1)}


def _tiles(batch: int, tile: tuple[int, int]) -> dict[str, Any]:
    """Return how products for several sequences are cut; matrix units need at least 16 of them."""
    sequences = min(tile[0], max(16, triton.next_power_of_2(batch)))
    return {
        "BATCH": sequences, "ROWS": tile[1], "ENTRIES": TILE_ENTRIES, "PRECISION": precision(), "num_stages": STAGES,
    }  # fmt: skip


@triton.jit
def _in_kernel(
    h_ptr, norm_ptr, weight_ptr, injection_ptr, projected_ptr, columns, eps,
    WIDTH: constexpr, FIRST: constexpr, REST: constexpr, ROWS: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Write some entries of norm(h) W^T + injection for a batch of one."""
    of_R, of_F, of_G = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    at, is_row, is_there = weight_ptr + of_R[:, None] * WIDTH, of_R < columns, of_G < WIDTH
    if EARLY:
        gdc_launch_dependents()
    weight_RF = load(at + of_F[None, :], is_row[:, None])
    weight_RG = load(at + of_G[None, :], is_row[:, None] & is_there[None, :])
    norm_F, norm_G = tl.load(norm_ptr + of_F), load(norm_ptr + of_G, is_there)
    injection_R = load(injection_ptr + of_R, is_row)
    if EARLY:
        gdc_wait()
    h_F, h_G = tl.load(h_ptr + of_F), load(h_ptr + of_G, is_there)
    scale = tl.rsqrt((tl.sum(h_F * h_F, axis=0) + tl.sum(h_G * h_G, axis=0)) / WIDTH + eps)
    y_R = tl.sum(weight_RF * (h_F * norm_F)[None, :], axis=1) + tl.sum(weight_RG * (h_G * norm_G)[None, :], axis=1)
    tl.store(projected_ptr + of_R, y_R * scale + injection_R, is_row)


@triton.jit
def _in_tile_kernel(
    h_ptr, norm_ptr, weight_ptr, injection_ptr, projected_ptr, batch, columns, eps,
    WIDTH: constexpr, BATCH: constexpr, ROWS: constexpr, ENTRIES: constexpr, PRECISION: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Write a tile of norm(h) W^T + injection."""
    of_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    of_B = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    is_row, is_sequence = of_R < columns, of_B < batch
    of_BR, is_BR = of_B[:, None] * columns + of_R[None, :], is_sequence[:, None] & is_row[None, :]
    if EARLY:
        gdc_launch_dependents()
    injection_BR = load(injection_ptr + of_BR, is_BR)
    if EARLY:
        gdc_wait()
    y_BR = tl.zeros((BATCH, ROWS), dtype=tl.float32)
    squares_B = tl.zeros((BATCH,), dtype=tl.float32)
    for start in range(0, WIDTH, ENTRIES):
        of_T = start + tl.arange(0, ENTRIES)
        is_there = (of_T < WIDTH)[None, :]
        h_BT = load(h_ptr + of_B[:, None] * WIDTH + of_T[None, :], is_sequence[:, None] & is_there)
        weight_RT = load(weight_ptr + of_R[:, None] * WIDTH + of_T[None, :], is_row[:, None] & is_there)
        squares_B += tl.sum(h_BT * h_BT, axis=1)
        u_BT = h_BT * load(norm_ptr + of_T, of_T < WIDTH)[None, :]
        y_BR = tl.dot(u_BT, tl.trans(weight_RT), y_BR, input_precision=PRECISION)
    scale_B = tl.rsqrt(squares_B / WIDTH + eps)
    tl.store(projected_ptr + of_BR, y_BR * scale_B[:, None] + injection_BR, is_BR)


@triton.jit
def _inputs_ahead(conv_ptr, bias_ptr, before_ptr, channels, CHANNELS: constexpr, K: constexpr):
    """Load what the convolution of some channels needs besides the token: four weights, bias and three inputs before.

    Beyond the width K of a narrower convolution these are 0.
    """
    last_ptr, newest_ptr = conv_ptr + channels * K + (K - 1), before_ptr + channels + (K - 2) * CHANNELS
    is_there = channels >= 0
    return (
        tl.load(last_ptr), load(last_ptr - 1, is_there & (K > 1)), load(last_ptr - 2, is_there & (K > 2)),
        load(last_ptr - 3, is_there & (K > 3)), tl.load(bias_ptr + channels), load(newest_ptr, is_there & (K > 1)),
        load(newest_ptr - CHANNELS, is_there & (K > 2)), load(newest_ptr - 2 * CHANNELS, is_there & (K > 3)),
    )  # fmt: skip


@triton.jit
def _convolved(token_ptr, channels, ahead):
    """Compute silu(convolution) of some channels."""
    w0, w1, w2, w3, bias, x1, x2, x3 = ahead
    total = bias + w0 * tl.load(token_ptr + channels) + w1 * x1 + w2 * x2 + w3 * x3
    return total * tl.sigmoid(total)


@triton.jit
def _token_kernel(
    projected_ptr, conv_ptr, bias_ptr, dt_bias_ptr, A_ptr, D_ptr, norm_ptr, state_ptr, before_ptr, y_ptr, squares_ptr,
    HEADS: constexpr, GROUPS: constexpr, P: constexpr, N: constexpr, K: constexpr, PART: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Write gated y times the norm's weight for some channels of a head, and the sum of the squares of gated y."""
    head, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    INNER: constexpr = HEADS * P
    CHANNELS: constexpr = INNER + 2 * GROUPS * N
    of_N, of_P = tl.arange(0, N), head * P + part * PART + tl.arange(0, PART)
    of_B = INNER + head // (HEADS // GROUPS) * N + of_N
    of_C = of_B + GROUPS * N
    projected_ptr += sequence * (INNER + CHANNELS + HEADS)
    before_ptr += sequence * (K - 1) * CHANNELS
    state_ptr += sequence * INNER * N
    if EARLY:
        gdc_launch_dependents()
    state_PN = tl.load(state_ptr + of_P[:, None] * N + of_N[None, :])
    x_ahead = _inputs_ahead(conv_ptr, bias_ptr, before_ptr, of_P, CHANNELS, K)
    B_ahead = _inputs_ahead(conv_ptr, bias_ptr, before_ptr, of_B, CHANNELS, K)
    C_ahead = _inputs_ahead(conv_ptr, bias_ptr, before_ptr, of_C, CHANNELS, K)
    dt_bias, rate, D = tl.load(dt_bias_ptr + head), tl.load(A_ptr + head), tl.load(D_ptr + head)
    norm_P = tl.load(norm_ptr + of_P)
    if EARLY:
        gdc_wait()
    token_ptr = projected_ptr + INNER
    x_P = _convolved(token_ptr, of_P, x_ahead)
    B_N = _convolved(token_ptr, of_B, B_ahead)
    C_N = _convolved(token_ptr, of_C, C_ahead)
    dt = softplus(tl.load(token_ptr + CHANNELS + head) + dt_bias)
    gate_P = tl.load(projected_ptr + of_P)
    y_P = tl.exp(dt * rate) * tl.sum(state_PN * C_N[None, :], axis=1) + x_P * (dt * tl.sum(B_N * C_N, axis=0) + D)
    y_P *= gate_P * tl.sigmoid(gate_P)
    tl.store(y_ptr + sequence * INNER + of_P, y_P * norm_P)
    PARTS: constexpr = P // PART
    tl.store(squares_ptr + (sequence * HEADS + head) * PARTS + part, tl.sum(y_P * y_P, axis=0))


@triton.jit
def _out_kernel(
    y_ptr, squares_ptr, weight_ptr, from_ptr, h_ptr, width, eps,
    INNER: constexpr, PARTS: constexpr, ALL_PARTS: constexpr,
    FIRST: constexpr, REST: constexpr, ROWS: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Write some entries of h + scale y W^T for a batch of one."""
    of_R, of_F, of_G = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    at, is_row, is_there = weight_ptr + of_R[:, None] * INNER, of_R < width, of_G < INNER
    of_S = tl.arange(0, ALL_PARTS)
    if EARLY:
        gdc_launch_dependents()
    weight_RF = load(at + of_F[None, :], is_row[:, None])
    weight_RG = load(at + of_G[None, :], is_row[:, None] & is_there[None, :])
    if EARLY:
        gdc_wait()
    scale = tl.rsqrt(tl.sum(load(squares_ptr + of_S, of_S < PARTS), axis=0) / INNER + eps)
    h_R = load(from_ptr + of_R, is_row)
    y_F, y_G = tl.load(y_ptr + of_F), load(y_ptr + of_G, is_there)
    branch_R = tl.sum(weight_RF * y_F[None, :], axis=1) + tl.sum(weight_RG * y_G[None, :], axis=1)
    tl.store(h_ptr + of_R, h_R + branch_R * scale, is_row)


@triton.jit
def _out_tile_kernel(
    y_ptr, squares_ptr, weight_ptr, from_ptr, h_ptr, batch, width, eps,
    INNER: constexpr, PARTS: constexpr, ALL_PARTS: constexpr,
    BATCH: constexpr, ROWS: constexpr, ENTRIES: constexpr, PRECISION: constexpr, EARLY: constexpr,
):  # fmt: skip
    """Write a tile of h + scale y W^T."""
    of_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    of_B = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    is_row, is_sequence = of_R < width, of_B < batch
    of_S = tl.arange(0, ALL_PARTS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    is_part = is_sequence[:, None] & (of_S < PARTS)[None, :]
    squares_B = tl.sum(load(squares_ptr + of_B[:, None] * PARTS + of_S[None, :], is_part), axis=1)
    of_BR, is_BR = of_B[:, None] * width + of_R[None, :], is_sequence[:, None] & is_row[None, :]
    h_BR = load(from_ptr + of_BR, is_BR)
    branch_BR = tl.zeros((BATCH, ROWS), dtype=tl.float32)
    for start in range(0, INNER, ENTRIES):
        of_T = start + tl.arange(0, ENTRIES)
        is_there = (of_T < INNER)[None, :]
        y_BT = load(y_ptr + of_B[:, None] * INNER + of_T[None, :], is_sequence[:, None] & is_there)
        weight_RT = load(weight_ptr + of_R[:, None] * INNER + of_T[None, :], is_row[:, None] & is_there)
        branch_BR = tl.dot(y_BT, tl.trans(weight_RT), branch_BR, input_precision=PRECISION)
    scale_B = tl.rsqrt(squares_B / INNER + eps)
    tl.store(h_ptr + of_BR, h_BR + branch_BR * scale_B[:, None], is_BR)
