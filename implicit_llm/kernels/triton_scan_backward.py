"""Gradient of SSD and gate of a Mamba2 mixer over short sequences. Imported where Triton kernels run.

Four kernels, none of which depends on the order in which programs run:
`shared`: of every chunk the products of C and B, which heads share, and dt and its decays, which channels share.
`head`: some channels of one head of one sequence. It goes through the chunks backwards with the gradient of the state
in registers, and writes the gradients of x and gate, and the gradient of the state after every chunk.
`group`: the gradients of B and C in one chunk. With the states that the forward pass kept and their gradients, chunks
are independent, so that one program takes all heads of a group and sums up in registers what they share.
`dt`: the gradients of dt and of what it is made of, from sums over channels that `head` has left.
The plain PyTorch twin is autograd through `models.mamba2.Mamba2Mixer._mix`.

Shapes: as in `triton_scan`, and `S` chunks but the first: the states between chunks; `W` channels of a program.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_llm.kernels.triton_scan import MIN_CHUNK_LEN, Sizes, _precision, _softplus

CHUNK_LEN = 64  # a kept state is as large as the x of 128 positions: shorter chunks read and write more of them
CHANNELS = 32  # of a program of `head`: more would not fit into its registers
SHARED_WARPS, DT_WARPS = 4, 4
HEAD_WARPS, HEAD_STAGES = 4, 1
GROUP_WARPS, GROUP_STAGES = 8, 2


class ScanInputs(NamedTuple):
    """What the forward pass read, and the states that it kept: see `triton_scan.gated_scan`."""

    projected_BLE: Tensor
    convolved_BLC: Tensor
    per_head: tuple[Tensor, Tensor, Tensor]
    kept_BSHNP: Tensor


def chunk_len(length: int) -> int:
    """Of the backward pass; the forward pass keeps the states between such chunks."""
    return min(CHUNK_LEN, max(MIN_CHUNK_LEN, triton.next_power_of_2(length)))


def gated_scan_gradient(
    inputs: ScanInputs, sizes: Sizes, dout_BLI: Tensor, dprojected_BLE: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradients of gate and dt into their columns of `dprojected`; the columns between are left alone.

    Returns: the gradients of `convolved` (B, L, C) and of dt bias, A and D (3, H) in fp32.
    """
    projected_BLE, convolved_BLC, per_head, kept_BSHNP = inputs
    batch, length, columns = projected_BLE.shape
    heads, step, width = len(per_head[1]), chunk_len(length), min(CHANNELS, sizes.head_dim)
    chunks, parts = triton.cdiv(length, step), sizes.head_dim // width
    empty = partial(torch.empty, dtype=torch.float32, device=projected_BLE.device)
    products, steps = empty(batch, chunks, sizes.groups, step, step), empty(2, batch, chunks, heads, step)  # dt, logs
    sums = (*empty(2, batch, chunks, parts, heads, step), empty(batch, chunks, parts, heads))
    dD, dper_head = empty(batch, heads, parts), empty(2, batch, heads)
    dout_BLI, dkept_BSHNP = dout_BLI.contiguous(), torch.empty_like(kept_BSHNP)
    dconvolved_BLC = torch.empty_like(convolved_BLC)
    shape = (length, chunks, heads, sizes.groups, convolved_BLC.shape[2], columns)
    tiles = {"P": sizes.head_dim, "N": sizes.state_size, "Q": step, "PRECISION": _precision()}
    all_heads = {"HEADS": triton.next_power_of_2(heads)}
    _shared_kernel[(chunks, batch)](
        projected_BLE, convolved_BLC, *per_head[:2], products, *steps, *shape,
        **tiles, **all_heads, num_warps=SHARED_WARPS,
    )  # fmt: skip
    _head_kernel[(heads * parts, batch)](
        projected_BLE, convolved_BLC, dout_BLI, products, *steps, per_head[2], kept_BSHNP,
        dprojected_BLE, dconvolved_BLC, *sums, dD, dkept_BSHNP, *shape,
        **tiles, W=width, IS_LONG=chunks > 1, num_warps=HEAD_WARPS, num_stages=HEAD_STAGES,
    )  # fmt: skip
    _group_kernel[(chunks * sizes.groups, batch)](
        projected_BLE, convolved_BLC, dout_BLI, *steps, kept_BSHNP, dkept_BSHNP, dconvolved_BLC, *shape,
        **tiles, IS_LONG=chunks > 1, num_warps=GROUP_WARPS,
        num_stages=GROUP_STAGES if projected_BLE.element_size() == 2 else 1,  # fp32 fills the shared memory
    )  # fmt: skip
    _dt_kernel[(batch,)](
        projected_BLE, *per_head[:2], steps[0], *sums, dprojected_BLE, *dper_head, *shape,
        P=sizes.head_dim, Q=step, PARTS=parts, **all_heads, num_warps=DT_WARPS,
    )  # fmt: skip
    return dconvolved_BLC, torch.cat([dper_head.sum(1), dD.sum((0, 2))[None]])


