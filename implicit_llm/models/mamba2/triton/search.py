"""Solve whole sequences of an implicit Mamba2 model with one layer, block by block in one kernel.

This module is imported only if Triton kernels run. With separate kernels and small blocks, an iteration is a dozen
kernels that wait for one another, a batch waits in each block for its slowest sequence, and the host checks every few
iterations whether all have converged. Here a program processes a few sequences from the first block to the last. It
iterates each block until these sequences have converged, closes it (one more evaluation of f updates their states) and
starts the next block. It waits neither for other sequences nor for the host.

An evaluation of f has four parts, which exchange data through memory that stays in the L2 cache. `_project` multiplies
the norm of z by the in-projection, `_convolve` mixes positions, and `_scan` loops over the heads. `_project_out`
multiplies by the out-projection and then by the scale of the gated norm, which is known only after the last head.
Channels come before positions in all products, so that the weights fill the matrix units even if there are few tokens.
An iteration of one program takes 120 us on an H100, mostly latency. With separate kernels, an iteration of a whole
small batch takes less time. So training, where few sequences need many iterations, replays graphs of the separate
kernels (`cuda_graphs.blocks`).
The plain PyTorch twin is `solver.passes` with `models.mamba2.model`.

Shapes: `B` batch, `L` length, `D` model, `E` in-projection (gate I, convolved C = I + 2 N, dt H), `I` = H P inner, `H`
heads, `P` head width, `N` state, `K` convolution, `W` tokens of a block, `G` blocks, `S` sequences of a program,
`R` = S W tokens of a program, `X` = S N (the states of S sequences side by side).
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language import constexpr

from implicit_llm.kernels.triton.convergence import EPS, is_bad, larger, relative
from implicit_llm.kernels.triton.memory import wide
from implicit_llm.models.mamba2.chunked_scan import ScanWeights
from implicit_llm.models.mamba2.triton.scan_inputs import LOG2_E, exp2, sigmoid, softplus
from implicit_llm.models.stack import LayerState
from implicit_llm.solver.passes import Search
from implicit_llm.solver.stats import Block, BlockStats

TAPS = constexpr(4)  # inputs of the convolution
MIN_TOKENS = 16  # fewest tokens of a program; matrix units multiply at least 16
MAX_TOKENS = 32  # most tokens of a program; more would need too many registers
MIN_PROGRAMS = 96  # fewer programs would leave multiprocessors idle
WARPS = 4


@dataclass(frozen=True)
class LayerWeights:
    """The effective weights of a model with one layer; matrices have the dtype of the products."""

    in_proj_ED: Tensor
    scan: ScanWeights
    out_proj_DI: Tensor
    gated_norm_I: Tensor
    norm_D: Tensor
    final_norm_D: Tensor
    eps: float


def sequences_of_a_program(batch: int, width: int) -> int | None:
    """Return how many sequences one program processes together, or None if no suitable number divides the batch.

    With more sequences, more tokens share each load of the weights; with fewer, more multiprocessors are busy.
    """
    counts = [tokens // width for tokens in (MAX_TOKENS, MIN_TOKENS) if tokens >= width]
    fitting = [count for count in counts if batch % count == 0]
    return next((count for count in fitting if batch // count >= MIN_PROGRAMS), fitting[-1] if fitting else None)


def search_blocks(
    weights: LayerWeights, injection_BLE: Tensor, state: LayerState | None, width: int, search: Search
) -> tuple[Tensor, LayerState, list[Block]] | None:
    """Solve blocks of `width` tokens one after another, each from z = 0, and close each with one undamped f.

    Args: state holds the SSM state (B, H, P, N) and the last K-1 inputs of the convolution (B, K-1, C) before the first
        block, None if it is empty. `kernels.selection.search_runs_on_triton` must be true: among other conditions, L is
        a multiple of `width`, K at most 4, and the search stops by sequence or by token. Its method must be plain or
        damped.
    Returns: f of each block's best z (B, L, D) in fp32, the state after the last block, and the statistics of each
        block; None instead of all three if any token became NaN or infinite.
    """
    batch, length, columns = injection_BLE.shape
    scan, kind = weights.scan, weights.in_proj_ED.dtype
    (channels, taps), (model_width, inner), heads = scan.conv_CK.shape, weights.out_proj_DI.shape, len(scan.A_H)
    head_width, size, num_blocks = inner // heads, (channels - inner) // 2, length // width
    count = sequences_of_a_program(batch, width)
    assert count is not None
    new = injection_BLE.new_empty
    ssm_BHPN = injection_BLE.new_zeros(batch, heads, head_width, size, dtype=torch.float32)
    rows_BKC = injection_BLE.new_zeros(batch, TAPS.value - 1 + width, channels, dtype=kind)
    inputs_BKC = rows_BKC[:, TAPS.value - taps : TAPS.value - 1]  # where the kernel writes the last inputs of a block
    if state is not None:
        ssm_BHPN.copy_(state[0])
        inputs_BKC.copy_(state[1])
    rounded_BHPN = ssm_BHPN.to(kind)
    convolved_BWC, gate_BWI = new(batch, width, channels, dtype=kind), new(batch, width, inner, dtype=kind)
    dt, logs = new(2, batch, width, heads, dtype=torch.float32)
    current_BWD = new(batch, width, model_width, dtype=torch.float32)
    z_BLD = new(batch, length, model_width, dtype=torch.float32)
    num_iter_BG, residual_BG = (new(batch, num_blocks, dtype=torch.float32) for _ in range(2))
    done_BG = new(batch, num_blocks, dtype=torch.bool)
    residual_BL, non_finite_BL = (new(batch, length, dtype=dtype) for dtype in (torch.float32, torch.bool))
    conv_CK = F.pad(scan.conv_CK, (TAPS.value - taps, 0))
    _search_kernel[(batch // count,)](
        injection_BLE.contiguous(), weights.in_proj_ED.contiguous(), conv_CK.contiguous(), *scan[1:],
        weights.gated_norm_I, weights.out_proj_DI.contiguous(), weights.norm_D, weights.final_norm_D,
        ssm_BHPN, rounded_BHPN, rows_BKC, convolved_BWC, gate_BWI, current_BWD, dt, logs, z_BLD,
        num_iter_BG, residual_BG, done_BG, residual_BL, non_finite_BL,
        new(1, dtype=torch.int32).zero_(), length, search.max_iter, search.rule.tol, search.damping, weights.eps, EPS,
        HEADS=heads, ALL_HEADS=max(16, triton.next_power_of_2(heads)), P=head_width, N=size, D=model_width,
        COLUMNS=columns, W=width, S=count, BY_TOKEN=search.rule.stop == "token",
        IN_TILE=_tile(128, inner, channels), CONV_TILE=_tile(256, channels),
        OUT_TILE=_tile(128, inner), IN_STAGES=2, SCAN_STAGES=2, OUT_STAGES=2,
        num_warps=WARPS,
    )  # fmt: skip
    if bool(non_finite_BL.any()):
        return None
    of_sequences = (t_BG.unbind(1) for t_BG in (num_iter_BG, residual_BG, done_BG))
    of_tokens = (residual_BL >= search.rule.tol).split(width, dim=1)
    blocks = [Block(width, BlockStats(*of_block)) for of_block in zip(*of_sequences, of_tokens, strict=True)]
    return z_BLD, (ssm_BHPN, inputs_BKC), blocks


def _tile(largest: int, *widths: int) -> int:
    """Return the largest power of two, up to `largest`, that divides all the widths."""
    return math.gcd(largest, *widths)


@triton.jit
def _project(
    z_DR, injection_ptr, in_ptr, norm_ptr, dt_bias_ptr, A_ptr, rows_ptr, gate_ptr, dt_ptr, logs_ptr,
    of_row_R, of_kept_R, of_gate_R, eps,
    HEADS: constexpr, ALL_HEADS: constexpr, P: constexpr, N: constexpr, D: constexpr, TILE: constexpr, W: constexpr,
    S: constexpr, STAGES: constexpr,
):  # fmt: skip
    """Write gate, the convolution's inputs, dt and the block's cumulative log2 decays, all from projected + injection.

    of_row, of_kept, of_gate: offsets of each token in the injection, in `rows` and in `gate`.
    """
    INNER: constexpr = HEADS * P
    CHANNELS: constexpr = INNER + 2 * N
    R: constexpr = S * W
    kind = in_ptr.dtype.element_ty
    of_D, of_tile, of_H = tl.arange(0, D), tl.arange(0, TILE), tl.arange(0, ALL_HEADS)
    scale_R = tl.rsqrt(tl.sum(z_DR * z_DR, axis=0) / D + eps)
    u_DR = (z_DR * scale_R[None, :] * tl.load(norm_ptr + of_D).to(tl.float32)[:, None]).to(kind)
    for tile in tl.range(0, INNER // TILE, num_stages=STAGES):
        column = tile * TILE + of_tile
        weight_TD = tl.load(in_ptr + column[:, None] * D + of_D[None, :])
        given_TR = tl.load(injection_ptr + of_row_R[None, :] + column[:, None]).to(tl.float32)
        out_TR = tl.dot(weight_TD, u_DR) + given_TR
        tl.store(gate_ptr + of_gate_R[None, :] + column[:, None], out_TR.to(kind))
    for tile in tl.range(0, CHANNELS // TILE, num_stages=STAGES):
        column = tile * TILE + of_tile
        weight_TD = tl.load(in_ptr + (INNER + column)[:, None] * D + of_D[None, :])
        given_TR = tl.load(injection_ptr + INNER + of_row_R[None, :] + column[:, None]).to(tl.float32)
        out_TR = tl.dot(weight_TD, u_DR) + given_TR
        tl.store(rows_ptr + of_kept_R[None, :] + column[:, None], out_TR.to(kind))
    column = INNER + CHANNELS + of_H
    is_head = (of_H < HEADS)[:, None]
    weight_HD = tl.load(in_ptr + column[:, None] * D + of_D[None, :], mask=is_head, other=0.0)
    raw_HR = tl.dot(weight_HD, u_DR)
    raw_HR += wide(injection_ptr + of_row_R[None, :] + column[:, None], is_head)
    dt_HR = softplus(raw_HR + wide(dt_bias_ptr + of_H, of_H < HEADS)[:, None])
    rate_H = wide(A_ptr + of_H, of_H < HEADS) * LOG2_E
    logs_HSW = tl.cumsum(tl.reshape(dt_HR * rate_H[:, None], (ALL_HEADS, S, W)), axis=2)
    to_HR = of_H[:, None] * R + tl.arange(0, R)[None, :]
    tl.store(dt_ptr + to_HR, dt_HR, mask=is_head)
    tl.store(logs_ptr + to_HR, tl.reshape(logs_HSW, (ALL_HEADS, R)), mask=is_head)


@triton.jit
def _convolve(
    rows_ptr, conv_ptr, bias_ptr, convolved_ptr, of_kept_R, of_convolved_R, CHANNELS: constexpr, TILE: constexpr
):  # fmt: skip
    """Convolve all channels, and write silu of the result."""
    kind = rows_ptr.dtype.element_ty
    for start in range(0, CHANNELS, TILE):
        channel = start + tl.arange(0, TILE)
        row_ptr = rows_ptr + of_kept_R[:, None] + channel[None, :]
        y_RT = tl.load(bias_ptr + channel).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            x_RT = tl.load(row_ptr - (TAPS - 1 - tap) * CHANNELS).to(tl.float32)
            y_RT += x_RT * tl.load(conv_ptr + channel * TAPS + tap).to(tl.float32)[None, :]
        tl.store(convolved_ptr + of_convolved_R[:, None] + channel[None, :], (y_RT * sigmoid(y_RT)).to(kind))


@triton.jit
def _scan(
    D_ptr, state_ptr, rounded_ptr, convolved_ptr, gate_ptr, dt_ptr, logs_ptr, of_convolved_R, of_gate_R,
    HEADS: constexpr, P: constexpr, N: constexpr, W: constexpr, S: constexpr,
    CLOSE: constexpr, STAGES: constexpr,
):  # fmt: skip
    """Overwrite the gate with the gated output of the scan; return the sum of its squares by token, (R).

    CLOSE: whether to replace the states by those after the block.
    """
    INNER: constexpr = HEADS * P
    R: constexpr = S * W
    kind = gate_ptr.dtype.element_ty
    of_P, of_N, of_R, of_X = tl.arange(0, P), tl.arange(0, N), tl.arange(0, R), tl.arange(0, S * N)
    at_B = convolved_ptr + of_convolved_R[None, :] + (INNER + of_N)[:, None]
    B_NR = tl.load(at_B)
    is_seen_RR = (of_R[:, None] <= of_R[None, :]) & ((of_R // W)[:, None] == (of_R // W)[None, :])
    products_RR = tl.dot(tl.trans(B_NR), tl.load(at_B + N))  # rows are sources, columns are targets
    # The states of all sequences are side by side; the C of a token is zero for the states of other sequences.
    at_C = convolved_ptr + of_convolved_R[None, :] + (INNER + N + of_X % N)[:, None]
    C_XR = tl.load(at_C, mask=(of_X // N)[:, None] == (of_R // W)[None, :], other=0.0)
    of_states = (of_X // N * HEADS * P * N + of_X % N)[None, :] + of_P[:, None] * N
    squares_R = tl.zeros((R,), dtype=tl.float32)
    for head in tl.range(0, HEADS, num_stages=STAGES):
        state_PX = tl.load(rounded_ptr + of_states + head * P * N)
        dt_R, logs_R = tl.load(dt_ptr + head * R + of_R), tl.load(logs_ptr + head * R + of_R)
        x_PR = tl.load(convolved_ptr + of_convolved_R[None, :] + (head * P + of_P)[:, None])
        at_gate = gate_ptr + of_gate_R[None, :] + (head * P + of_P)[:, None]
        gate_PR = tl.load(at_gate).to(tl.float32)
        decay_RR = exp2(tl.where(is_seen_RR, logs_R[None, :] - logs_R[:, None], -float("inf")))
        scores_RR = (products_RR * decay_RR * dt_R[:, None]).to(kind)
        y_PR = tl.dot(state_PX, C_XR) * exp2(logs_R)[None, :]
        y_PR = tl.dot(x_PR, scores_RR, y_PR)
        y_PR += tl.load(D_ptr + head).to(tl.float32) * x_PR.to(tl.float32)
        y_PR = (y_PR * gate_PR * sigmoid(gate_PR)).to(kind)
        tl.store(at_gate, y_PR)
        squares_R += tl.sum(y_PR.to(tl.float32) * y_PR.to(tl.float32), axis=0)
        if CLOSE:
            tl.debug_barrier()  # all threads must have loaded the states
            for index in tl.static_range(S):
                tile = (index * HEADS + head) * P * N + of_P[:, None] * N + of_N[None, :]
                total = tl.sum(tl.where(of_R == index * W + (W - 1), logs_R, 0.0), axis=0)
                fed_R = tl.where(of_R // W == index, dt_R * exp2(tl.minimum(total - logs_R, 0.0)), 0.0)
                fed_PR = (x_PR.to(tl.float32) * fed_R[None, :]).to(kind)
                after_PN = tl.dot(fed_PR, tl.trans(B_NR), tl.load(state_ptr + tile) * exp2(total))
                tl.store(state_ptr + tile, after_PN)
                tl.store(rounded_ptr + tile, after_PN.to(kind))
    return squares_R


@triton.jit
def _project_out(
    squares_R, gated_norm_ptr, out_ptr, gate_ptr, of_gate_R, eps,
    INNER: constexpr, D: constexpr, TILE: constexpr, STAGES: constexpr,
):  # fmt: skip
    """Compute the layer's branch (D, R), which is the out-projection of the gated norm."""
    kind = out_ptr.dtype.element_ty
    R: constexpr = squares_R.shape[0]
    of_D, of_tile = tl.arange(0, D), tl.arange(0, TILE)
    branch_DR = tl.zeros((D, R), dtype=tl.float32)
    for start in tl.range(0, INNER, TILE, num_stages=STAGES):
        weight_DT = tl.load(out_ptr + of_D[:, None] * INNER + (start + of_tile)[None, :])
        y_TR = tl.load(gate_ptr + of_gate_R[None, :] + (start + of_tile)[:, None])
        norm_T = tl.load(gated_norm_ptr + start + of_tile).to(tl.float32)
        branch_DR = tl.dot(weight_DT, (y_TR.to(tl.float32) * norm_T[:, None]).to(kind), branch_DR)
    return (branch_DR * tl.rsqrt(squares_R / INNER + eps)[None, :]).to(kind).to(tl.float32)


