"""Compute convolution, SSD and gate of a Mamba2 mixer as one operation with a gradient, at every length.

This module is imported only if Triton kernels run. Autograd would copy the gradients of gate, convolution and dt into
one tensor of the width of the in-projection; here the kernels write them directly into that tensor. The forward pass
stores the projection, the inputs of the scan and the states between chunks.

The gradient of the scan has four kernels, and no result depends on the order in which programs run:
A program of `sweep` processes one head of one sequence. It computes the gradients of the states between chunks, from
the last to the first, with one small product per chunk. Only this kernel is sequential.
A program of `head` processes one head of one chunk and writes the gradients of x and gate. With the stored states and
their gradients, chunks are independent.
`group` computes the gradients of B and C in one chunk. One program processes all heads of a group and sums their
contributions in registers.
`dt` computes the gradients of dt, its bias and A in one chunk, from sums that `head` stores.
The plain PyTorch twin is `models.mamba2.model.Mamba2Mixer._mix` with autograd.

Shapes: `B` batch, `L` length, `E` in-projection (gate I, convolved C = I + 2 G N, dt H), `I` = H P inner, `H` heads,
`P` head width, `G` groups, `N` state, `K` convolution (K-1 in its earlier inputs), `Q` chunk, `S` chunks (for states:
the boundaries between chunks).

Several releases of Triton compile a product of a transposed accumulator (`tl.dot(tl.trans(sum.to(bfloat16)), x)`, 64
wide) incorrectly for Hopper. This code avoids such products: it multiplies by the transposed scores from the right.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import load, wide
from implicit_llm.kernels.triton.sums import sum_rows
from implicit_llm.models.mamba2.chunked_scan import ScanWeights
from implicit_llm.models.mamba2.triton.scan import gated_scan_for_gradient, precision, transposed_scores
from implicit_llm.models.mamba2.triton.scan_inputs import (
    Mixer,
    MixerInputs,
    convolution_gradient,
    exp2,
    mixer_inputs,
    sigmoid,
)

SWEEP_WARPS, HEAD_WARPS, GROUP_WARPS, DT_WARPS = 4, 4, 8, 4
SWEEP_STAGES, GROUP_STAGES = 2, 3


def gated_mix(mixer: Mixer, state: tuple[Tensor, ...] | None, return_state: bool) -> tuple[Tensor, Tensor | None]:
    """Run `scan.gated_scan` with gradients, but not of `state` or the returned SSM state; injections are ignored."""
    return _GatedMix.apply(mixer.projected_BLE, *mixer.weights, mixer.sizes, return_state, *(state or (None, None)))


class _GatedMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected_BLE: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
        *weights, ctx.sizes, return_state, before_BHPN, before_BKC = others
        mixer = Mixer(projected_BLE, None, ScanWeights(*weights), ctx.sizes)
        inputs = mixer_inputs(mixer, before_BKC)
        out_BLI, kept_BSHPN, last_BHPN = gated_scan_for_gradient(mixer, inputs, before_BHPN, return_state)
        ctx.save_for_backward(projected_BLE, kept_BSHPN, before_BHPN, before_BKC, *inputs, *weights)
        ctx.set_materialize_grads(False)
        if last_BHPN is not None:
            ctx.mark_non_differentiable(last_BHPN)
        return out_BLI, last_BHPN

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_BLI: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        projected_BLE, kept_BSHPN, before_BHPN, before_BKC, *others = ctx.saved_tensors
        inputs, weights = MixerInputs(*others[:3]), ScanWeights(*others[3:])
        mixer, dprojected_BLE = Mixer(projected_BLE, None, weights, ctx.sizes), torch.empty_like(projected_BLE)
        states = before_BHPN, kept_BSHPN
        dconvolved_BLC, dper_head = gated_scan_gradient(mixer, inputs, states, dout_BLI, dprojected_BLE)
        dweights = (*convolution_gradient(mixer, before_BKC, dconvolved_BLC, dprojected_BLE), *dper_head)
        of_weights = (gradient.to(t.dtype) for gradient, t in zip(dweights, weights, strict=True))
        return dprojected_BLE, *of_weights, None, None, None, None


def gated_scan_gradient(
    mixer: Mixer, inputs: MixerInputs, states: tuple[Tensor | None, Tensor], dout_BLI: Tensor, dprojected_BLE: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradients of gate and dt into their columns of `dprojected_BLE`; the columns between do not change.

    Args: states: the SSM state before the sequence, which gets no gradient (None if it is empty), and those between
        chunks. Inputs and states must be those of the forward pass; see `scan.gated_scan_for_gradient`.
    Returns: the gradients of the convolution's output (B, L, C), and of dt bias, A and D (3, H) in fp32.
    """
    projected_BLE, (convolved_BLC, dt_BSHQ, logs_BSHQ), weights = mixer.projected_BLE, inputs, mixer.weights
    batch, chunks, heads, _ = dt_BSHQ.shape
    length, (before_BHPN, kept_BSHPN) = projected_BLE.shape[1], states
    before = kept_BSHPN if before_BHPN is None else before_BHPN.contiguous()
    empty = partial(torch.empty, dtype=torch.float32, device=projected_BLE.device)
    rows, columns = empty(2, *dt_BSHQ.shape)
    later, dper_head = empty(batch, chunks, heads), empty(3, batch, chunks, heads)
    dout_BLI, dkept_BSHPN = dout_BLI.contiguous(), torch.empty_like(kept_BSHPN)
    dconvolved_BLC = torch.empty_like(convolved_BLC)
    known = mixer.constants()
    tiles = {**known, "IS_LONG": chunks > 1, "HAS_STATE": before_BHPN is not None, "PRECISION": precision()}
    steps = (dt_BSHQ, logs_BSHQ)
    is_narrow = projected_BLE.element_size() == 2  # in fp32 one chunk fills the shared memory
    if chunks > 1:
        _sweep_kernel[(heads, batch)](
            projected_BLE, convolved_BLC, dout_BLI, logs_BSHQ, dkept_BSHPN, length, chunks,
            **known, PRECISION=precision(), num_warps=SWEEP_WARPS, num_stages=SWEEP_STAGES if is_narrow else 1,
        )  # fmt: skip
    _head_kernel[(heads, chunks, batch)](
        projected_BLE, convolved_BLC, dout_BLI, *steps, weights.D_H, before, kept_BSHPN, dkept_BSHPN,
        dprojected_BLE, dconvolved_BLC, rows, columns, later, dper_head[2], length, chunks,
        **tiles, num_warps=HEAD_WARPS, num_stages=1,
    )  # fmt: skip
    _group_kernel[(mixer.sizes[1], chunks, batch)](
        projected_BLE, convolved_BLC, dout_BLI, *steps, before, kept_BSHPN, dkept_BSHPN, dconvolved_BLC, length, chunks,
        **tiles, num_warps=GROUP_WARPS,
        num_stages=GROUP_STAGES if is_narrow else 1,
    )  # fmt: skip
    _dt_kernel[(chunks, batch)](
        projected_BLE, weights.dt_bias_H, weights.A_H, dt_BSHQ, rows, columns, later, dprojected_BLE,
        *dper_head[:2], length, chunks,
        **known, ALL_HEADS=triton.next_power_of_2(heads), num_warps=DT_WARPS,
    )  # fmt: skip
    return dconvolved_BLC, sum_rows(dper_head.flatten(1, 2))


