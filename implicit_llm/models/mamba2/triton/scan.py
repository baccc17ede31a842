"""Compute SSD and gate of a Mamba2 mixer in one kernel, at every length (imported only if Triton kernels run).

One program processes one head of one sequence, chunk after chunk, with the state in registers. It thus reads x
and gate once, and writes the result once. Chunks of 64 positions fill the matrix units of a Hopper GPU.
In the products, channels come before positions (y^T = x^T scores^T), so that the state is both accumulated in registers
and multiplied from registers; only the scores pass through shared memory. For a gradient (`scan_backward`) the
kernel stores the states between chunks. A single token has its own kernel, which also convolves and needs no matrix
units.
If gradients are disabled, both kernels can do a part of the norm that follows: they multiply by its weight and write
the sums of squares from which a later kernel computes its scale (`kernels.norm.Unscaled`).
The plain PyTorch twin is `models.mamba2.model.Mamba2Mixer._mix`.

Shapes: `B` batch, `L` length, `E` in-projection (gate I, convolved C = I + 2 G N, dt H), `I` = H P inner, `H` heads,
`P` head width, `G` groups, `N` state, `K` convolution, `Q` chunk, `S` chunks (for states: the boundaries of chunks).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import load, wide_sum
from implicit_llm.models.mamba2.triton.scan_inputs import Mixer, MixerInputs, exp2, mixer_inputs, sigmoid, softplus

WIDE_STATE = 64 * 128  # entries; larger states need the registers of twice as many warps


def gated_scan(
    mixer: Mixer, state: tuple[Tensor, ...] | None, return_state: bool, norm: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return silu(gate) * (SSD + D x) of projected + injection, (B, L, I), and the last SSM state in fp32 if requested.

    Args: state holds the SSM state (B, H, P, N) and the last K-1 inputs of the convolution (B, K-1, C) before the
        sequence; None if it is empty. norm: see `models.mamba2.ssd.gated_scan`.
    """
    before_BHPN, before_BKC = (None, None) if state is None else state
    last_BHPN = _new_state(mixer) if return_state else None
    return _scan(mixer, mixer_inputs(mixer, before_BKC), before_BHPN, last_BHPN, norm=norm), last_BHPN