@triton.jit
def _zero(zero_ptr):
    """Load a zero that the compiler cannot fold. Otherwise it would hold addresses in registers and spill them."""
    return tl.multiple_of(tl.load(zero_ptr, volatile=True), 16)


@triton.jit
def _tokens(base_ptr, zero_ptr, token_R, D: constexpr):
    """Compute the addresses of tokens, (D, R)."""
    return base_ptr + _zero(zero_ptr) + (token_R * D)[None, :] + tl.arange(0, D)[:, None]


@triton.jit
def _apply(
    at_ptr, of_token_R, injection_ptr, in_ptr, final_norm_ptr, conv_ptr, bias_ptr, dt_bias_ptr, A_ptr, D_ptr,
    gated_norm_ptr, out_ptr, norm_ptr,
    state_ptr, rounded_ptr, rows_ptr, convolved_ptr, gate_ptr, dt_ptr, logs_ptr,
    zero_ptr, of_row_R, of_kept_R, of_convolved_R, of_gate_R, eps,
    HEADS: constexpr, ALL_HEADS: constexpr, P: constexpr, N: constexpr, D: constexpr, W: constexpr, S: constexpr,
    CLOSE: constexpr, IN_TILE: constexpr, CONV_TILE: constexpr, OUT_TILE: constexpr,
    IN_STAGES: constexpr, SCAN_STAGES: constexpr, OUT_STAGES: constexpr,
):  # fmt: skip
    """Evaluate f(z), (D, R), for the tokens at `at_ptr`; with CLOSE, update the states too."""
    INNER: constexpr = HEADS * P
    CHANNELS: constexpr = INNER + 2 * N
    zero = _zero(zero_ptr)
    in_ptr += zero
    out_ptr += zero
    injection_ptr += zero
    rounded_ptr += zero
    rows_ptr += zero
    convolved_ptr += zero
    gate_ptr += zero
    conv_ptr += zero
    bias_ptr += zero
    gated_norm_ptr += zero
    z_DR = tl.load(_tokens(at_ptr, zero_ptr, of_token_R, D))
    _project(
        z_DR, injection_ptr, in_ptr, norm_ptr, dt_bias_ptr, A_ptr, rows_ptr, gate_ptr, dt_ptr, logs_ptr, of_row_R,
        of_kept_R, of_gate_R, eps, HEADS, ALL_HEADS, P, N, D, IN_TILE, W, S, IN_STAGES,
    )  # fmt: skip
    tl.debug_barrier()
    _convolve(rows_ptr, conv_ptr, bias_ptr, convolved_ptr, of_kept_R, of_convolved_R, CHANNELS, CONV_TILE)
    tl.debug_barrier()
    squares_R = _scan(
        D_ptr, state_ptr, rounded_ptr, convolved_ptr, gate_ptr, dt_ptr, logs_ptr, of_convolved_R, of_gate_R,
        HEADS, P, N, W, S, CLOSE, SCAN_STAGES,
    )  # fmt: skip
    tl.debug_barrier()
    branch_DR = _project_out(
        squares_R, gated_norm_ptr, out_ptr, gate_ptr, of_gate_R, eps, INNER, D, OUT_TILE, OUT_STAGES
    )
    h_DR = tl.load(_tokens(at_ptr, zero_ptr, of_token_R, D)) + branch_DR  # z is loaded again to save registers
    final_D = tl.load(final_norm_ptr + tl.arange(0, D)).to(tl.float32)
    return h_DR * tl.rsqrt(tl.sum(h_DR * h_DR, axis=0) / D + eps)[None, :] * final_D[:, None]


