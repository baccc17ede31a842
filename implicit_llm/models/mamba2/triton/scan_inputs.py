"""Compute the inputs of a Mamba2 scan, and the gradient of its convolution (imported only if Triton kernels run).

One kernel convolves channels and applies silu, one computes dt and its decays, and one computes the gradient of the
convolution. A program of a convolution processes its positions in order, four at a time, with the last inputs in
registers. The plain PyTorch twin is `models.mamba2.causal_conv`.

Shapes: `B` batch, `L` length, `E` in-projection (gate I, convolved C = I + 2 G N, dt H), `I` = H P inner, `H` heads,
`P` head width, `G` groups, `N` state, `K` convolution (K-1 in its earlier inputs), `Q` chunk, `S` chunks.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language.extra import libdevice

from implicit_llm.kernels.triton.memory import wide, wide_sum
from implicit_llm.kernels.triton.sums import sum_rows
from implicit_llm.models.mamba2.chunked_scan import ScanWeights

TAPS = 4  # inputs of a convolution; narrower convolutions are padded with zero weights
# A program that convolves is one warp and needs few registers, so that many run at once.
FORWARD_ROWS, FORWARD_CHANNELS = 32, 128
GRADIENT_CHANNELS = 256  # of a program that computes the gradient of the convolution in a chunk
MAX_CHUNK_LEN, MIN_CHUNK_LEN = 64, 16  # matrix units need 16 positions; more than 64 need too many registers
LOG2_E = constexpr(math.log2(math.e))


class Mixer(NamedTuple):
    """The arguments of a mixer, all contiguous; see `models.mamba2.ssd.gated_scan`."""

    projected_BLE: Tensor
    injection_BLE: Tensor | None
    weights: ScanWeights
    sizes: tuple[int, int, int]

    @property
    def heads(self) -> int:
        return len(self.weights.A_H)

    @property
    def chunk_len(self) -> int:
        """The number of positions of a chunk; its maximum is halved in fp32, which needs more registers."""
        longest = MAX_CHUNK_LEN if self.projected_BLE.element_size() == 2 else MAX_CHUNK_LEN // 2
        return min(longest, max(MIN_CHUNK_LEN, triton.next_power_of_2(self.projected_BLE.shape[1])))

    def constants(self) -> dict[str, Any]:
        """Return the sizes as compile-time constants, from which the compiler infers which rows are aligned."""
        columns, (width, groups, size) = self.projected_BLE.shape[2], self.sizes
        known = {"HEADS": self.heads, "GROUPS": groups, "COLUMNS": columns, "P": width, "N": size}
        return known | {"Q": self.chunk_len}


class MixerInputs(NamedTuple):
    """The inputs of the scan: silu of the convolution, dt, and each position's cumulative log2 decay in its chunk."""

    convolved_BLC: Tensor
    dt_BSHQ: Tensor
    logs_BSHQ: Tensor


def mixer_inputs(mixer: Mixer, before_BKC: Tensor | None = None) -> MixerInputs:
    """Compute the scan's inputs from projected + injection; `before_BKC` or zeros are the K-1 inputs before them."""
    projected_BLE, injection_BLE, weights, _ = mixer
    batch, length, _ = projected_BLE.shape
    channels, taps = weights.conv_CK.shape
    chunks = triton.cdiv(length, mixer.chunk_len)
    convolved_BLC = projected_BLE.new_empty(batch, length, channels)
    dt, logs = projected_BLE.new_empty(2, batch, chunks, mixer.heads, mixer.chunk_len, dtype=torch.float32)
    has_injection = injection_BLE is not None
    given = injection_BLE if has_injection else projected_BLE
    _convolution_kernel[(triton.cdiv(channels, FORWARD_CHANNELS), triton.cdiv(length, FORWARD_ROWS), batch)](
        projected_BLE, given, projected_BLE if before_BKC is None else before_BKC.contiguous(), *weights[:2],
        convolved_BLC, length,
        INNER=mixer.heads * mixer.sizes[0], CHANNELS=channels, COLUMNS=projected_BLE.shape[2], K=taps,
        ROWS=FORWARD_ROWS, BLOCK=FORWARD_CHANNELS, HAS_STATE=before_BKC is not None, INJECT=has_injection,
        num_warps=1,
    )  # fmt: skip
    _decay_kernel[(chunks, batch)](
        projected_BLE, given, *weights[2:4], dt, logs, length, chunks,
        **mixer.constants(), ALL_HEADS=triton.next_power_of_2(mixer.heads), INJECT=has_injection, num_warps=4,
    )  # fmt: skip
    return MixerInputs(convolved_BLC, dt, logs)


