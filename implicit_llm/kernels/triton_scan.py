"""SSD and gate of a Mamba2 mixer in one kernel. Imported where Triton kernels run.

The solver makes dozens of such passes over short blocks, each from the state before it. One program takes one head of
one sequence, chunk after chunk, with the state in registers: what lies between convolution and norm is read once and
written once. For a gradient (`triton_scan_backward`) it keeps the states between chunks. A single token has a kernel of
its own, which convolves as well and needs no matrix units.
The plain PyTorch twin is `models.mamba2.Mamba2Mixer._mix`.

Shapes: `B` batch, `L` length, `E` in-projection (gate I, convolved C = I + 2 G N, dt H), `I` = H P inner, `H` heads,
`P` head width, `G` groups, `N` state, `K` convolution, `Q` chunk.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# On an H200 one chunk of up to 64 tokens is fastest whole, and more in chunks of 32.
SINGLE_CHUNK_LEN, CHUNK_LEN = 64, 32
MIN_CHUNK_LEN = 16  # of the matrix units


class Sizes(NamedTuple):
    head_dim: int
    groups: int
    state_size: int


def gated_scan(
    projected_BLE: Tensor,
    convolved_BLC: Tensor,
    per_head: tuple[Tensor, Tensor, Tensor],
    sizes: Sizes,
    state_BHPN: Tensor | None,
    return_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """silu(gate) * (SSD + D x) of shape (B, L, I), and the state after the block in fp32 if asked for.

    Args: gate and dt are read from `projected`, x, B and C from `convolved`; per_head are dt bias, A and D (H each).
    """
    batch, length, columns = projected_BLE.shape
    heads, (width, groups, size) = len(per_head[1]), sizes
    out = projected_BLE.new_empty(batch, length, heads * width)
    last = out.new_empty(batch, heads, width, size, dtype=torch.float32) if return_state else None
    is_single = length <= SINGLE_CHUNK_LEN
    _scan_kernel[(heads, batch)](
        projected_BLE, convolved_BLC, out, *per_head, out if state_BHPN is None else state_BHPN.contiguous(),
        out if last is None else last, out, length, heads, groups, convolved_BLC.shape[2], columns,
        P=width, N=size, Q=_single_chunk_len(length) if is_single else CHUNK_LEN, KEEP_EVERY=0,
        HAS_STATE=state_BHPN is not None, RETURN_STATE=return_state, IS_LONG=not is_single, PRECISION=_precision(),
        num_warps=4,
        num_stages=1,  # to load a chunk ahead takes more shared memory than there is
    )  # fmt: skip
    return out, last


def gated_scan_for_gradient(
    projected_BLE: Tensor,
    convolved_BLC: Tensor,
    per_head: tuple[Tensor, Tensor, Tensor],
    sizes: Sizes,
    keep_every: int,
) -> tuple[Tensor, Tensor]:
    """The same from an empty state; keeps the states before positions `keep_every`, 2 `keep_every` and so on.

    Returns: (B, L, I), and what was kept, (B, S, H, N, P) in the dtype of `projected`, as the products take it.
    """
    batch, length, columns = projected_BLE.shape
    heads, (width, groups, size) = len(per_head[1]), sizes
    out = projected_BLE.new_empty(batch, length, heads * width)
    kept = out.new_empty(batch, triton.cdiv(length, keep_every) - 1, heads, size, width)
    is_single = length <= keep_every
    _scan_kernel[(heads, batch)](
        projected_BLE, convolved_BLC, out, *per_head, out, out, kept,
        length, heads, groups, convolved_BLC.shape[2], columns,
        P=width, N=size, Q=_single_chunk_len(length) if is_single else min(CHUNK_LEN, keep_every),
        KEEP_EVERY=0 if is_single else keep_every,
        HAS_STATE=False, RETURN_STATE=False, IS_LONG=not is_single, PRECISION=_precision(), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out, kept


def _single_chunk_len(length: int) -> int:
    return max(MIN_CHUNK_LEN, triton.next_power_of_2(length))


def gated_token(
    projected_B1E: Tensor,
    convolution: tuple[Tensor, Tensor],
    per_head: tuple[Tensor, Tensor, Tensor],
    sizes: Sizes,
    state: tuple[Tensor, ...],
    return_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """The same for one token, convolution and its silu included: `convolution` is weight (C, K) and bias (C).

    Args: state holds the SSM state (B, H, P, N) and the last K-1 inputs of the convolution (B, K-1, C).
    """
    batch, _, columns = projected_B1E.shape
    heads, (width, groups, size) = len(per_head[1]), sizes
    out = projected_B1E.new_empty(batch, 1, heads * width)
    last = out.new_empty(batch, heads, width, size, dtype=torch.float32) if return_state else None
    _token_kernel[(heads, batch)](
        projected_B1E, out, *convolution, *per_head, state[0].contiguous(), state[1].contiguous(),
        out if last is None else last, heads, groups, convolution[0].shape[0], columns,
        P=width, N=size, K=convolution[0].shape[1], RETURN_STATE=return_state, num_warps=4,
    )  # fmt: skip
    return out, last


def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@triton.jit
def _softplus(value):
    power = tl.exp(tl.minimum(value, 20.0))
    small = power * (1.0 - power * (0.5 - power / 3.0))  # where 1 + power would round most of it away
    return tl.where(value > 20.0, value, tl.where(power < 0.01, small, tl.log(1.0 + power)))


@triton.jit
def _scan_kernel(
    projected_ptr, convolved_ptr, out_ptr, dt_bias_ptr, A_ptr, D_ptr, before_ptr, last_ptr, kept_ptr,
    length, heads, groups, num_channels, num_columns,
    P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, KEEP_EVERY: tl.constexpr,
    HAS_STATE: tl.constexpr, RETURN_STATE: tl.constexpr, IS_LONG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    group = head // (heads // groups)
    inner = heads * P
    kind = projected_ptr.dtype.element_ty
    of_P, of_N, steps = tl.arange(0, P), tl.arange(0, N), tl.arange(0, Q)
    projected_ptr += sequence * length * num_columns
    convolved_ptr += sequence * length * num_channels
    out_ptr += sequence * length * inner + head * P
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    A = tl.load(A_ptr + head).to(tl.float32)
    D = tl.load(D_ptr + head).to(tl.float32)
    # Transposed, as it is multiplied: (N, P).
    tile = (sequence * heads + head) * P * N + of_P[None, :] * N + of_N[:, None]
    state_NP = tl.zeros((N, P), dtype=tl.float32)
    if HAS_STATE:
        state_NP += tl.load(before_ptr + tile)
    is_causal = steps[:, None] >= steps[None, :]
    if KEEP_EVERY > 0:
        kept_ptr += (sequence * (tl.cdiv(length, KEEP_EVERY) - 1) * heads + head) * N * P
    for start in range(0, length, Q):
        if KEEP_EVERY > 0:  # noqa: SIM102 - decided at compile time, unlike the next
            if (start > 0) & (start % KEEP_EVERY == 0):
                at_kept = kept_ptr + (start // KEEP_EVERY - 1) * heads * N * P + of_N[:, None] * P + of_P[None, :]
                tl.store(at_kept, state_NP.to(kind))
        t = start + steps
        is_inside = t < length
        rows = convolved_ptr + t[:, None] * num_channels
        B_QN = tl.load(rows + (inner + group * N + of_N)[None, :], mask=is_inside[:, None], other=0.0)
        C_QN = tl.load(rows + (inner + (groups + group) * N + of_N)[None, :], mask=is_inside[:, None], other=0.0)
        x_QP = tl.load(rows + (head * P + of_P)[None, :], mask=is_inside[:, None], other=0.0)
        at_dt = projected_ptr + t * num_columns + inner + num_channels + head
        dt_Q = _softplus(tl.load(at_dt, mask=is_inside, other=0.0).to(tl.float32) + dt_bias)
        dt_Q = tl.where(is_inside, dt_Q, 0.0)  # neither decays nor feeds the state
        logs_Q = tl.cumsum(dt_Q * A, axis=0)
        decay_QQ = tl.exp(tl.where(is_causal, logs_Q[:, None] - logs_Q[None, :], -float("inf")))
        scores_QQ = tl.dot(C_QN, tl.trans(B_QN), input_precision=PRECISION) * decay_QQ * dt_Q[None, :]
        y_QP = tl.dot(scores_QQ.to(kind), x_QP, input_precision=PRECISION)
        if HAS_STATE or IS_LONG:
            carried_QP = tl.dot(C_QN, state_NP.to(kind), input_precision=PRECISION)
            y_QP += tl.exp(logs_Q)[:, None] * carried_QP
        y_QP += D * x_QP.to(tl.float32)
        gate = projected_ptr + t[:, None] * num_columns + (head * P + of_P)[None, :]
        gate_QP = tl.load(gate, mask=is_inside[:, None], other=0.0).to(tl.float32)
        y_QP *= gate_QP * tl.sigmoid(gate_QP)
        tl.store(out_ptr + t[:, None] * inner + of_P[None, :], y_QP.to(kind), mask=is_inside[:, None])
        if RETURN_STATE or IS_LONG:
            total = tl.sum(dt_Q * A, axis=0)
            fed_QP = x_QP.to(tl.float32) * (dt_Q * tl.exp(total - logs_Q))[:, None]
            added_NP = tl.dot(tl.trans(B_QN), fed_QP.to(kind), input_precision=PRECISION)
            state_NP = state_NP * tl.exp(total) + added_NP
    if RETURN_STATE:
        tl.store(last_ptr + tile, state_NP)


@triton.jit
def _token_channels(
    row_ptr, inputs_ptr, conv_ptr, bias_ptr, channels, inner, num_channels, K: tl.constexpr
):  # fmt: skip
    """silu(convolution) of some channels of one token, in fp32."""
    total = tl.load(bias_ptr + channels).to(tl.float32)
    for k in tl.static_range(K - 1):
        earlier = tl.load(inputs_ptr + k * num_channels + channels).to(tl.float32)
        total += earlier * tl.load(conv_ptr + channels * K + k).to(tl.float32)
    now = tl.load(row_ptr + inner + channels).to(tl.float32)
    total += now * tl.load(conv_ptr + channels * K + (K - 1)).to(tl.float32)
    return total * tl.sigmoid(total)


@triton.jit
def _token_kernel(
    projected_ptr, out_ptr, conv_ptr, bias_ptr, dt_bias_ptr, A_ptr, D_ptr, before_ptr, inputs_ptr, last_ptr,
    heads, groups, num_channels, num_columns,
    P: tl.constexpr, N: tl.constexpr, K: tl.constexpr, RETURN_STATE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    group = head // (heads // groups)
    inner = heads * P
    of_P, of_N = tl.arange(0, P), tl.arange(0, N)
    row_ptr = projected_ptr + sequence * num_columns
    inputs_ptr += sequence * (K - 1) * num_channels
    x_P = _token_channels(row_ptr, inputs_ptr, conv_ptr, bias_ptr, head * P + of_P, inner, num_channels, K)
    of_B = inner + group * N + of_N
    B_N = _token_channels(row_ptr, inputs_ptr, conv_ptr, bias_ptr, of_B, inner, num_channels, K)
    C_N = _token_channels(row_ptr, inputs_ptr, conv_ptr, bias_ptr, of_B + groups * N, inner, num_channels, K)
    dt = tl.load(row_ptr + inner + num_channels + head).to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
    dt = _softplus(dt)
    decay = tl.exp(dt * tl.load(A_ptr + head).to(tl.float32))
    tile = (sequence * heads + head) * P * N + of_P[:, None] * N + of_N[None, :]
    state_PN = tl.load(before_ptr + tile) * decay + (x_P * dt)[:, None] * B_N[None, :]
    y_P = tl.sum(state_PN * C_N[None, :], axis=1) + tl.load(D_ptr + head).to(tl.float32) * x_P
    gate_P = tl.load(row_ptr + head * P + of_P).to(tl.float32)
    y_P *= gate_P * tl.sigmoid(gate_P)
    tl.store(out_ptr + sequence * inner + head * P + of_P, y_P.to(out_ptr.dtype.element_ty))
    if RETURN_STATE:
        tl.store(last_ptr + tile, state_PN)