def gated_scan_for_gradient(
    mixer: Mixer, inputs: MixerInputs, before_BHPN: Tensor | None, return_state: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run `gated_scan` from the SSM state `before_BHPN`, and also return the states between chunks.

    Args: inputs are the `mixer_inputs` of the mixer.
    Returns: the result (B, L, I), the states (B, chunks - 1, H, P, N) in the dtype of `projected_BLE`, and the last SSM
        state in fp32 if requested.
    """
    batch, chunks, heads, _ = inputs.dt_BSHQ.shape
    width, _, size = mixer.sizes
    kept_BSHPN = mixer.projected_BLE.new_empty(batch, chunks - 1, heads, width, size)
    last_BHPN = _new_state(mixer) if return_state else None
    return _scan(mixer, inputs, before_BHPN, last_BHPN, kept_BSHPN), kept_BSHPN, last_BHPN


def _scan(
    mixer: Mixer,
    inputs: MixerInputs,
    before_BHPN: Tensor | None = None,
    last_BHPN: Tensor | None = None,
    kept_BSHPN: Tensor | None = None,
    norm: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    projected_BLE, injection_BLE, weights, (width, _, size) = mixer
    batch, length, _ = projected_BLE.shape
    chunks, heads = inputs.dt_BSHQ.shape[1:3]
    out = projected_BLE.new_empty(batch, length, heads * width)
    before, last, kept = (out if t is None else t.contiguous() for t in (before_BHPN, last_BHPN, kept_BSHPN))
    _scan_kernel[(heads, batch)](
        projected_BLE, projected_BLE if injection_BLE is None else injection_BLE, *inputs, weights.D_H, before, out,
        last, kept, *(norm or (out, out)), length, chunks,
        **mixer.constants(), NORM=norm is not None, KEEP=kept_BSHPN is not None, HAS_STATE=before_BHPN is not None,
        RETURN_STATE=last_BHPN is not None, INJECT=injection_BLE is not None, IS_LONG=chunks > 1, PRECISION=precision(),
        num_warps=4 if width * size <= WIDE_STATE else 8,
        num_stages=1,  # prefetching a chunk into shared memory would leave no room for a second program
    )  # fmt: skip
    return out


def gated_token(
    mixer: Mixer, state: tuple[Tensor, ...], return_state: bool, norm: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run `gated_scan` for one token after `state`."""
    projected_B1E, injection_B1E, weights, (width, groups, size) = mixer
    batch, _, columns = projected_B1E.shape
    out = projected_B1E.new_empty(batch, 1, mixer.heads * width)
    last = _new_state(mixer) if return_state else None
    _token_kernel[(mixer.heads, batch)](
        projected_B1E, projected_B1E if injection_B1E is None else injection_B1E, out, *weights,
        state[0].contiguous(), state[1].contiguous(),
        out if last is None else last, *(norm or (out, out)), mixer.heads, groups, len(weights.conv_CK), columns,
        P=width, N=size, K=weights.conv_CK.shape[1], NORM=norm is not None, RETURN_STATE=return_state,
        INJECT=injection_B1E is not None, num_warps=4,
    )  # fmt: skip
    return out, last


def _new_state(mixer: Mixer) -> Tensor:
    width, _, size = mixer.sizes
    shape = (len(mixer.projected_BLE), mixer.heads, width, size)
    return mixer.projected_BLE.new_empty(shape, dtype=torch.float32)


def precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@triton.jit
def _scan_kernel(
    projected_ptr, injection_ptr, convolved_ptr, dt_ptr, logs_ptr, D_ptr, before_ptr, out_ptr, last_ptr, kept_ptr,
    norm_ptr, squares_ptr, length, chunks,
    HEADS: constexpr, GROUPS: constexpr, COLUMNS: constexpr, P: constexpr, N: constexpr,
    Q: constexpr, NORM: constexpr, KEEP: constexpr, HAS_STATE: constexpr, RETURN_STATE: constexpr, INJECT: constexpr,
    IS_LONG: constexpr, PRECISION: constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    group = head // (HEADS // GROUPS)
    INNER: constexpr = HEADS * P
    CHANNELS: constexpr = INNER + 2 * GROUPS * N
    kind = projected_ptr.dtype.element_ty
    of_P, of_N, steps = tl.arange(0, P), tl.arange(0, N), tl.arange(0, Q)
    of_x = head * P + of_P
    projected_ptr += sequence * length * COLUMNS
    injection_ptr += sequence * length * COLUMNS
    convolved_ptr += sequence * length * CHANNELS
    out_ptr += sequence * length * INNER
    squares_ptr += sequence * length * HEADS + head
    dt_ptr += (sequence * chunks * HEADS + head) * Q
    logs_ptr += (sequence * chunks * HEADS + head) * Q
    of_state = (sequence * HEADS + head) * P * N + of_P[:, None] * N + of_N[None, :]
    D = tl.load(D_ptr + head).to(tl.float32)
    if NORM:
        norm_P = tl.load(norm_ptr + of_x).to(tl.float32)
    state_PN = tl.zeros((P, N), dtype=tl.float32)
    IS_SUMMED: constexpr = RETURN_STATE or IS_LONG
    if HAS_STATE and IS_SUMMED:
        state_PN += tl.load(before_ptr + of_state).to(tl.float32)
    for chunk in range(chunks):
        t = chunk * Q + steps
        is_row = (t < length)[:, None]
        at_B = convolved_ptr + t[:, None] * CHANNELS + (INNER + group * N + of_N)[None, :]
        dt_Q, logs_Q = tl.load(dt_ptr + chunk * HEADS * Q + steps), tl.load(logs_ptr + chunk * HEADS * Q + steps)
        B_QN = load(at_B, is_row)
        C_QN = load(at_B + GROUPS * N, is_row)
        x_QP = load(convolved_ptr + t[:, None] * CHANNELS + of_x[None, :], is_row)
        of_gate = t[:, None] * COLUMNS + of_x[None, :]
        gate_QP = wide_sum(projected_ptr, injection_ptr, of_gate, is_row, INJECT)
        scores_QQ = transposed_scores(B_QN, C_QN, dt_Q, logs_Q, steps, PRECISION).to(kind)
        if HAS_STATE or IS_LONG:
            # A state that is not accumulated needs few registers, so many programs can load their states at once.
            before_PN = state_PN.to(kind) if IS_SUMMED else tl.load(before_ptr + of_state).to(kind)
            y_PQ = tl.dot(before_PN, tl.trans(C_QN), input_precision=PRECISION) * exp2(logs_Q)[None, :]
            y_PQ = tl.dot(tl.trans(x_QP), scores_QQ, y_PQ, input_precision=PRECISION)
        else:
            y_PQ = tl.dot(tl.trans(x_QP), scores_QQ, input_precision=PRECISION)
        if RETURN_STATE or IS_LONG:
            total = tl.load(logs_ptr + chunk * HEADS * Q + Q - 1)
            fed_QP = (x_QP.to(tl.float32) * (dt_Q * exp2(total - logs_Q))[:, None]).to(kind)
            state_PN = tl.dot(tl.trans(fed_QP), B_QN, state_PN * exp2(total), input_precision=PRECISION)
            if KEEP:
                is_kept = (of_P >= 0)[:, None] & (chunk + 1 < chunks)
                first = ((sequence * (chunks - 1) + chunk) * HEADS + head) * P * N
                to = kept_ptr + first + of_P[:, None] * N + of_N[None, :]
                tl.store(to, state_PN, is_kept)
        y_QP = tl.trans(y_PQ) + D * x_QP.to(tl.float32)
        y_QP *= gate_QP * sigmoid(gate_QP)
        if NORM:
            tl.store(squares_ptr + t * HEADS, tl.sum(y_QP * y_QP, axis=1), t < length)
            y_QP *= norm_P[None, :]
        tl.store(out_ptr + t[:, None] * INNER + of_x[None, :], y_QP, is_row)
    if RETURN_STATE:
        tl.store(last_ptr + of_state, state_PN)


@triton.jit
def transposed_scores(B_QN, C_QN, dt_Q, logs_Q, steps, PRECISION: constexpr):
    """Compute the scores (Q, Q): rows are sources, columns are targets; a source does not affect earlier targets."""
    is_causal = steps[:, None] <= steps[None, :]
    decay_QQ = exp2(tl.where(is_causal, logs_Q[None, :] - logs_Q[:, None], -float("inf")))
    return tl.dot(B_QN, tl.trans(C_QN), input_precision=PRECISION) * decay_QQ * dt_Q[:, None]


@triton.jit
def _injected(row_ptr, injected_ptr, columns, INJECT: constexpr):
    value = tl.load(row_ptr + columns).to(tl.float32)
    if INJECT:
        value += tl.load(injected_ptr + columns).to(tl.float32)
    return value


@triton.jit
def _token_channels(
    row_ptr, injected_ptr, inputs_ptr, conv_ptr, bias_ptr, channels, inner, num_channels,
    K: constexpr, INJECT: constexpr,
):  # fmt: skip
    """Compute silu(convolution) of some channels of one token, in fp32."""
    total = tl.load(bias_ptr + channels).to(tl.float32)
    for k in tl.static_range(K - 1):
        earlier = tl.load(inputs_ptr + k * num_channels + channels).to(tl.float32)
        total += earlier * tl.load(conv_ptr + channels * K + k).to(tl.float32)
    now = _injected(row_ptr, injected_ptr, inner + channels, INJECT)
    total += now * tl.load(conv_ptr + channels * K + (K - 1)).to(tl.float32)
    return total * tl.sigmoid(total)


@triton.jit
def _token_kernel(
    projected_ptr, injection_ptr, out_ptr, conv_ptr, bias_ptr, dt_bias_ptr, A_ptr, D_ptr, before_ptr, inputs_ptr,
    last_ptr, norm_ptr, squares_ptr, heads, groups, num_channels, num_columns,
    P: constexpr, N: constexpr, K: constexpr, NORM: constexpr, RETURN_STATE: constexpr, INJECT: constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    group = head // (heads // groups)
    inner = heads * P
    of_P, of_N = tl.arange(0, P), tl.arange(0, N)
    row_ptr, injected_ptr = projected_ptr + sequence * num_columns, injection_ptr + sequence * num_columns
    inputs_ptr += sequence * (K - 1) * num_channels
    x_P = _token_channels(
        row_ptr, injected_ptr, inputs_ptr, conv_ptr, bias_ptr, head * P + of_P, inner, num_channels, K, INJECT
    )
    of_B = inner + group * N + of_N
    B_N = _token_channels(row_ptr, injected_ptr, inputs_ptr, conv_ptr, bias_ptr, of_B, inner, num_channels, K, INJECT)
    C_N = _token_channels(
        row_ptr, injected_ptr, inputs_ptr, conv_ptr, bias_ptr, of_B + groups * N, inner, num_channels, K, INJECT
    )
    dt = _injected(row_ptr, injected_ptr, inner + num_channels + head, INJECT)
    dt = softplus(dt + tl.load(dt_bias_ptr + head).to(tl.float32))
    decay = tl.exp(dt * tl.load(A_ptr + head).to(tl.float32))
    tile = (sequence * heads + head) * P * N + of_P[:, None] * N + of_N[None, :]
    state_PN = tl.load(before_ptr + tile) * decay + (x_P * dt)[:, None] * B_N[None, :]
    y_P = tl.sum(state_PN * C_N[None, :], axis=1) + tl.load(D_ptr + head).to(tl.float32) * x_P
    gate_P = _injected(row_ptr, injected_ptr, head * P + of_P, INJECT)
    y_P *= gate_P * tl.sigmoid(gate_P)
    if NORM:
        tl.store(squares_ptr + sequence * heads + head, tl.sum(y_P * y_P, axis=0))
        y_P *= tl.load(norm_ptr + head * P + of_P).to(tl.float32)
    tl.store(out_ptr + sequence * inner + head * P + of_P, y_P)
    if RETURN_STATE:
        tl.store(last_ptr + tile, state_PN)