@triton.jit
def _sweep_kernel(
    projected_ptr, convolved_ptr, dout_ptr, logs_ptr, dkept_ptr, length, chunks,
    HEADS: constexpr, GROUPS: constexpr, COLUMNS: constexpr, P: constexpr, N: constexpr,
    Q: constexpr, PRECISION: constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    group = head // (HEADS // GROUPS)
    INNER: constexpr = HEADS * P
    CHANNELS: constexpr = INNER + 2 * GROUPS * N
    kind = projected_ptr.dtype.element_ty
    of_P, of_N, steps = tl.arange(0, P), tl.arange(0, N), tl.arange(0, Q)
    of_x = (head * P + of_P)[None, :]
    of_C = (INNER + (GROUPS + group) * N + of_N)[None, :]
    projected_ptr += sequence * length * COLUMNS
    convolved_ptr += sequence * length * CHANNELS
    dout_ptr += sequence * length * INNER
    logs_ptr += (sequence * chunks * HEADS + head) * Q
    dstate_PN = tl.zeros((P, N), dtype=tl.float32)  # the gradient of the state before a chunk
    for back in range(chunks - 1):
        chunk = chunks - 1 - back
        t = chunk * Q + steps
        is_row = (t < length)[:, None]
        C_QN = load(convolved_ptr + t[:, None] * CHANNELS + of_C, is_row)
        gate_QP = wide(projected_ptr + t[:, None] * COLUMNS + of_x, is_row)
        dout_QP = wide(dout_ptr + t[:, None] * INNER + of_x, is_row)
        logs_Q = tl.load(logs_ptr + chunk * HEADS * Q + steps)
        total = tl.load(logs_ptr + chunk * HEADS * Q + Q - 1)
        dread_QP = dout_QP * (gate_QP * sigmoid(gate_QP)) * exp2(logs_Q)[:, None]  # y = scores x + exp(logs) C before
        dread_PQ = tl.trans(dread_QP.to(kind))
        dstate_PN = tl.dot(dread_PQ, C_QN, dstate_PN * exp2(total), input_precision=PRECISION)
        of_state = ((sequence * (chunks - 1) + chunk - 1) * HEADS + head) * P * N
        tl.store(dkept_ptr + of_state + of_P[:, None] * N + of_N[None, :], dstate_PN)


@triton.jit
def _state_before(kept_at, before_at, chunk, is_inside_PN, kind: constexpr, IS_LONG: constexpr, HAS_STATE: constexpr):
    """Load the state before a chunk; before the first chunk it is the sequence's initial state, or 0."""
    if IS_LONG:
        before_PN = load(kept_at, (chunk > 0) & is_inside_PN)
        if HAS_STATE:
            before_PN += load(before_at, (chunk == 0) & is_inside_PN).to(kind)
    else:
        before_PN = tl.load(before_at).to(kind)
    return before_PN


@triton.jit
def _gate_gradient(y_QP, gate_QP, dout_QP, x_QP, D, kind: constexpr):
    """Return the gradient of the gate in out = (y + D x) silu(gate), and y times its gradient summed over channels."""
    share_QP = sigmoid(gate_QP)
    dy_QP = (dout_QP * gate_QP * share_QP).to(kind).to(tl.float32)
    row_Q = tl.sum(y_QP * dy_QP, axis=1)
    return (y_QP + D * x_QP) * dout_QP * share_QP * (1.0 + gate_QP * (1.0 - share_QP)), row_Q


@triton.jit
def _head_kernel(
    projected_ptr, convolved_ptr, dout_ptr, dt_ptr, logs_ptr, D_ptr, before_ptr, kept_ptr, dkept_ptr,
    dprojected_ptr, dconvolved_ptr, rows_ptr, columns_ptr, later_ptr, dD_ptr, length, chunks,
    HEADS: constexpr, GROUPS: constexpr, COLUMNS: constexpr, P: constexpr, N: constexpr,
    Q: constexpr, IS_LONG: constexpr, HAS_STATE: constexpr, PRECISION: constexpr,
):  # fmt: skip
    head, chunk = tl.program_id(0), tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    group = head // (HEADS // GROUPS)
    INNER: constexpr = HEADS * P
    CHANNELS: constexpr = INNER + 2 * GROUPS * N
    kind = projected_ptr.dtype.element_ty
    of_P, of_N, steps = tl.arange(0, P), tl.arange(0, N), tl.arange(0, Q)
    of_x = (head * P + of_P)[None, :]
    is_row = (chunk * Q + steps < length)[:, None]
    # Pointers `at_` start at the first row of the chunk; `after` is the offset of the state after the chunk.
    first_row = sequence * length + chunk * Q
    entry = (sequence * chunks + chunk) * HEADS + head
    after = ((sequence * (chunks - 1) + chunk) * HEADS + head) * P * N
    of_state = of_P[:, None] * N + of_N[None, :]
    at_x = convolved_ptr + first_row * CHANNELS + steps[:, None] * CHANNELS + of_x
    at_B = convolved_ptr + first_row * CHANNELS + steps[:, None] * CHANNELS + (INNER + group * N + of_N)[None, :]
    at_gate = projected_ptr + first_row * COLUMNS + steps[:, None] * COLUMNS + of_x
    at_dout = dout_ptr + first_row * INNER + steps[:, None] * INNER + of_x
    D = tl.load(D_ptr + head).to(tl.float32)
    dt_Q, logs_Q = tl.load(dt_ptr + entry * Q + steps), tl.load(logs_ptr + entry * Q + steps)
    total = tl.load(logs_ptr + entry * Q + Q - 1)
    B_QN = load(at_B, is_row)
    C_QN = load(at_B + GROUPS * N, is_row)
    gate_QP = wide(at_gate, is_row)
    dout_QP = wide(at_dout, is_row)
    x_QP = load(at_x, is_row)
    dy_QP = (dout_QP * gate_QP * sigmoid(gate_QP)).to(kind)
    # Column and row sums come from the same rounded scores and dy, so that rounding cancels in their difference.
    scores_QQ = transposed_scores(B_QN, C_QN, dt_Q, logs_Q, steps, PRECISION).to(kind)
    later = 0.0  # the sum of the state after the chunk times its gradient
    if IS_LONG:  # after = exp(total) before + (dt exp(total - logs) x)^T B
        dafter_PN = load(dkept_ptr + after + of_state, (chunk + 1 < chunks) & (of_state >= 0))
        dx_QP = tl.dot(B_QN, tl.trans(dafter_PN), input_precision=PRECISION)
        dx_QP *= (dt_Q * exp2(total - logs_Q))[:, None]
        later = tl.sum(dx_QP * x_QP.to(tl.float32))
        dx_QP = tl.dot(scores_QQ, dy_QP, dx_QP, input_precision=PRECISION)
    else:
        dx_QP = tl.dot(scores_QQ, dy_QP, input_precision=PRECISION)
    x_wide_QP, dy_wide_QP = x_QP.to(tl.float32), dy_QP.to(tl.float32)
    tl.store(columns_ptr + entry * Q + steps, tl.sum(dx_QP * x_wide_QP, axis=1))
    tl.store(dD_ptr + entry, tl.sum(x_wide_QP * dy_wide_QP))
    at_dx = dconvolved_ptr + first_row * CHANNELS + steps[:, None] * CHANNELS + of_x
    tl.store(at_dx, dx_QP + D * dy_wide_QP, is_row)
    if IS_LONG or HAS_STATE:  # y = scores x + exp(logs) C before
        of_before = (sequence * HEADS + head) * P * N + of_state
        before_PN = _state_before(
            kept_ptr + after - HEADS * P * N + of_state,
            before_ptr + of_before,
            chunk,
            of_state >= 0,
            kind,
            IS_LONG,
            HAS_STATE,
        )
        if IS_LONG:
            later += exp2(total) * tl.sum(before_PN.to(tl.float32) * dafter_PN.to(tl.float32))
        y_PQ = tl.dot(before_PN, tl.trans(C_QN), input_precision=PRECISION) * exp2(logs_Q)[None, :]
        y_QP = tl.trans(tl.dot(tl.trans(x_QP), scores_QQ, y_PQ, input_precision=PRECISION))
    else:
        y_QP = tl.trans(tl.dot(tl.trans(x_QP), scores_QQ, input_precision=PRECISION))
    tl.store(later_ptr + entry, later)
    # These values are loaded again, because holding them in registers would spill other values.
    gate_QP, dout_QP, x_wide_QP = wide(at_gate, is_row), wide(at_dout, is_row), wide(at_x, is_row)
    dgate_QP, row_Q = _gate_gradient(y_QP, gate_QP, dout_QP, x_wide_QP, D, kind)
    tl.store(rows_ptr + entry * Q + steps, row_Q)
    at_dgate = dprojected_ptr + first_row * COLUMNS + steps[:, None] * COLUMNS + of_x
    tl.store(at_dgate, dgate_QP, is_row)


@triton.jit
def _group_kernel(
    projected_ptr, convolved_ptr, dout_ptr, dt_ptr, logs_ptr, before_ptr, kept_ptr, dkept_ptr, dconvolved_ptr,
    length, chunks,
    HEADS: constexpr, GROUPS: constexpr, COLUMNS: constexpr, P: constexpr, N: constexpr,
    Q: constexpr, IS_LONG: constexpr, HAS_STATE: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Compute the gradients of B and C in one chunk of one sequence, summed over all heads of a group."""
    group, chunk = tl.program_id(0), tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    INNER: constexpr = HEADS * P
    CHANNELS: constexpr = INNER + 2 * GROUPS * N
    kind = projected_ptr.dtype.element_ty
    of_P, of_N, steps = tl.arange(0, P), tl.arange(0, N), tl.arange(0, Q)
    is_row = (chunk * Q + steps < length)[:, None]
    # Pointers are moved to the first row of the chunk, `kept` to the state before the chunk, `dkept` to that after it.
    first_row = sequence * length + chunk * Q
    projected_ptr += first_row * COLUMNS
    convolved_ptr += first_row * CHANNELS
    dconvolved_ptr += first_row * CHANNELS
    dout_ptr += first_row * INNER
    first_state = (sequence * (chunks - 1) + chunk) * HEADS * P * N
    kept_ptr += first_state - HEADS * P * N
    dkept_ptr += first_state
    dt_ptr += (sequence * chunks + chunk) * HEADS * Q
    logs_ptr += (sequence * chunks + chunk) * HEADS * Q
    is_causal = steps[:, None] >= steps[None, :]
    dproducts_QQ = tl.zeros((Q, Q), dtype=tl.float32)
    dB_QN = tl.zeros((Q, N), dtype=tl.float32)
    dC_QN = tl.zeros((Q, N), dtype=tl.float32)
    for index in range(HEADS // GROUPS):
        head = group * (HEADS // GROUPS) + index
        of_x = (head * P + of_P)[None, :]
        dt_Q, logs_Q = tl.load(dt_ptr + head * Q + steps), tl.load(logs_ptr + head * Q + steps)
        x_QP = load(convolved_ptr + steps[:, None] * CHANNELS + of_x, is_row)
        gate_QP = wide(projected_ptr + steps[:, None] * COLUMNS + of_x, is_row)
        dout_QP = load(dout_ptr + steps[:, None] * INNER + of_x, is_row)
        dy_QP = dout_QP.to(tl.float32) * gate_QP * sigmoid(gate_QP)
        decay_QQ = exp2(tl.where(is_causal, logs_Q[:, None] - logs_Q[None, :], -float("inf")))
        dscores_QQ = tl.dot(dy_QP.to(kind), tl.trans(x_QP), input_precision=PRECISION)
        dproducts_QQ += dscores_QQ * decay_QQ * dt_Q[None, :]
        of_state = head * P * N + of_P[:, None] * N + of_N[None, :]
        if IS_LONG or HAS_STATE:
            of_before = sequence * HEADS * P * N + of_state
            before_PN = _state_before(
                kept_ptr + of_state, before_ptr + of_before, chunk, of_state >= 0, kind, IS_LONG, HAS_STATE
            )
            dread_QP = (dy_QP * exp2(logs_Q)[:, None]).to(kind)
            dC_QN = tl.dot(dread_QP, before_PN, dC_QN, input_precision=PRECISION)
        if IS_LONG:  # the gradient of the state after the last chunk is 0
            dafter_PN = load(dkept_ptr + of_state, (chunk + 1 < chunks) & (of_state >= 0))
            fed_Q = dt_Q * exp2(tl.load(logs_ptr + head * Q + Q - 1) - logs_Q)
            fed_QP = (x_QP.to(tl.float32) * fed_Q[:, None]).to(kind)
            dB_QN = tl.dot(fed_QP, dafter_PN, dB_QN, input_precision=PRECISION)
    of_B = steps[:, None] * CHANNELS + (INNER + group * N + of_N)[None, :]
    B_QN = load(convolved_ptr + of_B, is_row)
    C_QN = load(convolved_ptr + of_B + GROUPS * N, is_row)
    dproducts_QQ = dproducts_QQ.to(kind)
    dC_QN = tl.dot(dproducts_QQ, B_QN, dC_QN, input_precision=PRECISION)
    dB_QN += tl.trans(tl.dot(tl.trans(C_QN), dproducts_QQ, input_precision=PRECISION))
    tl.store(dconvolved_ptr + of_B, dB_QN, is_row)
    tl.store(dconvolved_ptr + of_B + GROUPS * N, dC_QN, is_row)


@triton.jit
def _dt_kernel(
    projected_ptr, dt_bias_ptr, A_ptr, dt_ptr, rows_ptr, columns_ptr, later_ptr, dprojected_ptr,
    ddt_bias_ptr, dA_ptr, length, chunks,
    HEADS: constexpr, GROUPS: constexpr, COLUMNS: constexpr, P: constexpr, N: constexpr,
    Q: constexpr, ALL_HEADS: constexpr,
):  # fmt: skip
    """Compute the gradients of dt, its bias and A for all heads of one chunk of one sequence.

    The gradient of dt A at a position is the gradient that flows through its decay. Within the chunk this is the sum of
    `rows` - `columns` from the position on. All decays of the chunk also scale the state after it; `later` is the
    gradient that flows through that state. Sums over the rows of all later chunks would be equivalent, but in bf16 they
    made the gradient of A ten times less accurate.
    """
    chunk = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    steps, of_H = tl.arange(0, Q), tl.arange(0, ALL_HEADS)
    is_head_H = of_H < HEADS
    is_head = is_head_H[None, :]
    entry = (sequence * chunks + chunk) * HEADS
    of_head = (entry + of_H)[None, :] * Q + steps[:, None]
    A_H = wide(A_ptr + of_H, is_head_H)
    dt_bias_H = wide(dt_bias_ptr + of_H, is_head_H)
    later_H = load(later_ptr + entry + of_H, is_head_H)
    row_QH = load(rows_ptr + of_head, is_head)
    column_QH = load(columns_ptr + of_head, is_head)
    dt_QH = load(dt_ptr + of_head, is_head)
    through_QH = tl.cumsum(row_QH - column_QH, axis=0, reverse=True) + later_H[None, :]
    ddt_QH = through_QH * A_H[None, :] + tl.where(dt_QH > 0.0, column_QH / dt_QH, 0.0)
    t = chunk * Q + steps
    is_inside = (t < length)[:, None] & is_head
    of_dt = (sequence * length + t)[:, None] * COLUMNS + 2 * (HEADS * P + GROUPS * N) + of_H[None, :]
    raw_QH = wide(projected_ptr + of_dt, is_inside) + dt_bias_H[None, :]
    draw_QH = tl.where(is_inside, ddt_QH * sigmoid(raw_QH), 0.0)
    tl.store(dprojected_ptr + of_dt, draw_QH, is_inside)
    tl.store(ddt_bias_ptr + entry + of_H, tl.sum(draw_QH, axis=0), is_head_H)
    tl.store(dA_ptr + entry + of_H, tl.sum(through_QH * dt_QH, axis=0), is_head_H)
