"""Compute state space duality (SSD) of Mamba2, by kernels or in plain PyTorch as a chunked scan of matrix products.

Shapes: `B` batch, `L` length, `H` heads, `P` head width, `G` groups, `N` state.

Autograd would store five decay matrices per chunk and head: 2.5 GiB per call for 512 x 256 tokens and 16 heads. Here
only the inputs are stored, and the backward pass computes the matrices again, for a few sequences at a time. Only
small matrices are stored (KEPT_BYTES).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from implicit_llm.kernels import selection
from implicit_llm.models.mamba2.chunked_scan import ScanWeights, cut, make_layout, scan, scan_gradient

# A chunk of length Q costs Q scores and P*N/Q state entries per token and head; 64 balances both at published widths.
CHUNK_LEN = 64
# Up to this size, decay matrices are stored, because computing them again would cost too much time.
KEPT_BYTES = 8 * 2**20


def ssd(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    initial_state_BHPN: Tensor | None = None,
    *,
    D_H: Tensor | None = None,
    return_state: bool = False,
    chunk_len: int = CHUNK_LEN,
) -> tuple[Tensor, Tensor | None]:
    """Run h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t + D x_t over a sequence of any length.

    Args: dt is positive (after softplus), or 0 at padding, which then neither decays nor feeds the state. A is
        negative. B and C are converted to the dtype of x. Products are computed in that dtype and decays in fp32 (fp64
        if x is fp64), also under autocast.
    Returns: y (B, L, H, P) in the dtype of x; with `return_state` the state after the last position (B, H, P, N) in the
        dtype of the decays, else None. `chunk_len`: see `make_layout`; mamba_ssm chooses its own chunks.
    """
    B_BLGN, C_BLGN = B_BLGN.to(x_BLHP.dtype), C_BLGN.to(x_BLHP.dtype)
    inputs = (x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_state_BHPN)
    if selection.ssd_runs_on_triton(x_BLHP, B_BLGN):
        return _ssd_of_package(*inputs, D_H=D_H, return_state=return_state)
    if selection.is_reference():
        layout = make_layout(x_BLHP.shape[1], x_BLHP.shape[2], chunk_len)
        with torch.autocast(x_BLHP.device.type, enabled=False):
            chunks = cut(layout, A_H, x_BLHP, dt_BLH, *inputs[3:])
            y_BLHP, state = scan(chunks, return_state=return_state)
    else:
        y_BLHP, state = _ChunkedScan.apply(*inputs, return_state, chunk_len)
    if D_H is not None:
        y_BLHP = torch.addcmul(y_BLHP, x_BLHP, D_H.to(x_BLHP.dtype)[:, None])
    return y_BLHP, state


def _ssd_of_package(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    initial_state_BHPN: Tensor | None,
    *,
    D_H: Tensor | None,
    return_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Implement `ssd` with the kernels of mamba_ssm >= 2.2.4 (ops/triton).

    Products and the states between chunks are in the dtype of x; fp32 is multiplied in TF32.
    """
    chunk_scan, _ = selection.mamba_functions()
    out = chunk_scan(
        x_BLHP,
        dt_BLH.float(),
        A_H.float(),
        B_BLGN.to(x_BLHP.dtype),
        C_BLGN.to(x_BLHP.dtype),
        selection.published_chunk(x_BLHP.shape[1]),
        D=None if D_H is None else D_H.float(),
        initial_states=None if initial_state_BHPN is None else initial_state_BHPN.float(),
        return_final_states=return_state,
    )
    return out if return_state else (out, None)


class _ChunkedScan(torch.autograd.Function):
    """The scan and its gradient, computed for one slice of the batch at a time."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        *inputs, return_state, chunk_len = given
        x, dt, A, B, C, initial = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.layout = layout = make_layout(x.shape[1], x.shape[2], chunk_len)
        parts = []
        with torch.autocast(x.device.type, enabled=False):
            for rows in _slices(layout.slice_len, x, dt, B, C, initial):
                chunks = cut(layout, A, *rows)
                parts.append(scan(chunks, return_state=return_state))
        num_bytes = chunks.decay_FHQQ.numel() * chunks.decay_FHQQ.element_size()  # torch.compile cannot trace `nbytes`
        ctx.chunks = chunks if len(parts) == 1 and num_bytes <= KEPT_BYTES else None
        y, states = zip(*parts, strict=True)
        return _join(y), _join(states) if return_state else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, initial = ctx.saved_tensors
        dy = torch.zeros_like(x) if dy is None else dy
        with torch.autocast(x.device.type, enabled=False):
            parts = [
                scan_gradient(ctx.chunks or cut(ctx.layout, A, *rows), dy_rows, dstate_rows)
                for *rows, dy_rows, dstate_rows in _slices(ctx.layout.slice_len, x, dt, B, C, initial, dy, dstate)
            ]
        dx, ddt, dA, dB, dC, dinitial = zip(*parts, strict=True)
        return (
            _join(dx),
            _join(ddt).to(dt.dtype),
            torch.stack(dA).sum(0).to(A.dtype),
            _join(dB),
            _join(dC),
            None if initial is None else _join(dinitial).to(initial.dtype),
            None,
            None,
        )


def _slices(slice_len: int, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield the same slice of every tensor, `slice_len` sequences at a time; None stays None."""
    assert tensors[0] is not None
    for start in range(0, max(1, len(tensors[0])), slice_len):
        yield tuple(None if t is None else t[start : start + slice_len] for t in tensors)


def _join(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gated_scan(
    projected_BLE: Tensor,
    injection_BLE: Tensor | None,
    weights: ScanWeights,
    sizes: tuple[int, int, int],
    state: tuple[Tensor, ...] | None,
    *,
    return_state: bool,
    norm: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return silu(gate) * (SSD(silu(convolution)) + D x) of projected + injection, computed by Triton kernels.

    `scan_runs_on_triton` must be true. If gradients are enabled, `trained_scan_runs_on_triton` must be true instead,
    and the injection must be None; neither the given state nor the returned one then has a gradient.
    Args: projected holds gate (H P), channels to convolve (H P + 2 G N) and dt (H) side by side; sizes are (P, G, N);
        state is the SSM state (B, H, P, N) and the last K-1 inputs of the convolution (B, K-1, C) before the sequence,
        None if it is empty. norm, only if gradients are disabled: the weight (H P) of an RMS norm, by which the
        result is multiplied too, and an fp32 tensor (B, L, H) to which each head's sum of squares is written, taken
        before this multiplication.
    Returns: (B, L, H P) in the dtype of `projected_BLE`; with `return_state` the SSM state after the last position in
        fp32, else None.
    """
    from implicit_llm.models.mamba2.triton.scan_inputs import Mixer

    weights = weights._replace(conv_CK=weights.conv_CK.contiguous())
    injection_BLE = None if injection_BLE is None else injection_BLE.contiguous()
    mixer = Mixer(projected_BLE.contiguous(), injection_BLE, weights, sizes)
    if torch.is_grad_enabled():
        from implicit_llm.models.mamba2.triton.scan_backward import gated_mix

        assert injection_BLE is None
        assert norm is None
        return gated_mix(mixer, state, return_state)
    from implicit_llm.models.mamba2.triton import scan as triton_scan

    if projected_BLE.shape[1] == 1 and state is not None:
        return triton_scan.gated_token(mixer, state, return_state, norm)
    return triton_scan.gated_scan(mixer, state, return_state, norm)
