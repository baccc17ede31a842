"""Evaluate a Mamba2 stack on one token of one sequence, in three kernels per layer (imported only if Triton runs).

`kernels.triton.token_products` explains why the kernels are few and how they overlap. The first kernel multiplies the
norm of h by the in-projection and adds the injection. The second convolves and applies the state and the gate. The
third multiplies by the out-projection, applies the scale of the gated norm, and adds the result to h. An iteration does
not need the state after the token, because C (decay state + dt x B) = decay (C state) + dt x (C B).
The plain PyTorch twin is `models.backbone.ImplicitModel.apply_stack`.

Shapes: `D` model, `E` in-projection (gate I, convolved C = I + 2 G N, dt H), `I` = H P inner, `H` heads,
`P` head width, `G` groups, `N` state, `K` convolution, `S` parts of all heads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import load
from implicit_llm.kernels.triton.token_products import TokenProducts, gdc_launch_dependents, gdc_wait
from implicit_llm.models.mamba2.chunked_scan import ScanWeights
from implicit_llm.models.mamba2.triton.scan_inputs import softplus
from implicit_llm.models.stack import LayerState

STATE_ENTRIES = 4096  # most entries of a state that one program holds in registers
MIN_PART = 16  # fewest channels of a head that one program processes, if there are few programs
FEW_PROGRAMS = 128  # about the number of multiprocessors


class Mamba2TokenLayer(NamedTuple):
    """The effective weights of one layer, in fp32 and contiguous."""

    norm_D: Tensor
    in_proj_ED: Tensor
    scan: ScanWeights
    gated_norm_I: Tensor
    out_proj_DI: Tensor


class Mamba2TokenStack:
    """The layers of a stack, and the tensors between their kernels."""

    def __init__(self, layers: list[Mamba2TokenLayer], sizes: tuple[int, int, int], eps: float) -> None:
        """Allocate the tensors; `sizes` are (P, G, N)."""
        first, (width, groups, size) = layers[0], sizes
        inner, columns, device = first.out_proj_DI.shape[1], len(first.in_proj_ED), first.in_proj_ED.device
        part = min(width, STATE_ENTRIES // size)
        while part > MIN_PART and inner // part < FEW_PROGRAMS:
            part //= 2
        self._layers, self._products = layers, TokenProducts(eps, device)
        self._programs = inner // width, width // part
        self._how = {"HEADS": inner // width, "GROUPS": groups, "P": width, "N": size, "PART": part}
        self._how |= {"K": first.scan.conv_CK.shape[1], **self._products.launch}
        self._projected_E, self._y_I = torch.empty(columns, device=device), torch.empty(inner, device=device)
        self._squares_S = torch.empty(inner // part, device=device)

    def __call__(self, z_11D: Tensor, injection_11E: Tensor, states: tuple[LayerState, ...]) -> Tensor:
        """Return the residual stream (1, 1, D) after the last layer, before the final norm.

        Args: states are those before the token: the SSM state (1, H, P, N) and the last K-1 inputs of the convolution
            (1, K-1, C) of each layer. All tensors are in fp32.
        """
        injection_11E, from_11D = injection_11E.contiguous(), z_11D.contiguous()
        h_11D = torch.empty_like(from_11D)
        for index, (layer, before) in enumerate(zip(self._layers, states, strict=True)):
            norm_D, in_proj_ED, scan, gated_norm_I, out_proj_DI = layer
            self._products.project(
                from_11D, norm_D, in_proj_ED, self._projected_E, added=injection_11E, is_first=index == 0
            )
            _token_kernel[self._programs](
                self._projected_E, *scan, gated_norm_I, *(state.contiguous() for state in before), self._y_I,
                self._squares_S, **self._how,
            )  # fmt: skip
            self._products.add(self._y_I, out_proj_DI, from_11D, h_11D, self._squares_S)
            from_11D = h_11D
        return h_11D


@triton.jit
def _inputs_ahead(conv_ptr, bias_ptr, before_ptr, channels, CHANNELS: constexpr, K: constexpr):
    """Load what the convolution of some channels needs besides the token: four weights, the bias, three earlier inputs.

    If K < 4, the weights and inputs beyond the width K are 0.
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
    head, part = tl.program_id(0), tl.program_id(1)
    INNER: constexpr = HEADS * P
    CHANNELS: constexpr = INNER + 2 * GROUPS * N
    of_N, of_P = tl.arange(0, N), head * P + part * PART + tl.arange(0, PART)
    of_B = INNER + head // (HEADS // GROUPS) * N + of_N
    of_C = of_B + GROUPS * N
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
    tl.store(y_ptr + of_P, y_P * norm_P)
    tl.store(squares_ptr + head * (P // PART) + part, tl.sum(y_P * y_P, axis=0))