def convolution_gradient(
    mixer: Mixer, before_BKC: Tensor | None, dconvolved_BLC: Tensor, dprojected_BLE: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradient of the convolution's inputs into `dprojected_BLE`; return those of weight and bias, in fp32.

    The mixer must have no injection.
    Args: dconvolved is the gradient of silu of the convolution. `before_BKC` is that of `mixer_inputs`.
    """
    batch, length, _ = mixer.projected_BLE.shape
    channels, taps = mixer.weights.conv_CK.shape
    chunks = triton.cdiv(length, mixer.chunk_len)
    sums = mixer.projected_BLE.new_empty(TAPS + 1, batch * chunks, channels, dtype=torch.float32)
    _convolution_gradient_kernel[(triton.cdiv(channels, GRADIENT_CHANNELS), chunks, batch)](
        mixer.projected_BLE, mixer.projected_BLE if before_BKC is None else before_BKC.contiguous(),
        *mixer.weights[:2], dconvolved_BLC, dprojected_BLE, sums, length, chunks,
        **mixer.constants(), K=taps, BLOCK=GRADIENT_CHANNELS, HAS_STATE=before_BKC is not None, num_warps=4,
    )  # fmt: skip
    totals = sum_rows(sums)
    return totals[TAPS - taps : TAPS].t(), totals[TAPS]


@triton.jit
def exp2(value):
    """Compute 2^value, with 0 for results below the smallest normal number: half the instructions of `tl.exp2`."""
    return libdevice.exp2(value)


@triton.jit
def sigmoid(value):
    return libdevice.fast_dividef(1.0, 1.0 + libdevice.exp2(value * -LOG2_E))


@triton.jit
def softplus(value):
    power = tl.exp(tl.minimum(value, 20.0))
    small = power * (1.0 - power * (0.5 - power / 3.0))  # because 1 + power would lose most digits of a small power
    return tl.where(value > 20.0, value, tl.where(power < 0.01, small, tl.log(1.0 + power)))


@triton.jit
def _taps(conv_ptr, channels, is_channel, K: constexpr):
    """Load the weights of an input and of the three before it; 0 beyond the width of a narrower convolution."""
    last_ptr = conv_ptr + channels * K + (K - 1)
    return (
        wide(last_ptr, is_channel),
        wide(last_ptr - 1, is_channel & (K > 1)),
        wide(last_ptr - 2, is_channel & (K > 2)),
        wide(last_ptr - 3, is_channel & (K > 3)),
    )


@triton.jit
def _state_row(before_ptr, t, channels, is_channel, CHANNELS: constexpr, K: constexpr):
    """Load row t of the K - 1 inputs before the sequence, which have t < 0; return 0 for every other row."""
    is_before = is_channel & (t < 0) & (t >= 1 - K)
    return wide(before_ptr + (t + K - 1) * CHANNELS + channels, is_before)


@triton.jit
def _four_rows(
    rows_ptr, injection_ptr, t, channels, is_channel, length, STRIDE: constexpr, INJECT: constexpr
):  # fmt: skip
    """Load rows t to t + 3 plus their injection in fp32; rows from `length` on are 0."""
    rows_ptr += t * STRIDE
    injection_ptr += t * STRIDE
    return (
        wide_sum(rows_ptr, injection_ptr, channels, is_channel & (t < length), INJECT),
        wide_sum(rows_ptr + STRIDE, injection_ptr + STRIDE, channels, is_channel & (t + 1 < length), INJECT),
        wide_sum(rows_ptr + 2 * STRIDE, injection_ptr + 2 * STRIDE, channels, is_channel & (t + 2 < length), INJECT),
        wide_sum(rows_ptr + 3 * STRIDE, injection_ptr + 3 * STRIDE, channels, is_channel & (t + 3 < length), INJECT),
    )


@triton.jit
def _dot4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3


@triton.jit
def _silu_slope(value):
    share = sigmoid(value)
    return share * (1.0 + value * (1.0 - share))


@triton.jit
def _convolution_kernel(
    projected_ptr, injection_ptr, before_ptr, conv_ptr, bias_ptr, convolved_ptr, length,
    INNER: constexpr, CHANNELS: constexpr, COLUMNS: constexpr, K: constexpr,
    ROWS: constexpr, BLOCK: constexpr, HAS_STATE: constexpr, INJECT: constexpr,
):  # fmt: skip
    """Convolve some channels of `ROWS` positions of one sequence, and write silu of the result."""
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * ROWS
    sequence = tl.program_id(2).to(tl.int64)
    is_channel = channels < CHANNELS
    rows_ptr = projected_ptr + sequence * length * COLUMNS + INNER
    injected_ptr = injection_ptr + sequence * length * COLUMNS + INNER
    convolved_ptr += sequence * length * CHANNELS
    bias = wide(bias_ptr + channels, is_channel)
    tap0, tap1, tap2, tap3 = _taps(conv_ptr, channels, is_channel, K)
    _, x3, x2, x1 = _four_rows(
        rows_ptr, injected_ptr, first - 4, channels, is_channel & (first > 0), length, COLUMNS, INJECT
    )
    if HAS_STATE:
        before_ptr += sequence * (K - 1) * CHANNELS
        x1 += _state_row(before_ptr, first - 1, channels, is_channel, CHANNELS, K)
        x2 += _state_row(before_ptr, first - 2, channels, is_channel, CHANNELS, K)
        x3 += _state_row(before_ptr, first - 3, channels, is_channel, CHANNELS, K)
    for t in range(first, tl.minimum(first + ROWS, length), 4):
        n0, n1, n2, n3 = _four_rows(rows_ptr, injected_ptr, t, channels, is_channel, length, COLUMNS, INJECT)
        y0 = bias + _dot4(tap0, tap1, tap2, tap3, n0, x1, x2, x3)
        y1 = bias + _dot4(tap0, tap1, tap2, tap3, n1, n0, x1, x2)
        y2 = bias + _dot4(tap0, tap1, tap2, tap3, n2, n1, n0, x1)
        y3 = bias + _dot4(tap0, tap1, tap2, tap3, n3, n2, n1, n0)
        to = convolved_ptr + t * CHANNELS + channels
        tl.store(to, y0 * sigmoid(y0), is_channel & (t < length))
        tl.store(to + CHANNELS, y1 * sigmoid(y1), is_channel & (t + 1 < length))
        tl.store(to + 2 * CHANNELS, y2 * sigmoid(y2), is_channel & (t + 2 < length))
        tl.store(to + 3 * CHANNELS, y3 * sigmoid(y3), is_channel & (t + 3 < length))
        x1, x2, x3 = n3, n2, n1


@triton.jit
def _decay_kernel(
    projected_ptr, injection_ptr, dt_bias_ptr, A_ptr, dt_ptr, logs_ptr, length, chunks,
    HEADS: constexpr, GROUPS: constexpr, COLUMNS: constexpr, P: constexpr, N: constexpr,
    Q: constexpr, ALL_HEADS: constexpr, INJECT: constexpr,
):  # fmt: skip
    """Compute dt and its decays for all heads of one chunk of one sequence."""
    chunk = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    of_H, steps = tl.arange(0, ALL_HEADS), tl.arange(0, Q)
    is_head = of_H < HEADS
    t = chunk * Q + steps
    is_inside = (t < length)[:, None]
    of_dt = (sequence * length + t)[:, None] * COLUMNS + 2 * (HEADS * P + GROUPS * N) + of_H[None, :]
    raw_QH = wide_sum(projected_ptr, injection_ptr, of_dt, is_inside & is_head[None, :], INJECT)
    raw_QH += wide(dt_bias_ptr + of_H, is_head)[None, :]
    dt_QH = tl.where(is_inside, softplus(raw_QH), 0.0)  # dt = 0 neither decays nor feeds the state
    rate_H = wide(A_ptr + of_H, is_head) * LOG2_E
    logs_QH = tl.cumsum(dt_QH * rate_H[None, :], axis=0)
    to = ((sequence * chunks + chunk) * HEADS + of_H)[None, :] * Q + steps[:, None]
    tl.store(dt_ptr + to, dt_QH, is_head[None, :])
    tl.store(logs_ptr + to, logs_QH, is_head[None, :])


@triton.jit
def _convolution_gradient_kernel(
    projected_ptr, before_ptr, conv_ptr, bias_ptr, dconvolved_ptr, dprojected_ptr, sums_ptr, length, chunks,
    HEADS: constexpr, GROUPS: constexpr, COLUMNS: constexpr, P: constexpr, N: constexpr,
    Q: constexpr, K: constexpr, BLOCK: constexpr, HAS_STATE: constexpr,
):  # fmt: skip
    """Process some channels of one chunk, and of the three positions after it, whose outputs depend on its inputs."""
    chunk = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    INNER: constexpr = HEADS * P
    CHANNELS: constexpr = INNER + 2 * GROUPS * N
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < CHANNELS
    first = chunk * Q
    rows_ptr = projected_ptr + sequence * length * COLUMNS + INNER
    drows_ptr = dprojected_ptr + sequence * length * COLUMNS + INNER
    dconvolved_ptr += sequence * length * CHANNELS
    bias = wide(bias_ptr + channels, is_channel)
    tap0, tap1, tap2, tap3 = _taps(conv_ptr, channels, is_channel, K)
    is_after = is_channel & (first > 0)
    _, x3, x2, x1 = _four_rows(rows_ptr, rows_ptr, first - 4, channels, is_after, length, COLUMNS, False)
    if HAS_STATE:
        before_ptr += sequence * (K - 1) * CHANNELS
        x1 += _state_row(before_ptr, first - 1, channels, is_channel, CHANNELS, K)
        x2 += _state_row(before_ptr, first - 2, channels, is_channel, CHANNELS, K)
        x3 += _state_row(before_ptr, first - 3, channels, is_channel, CHANNELS, K)
    zero = tl.zeros((BLOCK,), dtype=tl.float32)
    # d1 to d3 are the gradients of the input of silu in the three earlier rows. Their initial values affect no row that
    # this program stores, but they must differ, because Triton 3.6 merges variables with equal initial values.
    d1, d2, d3 = tap0, tap1, tap2
    dtap0, dtap1, dtap2, dtap3, dbias = zero, zero, zero, zero, zero
    for t in range(first, first + Q + 4, 4):
        n0, n1, n2, n3 = _four_rows(rows_ptr, rows_ptr, t, channels, is_channel, length, COLUMNS, False)
        g0, g1, g2, g3 = _four_rows(dconvolved_ptr, dconvolved_ptr, t, channels, is_channel, length, CHANNELS, False)
        g0 *= _silu_slope(bias + _dot4(tap0, tap1, tap2, tap3, n0, x1, x2, x3))
        g1 *= _silu_slope(bias + _dot4(tap0, tap1, tap2, tap3, n1, n0, x1, x2))
        g2 *= _silu_slope(bias + _dot4(tap0, tap1, tap2, tap3, n2, n1, n0, x1))
        g3 *= _silu_slope(bias + _dot4(tap0, tap1, tap2, tap3, n3, n2, n1, n0))
        # These are the gradients of the inputs at positions t-3 to t.
        to = drows_ptr + (t - 3) * COLUMNS + channels
        has_before = is_channel & (t > first)
        dx = _dot4(tap0, tap1, tap2, tap3, d3, d2, d1, g0)
        tl.store(to, dx, has_before & (t - 3 < length))
        dx = _dot4(tap0, tap1, tap2, tap3, d2, d1, g0, g1)
        tl.store(to + COLUMNS, dx, has_before & (t - 2 < length))
        dx = _dot4(tap0, tap1, tap2, tap3, d1, g0, g1, g2)
        tl.store(to + 2 * COLUMNS, dx, has_before & (t - 1 < length))
        is_own = t < first + Q
        dx = _dot4(tap0, tap1, tap2, tap3, g0, g1, g2, g3)
        tl.store(to + 3 * COLUMNS, dx, is_channel & is_own & (t < length))
        if is_own:
            dtap0 += _dot4(n0, n1, n2, n3, g0, g1, g2, g3)
            dtap1 += _dot4(x1, n0, n1, n2, g0, g1, g2, g3)
            dtap2 += _dot4(x2, x1, n0, n1, g0, g1, g2, g3)
            dtap3 += _dot4(x3, x2, x1, n0, g0, g1, g2, g3)
            dbias += g0 + g1 + g2 + g3
        x1, x2, x3 = n3, n2, n1
        d1, d2, d3 = g3, g2, g1
    to = sums_ptr + (sequence * chunks + chunk) * CHANNELS + channels
    rows = tl.num_programs(2).to(tl.int64) * chunks * CHANNELS
    tl.store(to, dtap3, is_channel)
    tl.store(to + rows, dtap2, is_channel)
    tl.store(to + 2 * rows, dtap1, is_channel)
    tl.store(to + 3 * rows, dtap0, is_channel)
    tl.store(to + 4 * rows, dbias, is_channel)