@triton.jit
def _shared_kernel(
    projected_ptr, convolved_ptr, dt_bias_ptr, A_ptr, products_ptr, dt_ptr, logs_ptr,
    length, chunks, heads, groups, num_channels, num_columns,
    P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """C B^T of every group; dt (0 outside) and the log decays up to and including a position, of every head."""
    sequence = tl.program_id(1).to(tl.int64)
    entry = sequence * chunks + tl.program_id(0)
    inner = heads * P
    of_N, of_H, steps = tl.arange(0, N), tl.arange(0, HEADS), tl.arange(0, Q)
    is_inside = (tl.program_id(0) * Q + steps < length)[:, None]
    first_row = sequence * length + tl.program_id(0) * Q
    at_dt = projected_ptr + first_row * num_columns + inner + num_channels + steps[:, None] * num_columns
    is_head = (of_H < heads)[None, :]
    raw_QH = tl.load(at_dt + of_H[None, :], mask=is_inside & is_head, other=0.0).to(tl.float32)
    raw_QH += tl.load(dt_bias_ptr + of_H, mask=of_H < heads, other=0.0).to(tl.float32)[None, :]
    dt_QH = tl.where(is_inside, _softplus(raw_QH), 0.0)  # neither decays nor feeds the state
    logs_QH = tl.cumsum(dt_QH * tl.load(A_ptr + of_H, mask=of_H < heads, other=0.0).to(tl.float32)[None, :], axis=0)
    to = (entry * heads + of_H)[None, :] * Q + steps[:, None]
    tl.store(dt_ptr + to, dt_QH, mask=is_head)
    tl.store(logs_ptr + to, logs_QH, mask=is_head)
    for group in range(groups):
        of_B = steps[:, None] * num_channels + (inner + group * N + of_N)[None, :]
        at_B = convolved_ptr + first_row * num_channels + of_B
        B_QN = tl.load(at_B, mask=is_inside, other=0.0)
        C_QN = tl.load(at_B + groups * N, mask=is_inside, other=0.0)
        products_QQ = tl.dot(C_QN, tl.trans(B_QN), input_precision=PRECISION)
        tl.store(products_ptr + (entry * groups + group) * Q * Q + steps[:, None] * Q + steps[None, :], products_QQ)


@triton.jit
def _decay_between(logs_Q, t_Q):
    """From a column's position to a row's; 0 above the diagonal."""
    return tl.exp(tl.where(t_Q[:, None] >= t_Q[None, :], logs_Q[:, None] - logs_Q[None, :], -float("inf")))


@triton.jit
def _head_kernel(
    projected_ptr, convolved_ptr, dout_ptr, products_ptr, dt_ptr, logs_ptr, D_ptr, kept_ptr,
    dprojected_ptr, dconvolved_ptr, rows_ptr, columns_ptr, through_ptr, dD_ptr, dkept_ptr,
    length, chunks, heads, groups, num_channels, num_columns,
    P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, PRECISION: tl.constexpr,
    W: tl.constexpr, IS_LONG: tl.constexpr,
):  # fmt: skip
    """The chunks of some channels of one head of one sequence, the last one first."""
    head = tl.program_id(0) // (P // W)
    part = tl.program_id(0) % (P // W)
    sequence = tl.program_id(1).to(tl.int64)
    group = head // (heads // groups)
    inner = heads * P
    kind = projected_ptr.dtype.element_ty
    of_W, of_N, steps = part * W + tl.arange(0, W), tl.arange(0, N), tl.arange(0, Q)
    projected_ptr += sequence * length * num_columns
    dprojected_ptr += sequence * length * num_columns
    convolved_ptr += sequence * length * num_channels
    dconvolved_ptr += sequence * length * num_channels
    dout_ptr += sequence * length * inner
    products_ptr += (sequence * chunks * groups + group) * Q * Q
    dt_ptr += (sequence * chunks * heads + head) * Q
    logs_ptr += (sequence * chunks * heads + head) * Q
    kept_ptr += (sequence * (chunks - 1) * heads + head) * N * P
    dkept_ptr += (sequence * (chunks - 1) * heads + head) * N * P
    of_state = of_N[:, None] * P + of_W[None, :]
    rows_ptr += ((sequence * chunks * (P // W) + part) * heads + head) * Q
    columns_ptr += ((sequence * chunks * (P // W) + part) * heads + head) * Q
    through_ptr += (sequence * chunks * (P // W) + part) * heads + head
    D = tl.load(D_ptr + head).to(tl.float32)
    of_head = head * P + of_W[None, :]
    dstate_NW = tl.zeros((N, W), dtype=tl.float32)  # of the state after a chunk, then of the one before it
    dD_Q = tl.zeros((Q,), dtype=tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        t = chunk * Q + steps
        is_row = (t < length)[:, None]
        of_B = t[:, None] * num_channels + (inner + group * N + tl.arange(0, N))[None, :]
        at_gate = projected_ptr + t[:, None] * num_columns + of_head
        at_dout = dout_ptr + t[:, None] * inner + of_head
        x_QW = tl.load(convolved_ptr + t[:, None] * num_channels + of_head, mask=is_row, other=0.0)
        gate_QW = tl.load(at_gate, mask=is_row, other=0.0).to(tl.float32)
        dy_QW = tl.load(at_dout, mask=is_row, other=0.0).to(tl.float32) * gate_QW * tl.sigmoid(gate_QW)
        dy_QW = dy_QW.to(kind)
        dt_Q, logs_Q = tl.load(dt_ptr + chunk * heads * Q + steps), tl.load(logs_ptr + chunk * heads * Q + steps)
        at_products = products_ptr + chunk * groups * Q * Q + steps[:, None] * Q + steps[None, :]
        scores_QQ = tl.load(at_products) * _decay_between(logs_Q, t) * dt_Q[None, :]
        scores_QQ = scores_QQ.to(kind)
        total = tl.load(logs_ptr + chunk * heads * Q + Q - 1)
        through = 0.0
        dx_QW = tl.dot(tl.trans(scores_QQ), dy_QW, input_precision=PRECISION)
        y_QW = tl.dot(scores_QQ, x_QW, input_precision=PRECISION)
        if IS_LONG:  # noqa: SIM102 - decided at compile time, unlike the next
            if back > 0:  # after = exp(total) before + B^T (dt exp(total - logs) x)
                dafter_NW = dstate_NW.to(kind)
                B_QN = tl.load(convolved_ptr + of_B, mask=is_row, other=0.0)
                fed_Q1 = (dt_Q * tl.exp(total - logs_Q))[:, None]
                dfed_QW = tl.dot(B_QN, dafter_NW, input_precision=PRECISION) * fed_Q1
                through += tl.sum(dfed_QW * x_QW.to(tl.float32))
                dx_QW += dfed_QW
        # Columns and rows are summed from one rounded matrix of scores: so rounding cancels in their difference.
        x_wide_QW, dy_wide_QW = x_QW.to(tl.float32), dy_QW.to(tl.float32)
        tl.store(columns_ptr + chunk * (P // W) * heads * Q + steps, tl.sum(dx_QW * x_wide_QW, axis=1))
        dx_QW += D * dy_wide_QW
        tl.store(dconvolved_ptr + t[:, None] * num_channels + of_head, dx_QW.to(kind), mask=is_row)
        if IS_LONG:  # noqa: SIM102
            if chunk > 0:  # y = scores x + exp(logs) C before
                before_NW = tl.load(kept_ptr + (chunk - 1) * heads * N * P + of_state)
                C_QN = tl.load(convolved_ptr + of_B + groups * N, mask=is_row, other=0.0)
                carried_Q1 = tl.exp(logs_Q)[:, None]
                y_QW += tl.dot(C_QN, before_NW, input_precision=PRECISION) * carried_Q1
                dread_QW = (dy_wide_QW * carried_Q1).to(kind)
                dstate_NW *= tl.exp(total)
                through += tl.sum(before_NW.to(tl.float32) * dstate_NW)
                dstate_NW = tl.dot(tl.trans(C_QN), dread_QW, dstate_NW, input_precision=PRECISION)
                tl.store(dkept_ptr + (chunk - 1) * heads * N * P + of_state, dstate_NW.to(kind))
        tl.store(rows_ptr + chunk * (P // W) * heads * Q + steps, tl.sum(y_QW * dy_wide_QW, axis=1))
        tl.store(through_ptr + chunk * (P // W) * heads, through)
        dD_Q += tl.sum(x_wide_QW * dy_wide_QW, axis=1)
        y_QW += D * x_wide_QW
        # Loaded again: kept in registers they would push out others.
        gate_QW = tl.load(at_gate, mask=is_row, other=0.0).to(tl.float32)
        sigmoid_QW = tl.sigmoid(gate_QW)
        y_QW *= tl.load(at_dout, mask=is_row, other=0.0).to(tl.float32)
        dgate_QW = y_QW * sigmoid_QW * (1.0 + gate_QW * (1.0 - sigmoid_QW))
        tl.store(dprojected_ptr + t[:, None] * num_columns + of_head, dgate_QW.to(kind), mask=is_row)
    tl.store(dD_ptr + (sequence * heads + head) * (P // W) + part, tl.sum(dD_Q, axis=0))


@triton.jit
def _group_kernel(
    projected_ptr, convolved_ptr, dout_ptr, dt_ptr, logs_ptr, kept_ptr, dkept_ptr, dconvolved_ptr,
    length, chunks, heads, groups, num_channels, num_columns,
    P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, IS_LONG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of B and C in one chunk of one sequence, over all heads of a group."""
    chunk = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    sequence = tl.program_id(1).to(tl.int64)
    inner = heads * P
    kind = projected_ptr.dtype.element_ty
    of_P, of_N, steps = tl.arange(0, P), tl.arange(0, N), tl.arange(0, Q)
    is_inside = chunk * Q + steps < length
    is_row = is_inside[:, None]
    # Each pointer goes to the first row of the chunk, those of states to the one after the chunk.
    first_row = sequence * length + chunk * Q
    projected_ptr += first_row * num_columns
    convolved_ptr += first_row * num_channels
    dconvolved_ptr += first_row * num_channels
    dout_ptr += first_row * inner
    first_state = (sequence * (chunks - 1) + chunk) * heads * N * P
    kept_ptr += first_state - heads * N * P
    dkept_ptr += first_state
    dt_ptr += (sequence * chunks + chunk) * heads * Q
    logs_ptr += (sequence * chunks + chunk) * heads * Q
    dproducts_QQ = tl.zeros((Q, Q), dtype=tl.float32)
    dB_QN = tl.zeros((Q, N), dtype=tl.float32)
    dC_QN = tl.zeros((Q, N), dtype=tl.float32)
    for index in range(heads // groups):
        head = group * (heads // groups) + index
        of_head = head * P + of_P[None, :]
        dt_Q, logs_Q = tl.load(dt_ptr + head * Q + steps), tl.load(logs_ptr + head * Q + steps)
        x_QP = tl.load(convolved_ptr + steps[:, None] * num_channels + of_head, mask=is_row, other=0.0)
        gate_QP = tl.load(projected_ptr + steps[:, None] * num_columns + of_head, mask=is_row, other=0.0)
        dout_QP = tl.load(dout_ptr + steps[:, None] * inner + of_head, mask=is_row, other=0.0)
        gate_QP = gate_QP.to(tl.float32)
        dy_QP = dout_QP.to(tl.float32) * gate_QP * tl.sigmoid(gate_QP)
        dscores_QQ = tl.dot(dy_QP.to(kind), tl.trans(x_QP), input_precision=PRECISION)
        dproducts_QQ += dscores_QQ * _decay_between(logs_Q, steps) * dt_Q[None, :]
        if IS_LONG:  # a state that is not there is 0
            of_state = head * N * P + of_N[None, :] * P + of_P[:, None]
            before_PN = tl.load(kept_ptr + of_state, mask=(chunk > 0) & (of_state >= 0), other=0.0)
            dread_QP = (dy_QP * tl.exp(logs_Q)[:, None]).to(kind)
            dC_QN = tl.dot(dread_QP, before_PN, dC_QN, input_precision=PRECISION)
            dafter_PN = tl.load(dkept_ptr + of_state, mask=(chunk + 1 < chunks) & (of_state >= 0), other=0.0)
            fed_Q = dt_Q * tl.exp(tl.load(logs_ptr + head * Q + Q - 1) - logs_Q)
            fed_QP = (x_QP.to(tl.float32) * fed_Q[:, None]).to(kind)
            dB_QN = tl.dot(fed_QP, dafter_PN, dB_QN, input_precision=PRECISION)
    of_B = steps[:, None] * num_channels + (inner + group * N + of_N)[None, :]
    B_QN = tl.load(convolved_ptr + of_B, mask=is_row, other=0.0)
    C_QN = tl.load(convolved_ptr + of_B + groups * N, mask=is_row, other=0.0)
    dproducts_QQ = dproducts_QQ.to(kind)
    dC_QN = tl.dot(dproducts_QQ, B_QN, dC_QN, input_precision=PRECISION)
    dB_QN = tl.dot(tl.trans(dproducts_QQ), C_QN, dB_QN, input_precision=PRECISION)
    tl.store(dconvolved_ptr + of_B, dB_QN.to(kind), mask=is_row)
    tl.store(dconvolved_ptr + of_B + groups * N, dC_QN.to(kind), mask=is_row)


@triton.jit
def _dt_kernel(
    projected_ptr, dt_bias_ptr, A_ptr, dt_ptr, rows_ptr, columns_ptr, through_ptr, dprojected_ptr, ddt_bias_ptr, dA_ptr,
    length, chunks, heads, groups, num_channels, num_columns,
    P: tl.constexpr, Q: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """All heads of one sequence.

    The gradient of dt A at a position is what goes through the decay there: in a chunk the rows from it on less the
    columns from it on, and what goes through to later chunks. (Sums over rows of all later chunks would do, too, but
    in bf16 gave A a gradient ten times less exact.)"""
    sequence = tl.program_id(0).to(tl.int64)
    steps, of_H = tl.arange(0, Q), tl.arange(0, HEADS)
    is_head_H = of_H < heads
    is_head = is_head_H[None, :]
    A_H = tl.load(A_ptr + of_H, mask=is_head_H, other=0.0).to(tl.float32)
    dt_bias_H = tl.load(dt_bias_ptr + of_H, mask=is_head_H, other=0.0).to(tl.float32)
    ddt_bias_H = tl.zeros((HEADS,), dtype=tl.float32)
    dA_H = tl.zeros((HEADS,), dtype=tl.float32)
    for chunk in range(chunks):
        entry = sequence * chunks + chunk
        of_head = of_H[None, :] * Q + steps[:, None]
        through_H = tl.zeros((HEADS,), dtype=tl.float32)
        row_QH = tl.zeros((Q, HEADS), dtype=tl.float32)
        column_QH = tl.zeros((Q, HEADS), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            through_H += tl.load(through_ptr + (entry * PARTS + part) * heads + of_H, mask=is_head_H, other=0.0)
            of_sums = (entry * PARTS + part) * heads * Q + of_head
            row_QH += tl.load(rows_ptr + of_sums, mask=is_head, other=0.0)
            column_QH += tl.load(columns_ptr + of_sums, mask=is_head, other=0.0)
        dt_QH = tl.load(dt_ptr + entry * heads * Q + of_head, mask=is_head, other=0.0)
        through_QH = tl.cumsum(row_QH - column_QH, axis=0, reverse=True) + through_H[None, :]
        dA_H += tl.sum(through_QH * dt_QH, axis=0)
        ddt_QH = through_QH * A_H[None, :] + tl.where(dt_QH > 0.0, column_QH / dt_QH, 0.0)
        t = chunk * Q + steps
        is_inside = (t < length)[:, None] & is_head
        at_dt = (sequence * length + t)[:, None] * num_columns + heads * P + num_channels + of_H[None, :]
        raw_QH = tl.load(projected_ptr + at_dt, mask=is_inside, other=0.0).to(tl.float32) + dt_bias_H[None, :]
        draw_QH = tl.where(is_inside, ddt_QH * tl.sigmoid(raw_QH), 0.0)
        tl.store(dprojected_ptr + at_dt, draw_QH.to(dprojected_ptr.dtype.element_ty), mask=is_inside)
        ddt_bias_H += tl.sum(draw_QH, axis=0)
    tl.store(ddt_bias_ptr + sequence * heads + of_H, ddt_bias_H, mask=is_head_H)
    tl.store(dA_ptr + sequence * heads + of_H, dA_H, mask=is_head_H)