@triton.jit
def _search_kernel(
    injection_ptr, in_ptr, conv_ptr, bias_ptr, dt_bias_ptr, A_ptr, D_ptr, gated_norm_ptr, out_ptr, norm_ptr,
    final_norm_ptr, state_ptr, rounded_ptr, rows_ptr, convolved_ptr, gate_ptr, current_ptr, dt_ptr, logs_ptr, z_ptr,
    iterations_ptr, residual_ptr, done_ptr, token_ptr, bad_ptr, zero_ptr, length, max_iter, tol, tau, eps, residual_eps,
    HEADS: constexpr, ALL_HEADS: constexpr, P: constexpr, N: constexpr, D: constexpr, COLUMNS: constexpr,
    W: constexpr, S: constexpr, BY_TOKEN: constexpr,
    IN_TILE: constexpr, CONV_TILE: constexpr, OUT_TILE: constexpr,
    IN_STAGES: constexpr, SCAN_STAGES: constexpr, OUT_STAGES: constexpr,
):  # fmt: skip
    INNER: constexpr = HEADS * P
    CHANNELS: constexpr = INNER + 2 * N
    R: constexpr = S * W
    KEPT: constexpr = TAPS - 1
    of_D, of_R, of_S = tl.arange(0, D), tl.arange(0, R), tl.arange(0, S)
    # Each pointer is moved to the first sequence of the program; offsets from there fit into 32 bits.
    first_sequence = tl.program_id(0).to(tl.int64) * S
    num_blocks = length // W
    injection_ptr += first_sequence * length * COLUMNS
    z_ptr += first_sequence * length * D
    token_ptr += first_sequence * length
    bad_ptr += first_sequence * length
    iterations_ptr += first_sequence * num_blocks
    residual_ptr += first_sequence * num_blocks
    done_ptr += first_sequence * num_blocks
    rows_ptr += first_sequence * (KEPT + W) * CHANNELS
    convolved_ptr += first_sequence * W * CHANNELS
    gate_ptr += first_sequence * W * INNER
    dt_ptr += first_sequence * W * HEADS
    logs_ptr += first_sequence * W * HEADS
    current_ptr += first_sequence * W * D
    state_ptr += first_sequence * HEADS * P * N
    rounded_ptr += first_sequence * HEADS * P * N
    of_kept_R = (of_R // W * (KEPT + W) + KEPT + of_R % W) * CHANNELS
    of_convolved_R, of_gate_R = of_R * CHANNELS, of_R * INNER
    for block in range(num_blocks):
        token_R = of_R // W * length + block * W + of_R % W
        of_row_R = token_R * COLUMNS
        best_R = tl.full((R,), float("inf"), dtype=tl.float32)
        iterations_S = tl.zeros((S,), dtype=tl.float32)
        is_open_S = of_S >= 0
        is_bad_R = of_R < 0
        tl.store(_tokens(current_ptr, zero_ptr, of_R, D), tl.zeros((D, R), dtype=tl.float32))
        # These values remain if the residual of no iterate is finite.
        tl.store(_tokens(z_ptr, zero_ptr, token_R, D), tl.zeros((D, R), dtype=tl.float32))
        tl.store(token_ptr + token_R, tl.full((R,), float("inf"), dtype=tl.float32))
        tl.debug_barrier()
        iteration, num_open = 0, S
        while (iteration < max_iter) & (num_open > 0):
            fz_DR = _apply(
                current_ptr, of_R, injection_ptr, in_ptr, final_norm_ptr, conv_ptr, bias_ptr, dt_bias_ptr, A_ptr, D_ptr,
                gated_norm_ptr, out_ptr, norm_ptr, state_ptr, rounded_ptr, rows_ptr, convolved_ptr,
                gate_ptr, dt_ptr, logs_ptr,
                zero_ptr, of_row_R, of_kept_R, of_convolved_R, of_gate_R, eps, HEADS, ALL_HEADS, P, N, D, W, S, False,
                IN_TILE, CONV_TILE, OUT_TILE, IN_STAGES, SCAN_STAGES, OUT_STAGES,
            )  # fmt: skip
            z_DR = tl.load(_tokens(current_ptr, zero_ptr, of_R, D))
            change_R = tl.sum((fz_DR - z_DR) * (fz_DR - z_DR), axis=0)
            size_R = tl.sum(fz_DR * fz_DR, axis=0)
            token_residual_R = relative(change_R, size_R, residual_eps)
            if BY_TOKEN:
                worst_R = tl.where(is_bad(token_residual_R), float("inf"), token_residual_R)
                rank_SW = tl.associative_scan(tl.reshape(worst_R, (S, W)), 1, larger)
                residual_S = tl.max(rank_SW, axis=1)
            else:
                change_S = tl.sum(tl.reshape(change_R, (S, W)), axis=1)
                size_S = tl.sum(tl.reshape(size_R, (S, W)), axis=1)
                residual_S = relative(change_S, size_S, residual_eps)
                rank_SW = tl.broadcast_to(residual_S[:, None], (S, W))
            is_open_R = tl.reshape(tl.broadcast_to(is_open_S[:, None], (S, W)), (R,))
            is_bad_R = is_bad_R | (is_open_R & is_bad(token_residual_R))
            rank_R = tl.reshape(rank_SW, (R,))
            is_better_R = is_open_R & (rank_R < best_R)
            next_DR = z_DR + tau * (fz_DR - z_DR)
            tl.store(_tokens(z_ptr, zero_ptr, token_R, D), next_DR, mask=is_better_R[None, :] & (of_D >= 0)[:, None])
            tl.store(token_ptr + token_R, token_residual_R, mask=is_better_R)
            tl.store(_tokens(current_ptr, zero_ptr, of_R, D), next_DR)
            best_R = tl.where(is_better_R, rank_R, best_R)
            iterations_S += is_open_S.to(tl.float32)
            is_open_S = is_open_S & ~(residual_S < tol)
            num_open = tl.sum(is_open_S.to(tl.int32), axis=0)
            iteration += 1
            tl.debug_barrier()
        of_block_S = of_S * num_blocks + block
        tl.store(iterations_ptr + of_block_S, iterations_S)
        tl.store(residual_ptr + of_block_S, tl.max(tl.reshape(best_R, (S, W)), axis=1))
        tl.store(done_ptr + of_block_S, ~is_open_S)
        tl.store(bad_ptr + token_R, is_bad_R)
        out_DR = _apply(
            z_ptr, token_R, injection_ptr, in_ptr, final_norm_ptr, conv_ptr, bias_ptr, dt_bias_ptr, A_ptr, D_ptr,
            gated_norm_ptr, out_ptr, norm_ptr, state_ptr, rounded_ptr, rows_ptr, convolved_ptr, gate_ptr,
            dt_ptr, logs_ptr,
            zero_ptr, of_row_R, of_kept_R, of_convolved_R, of_gate_R, eps, HEADS, ALL_HEADS, P, N, D, W, S, True,
            IN_TILE, CONV_TILE, OUT_TILE, IN_STAGES, SCAN_STAGES, OUT_STAGES,
        )  # fmt: skip
        tl.store(_tokens(z_ptr, zero_ptr, token_R, D), out_DR)
        tl.debug_barrier()
        # Move the last inputs of this block to the rows before the inputs of the next block.
        for row in tl.static_range(KEPT):
            for start in range(0, CHANNELS, CONV_TILE):
                for index in tl.static_range(S):
                    to = index * (KEPT + W) * CHANNELS + row * CHANNELS + start
                    to += tl.arange(0, CONV_TILE)
                    tl.store(rows_ptr + to, tl.load(rows_ptr + to + W * CHANNELS))
        tl.debug_barrier()
