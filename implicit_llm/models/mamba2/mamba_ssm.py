"""The kernels of mamba_ssm and causal_conv1d behind this package's signatures.

Shapes: `B` batch, `L` length, `H` heads, `P` head width, `G` groups, `N` state, `C` channels, `K` kernel width.
Source: mamba_ssm >= 2.2.4 (ops/triton), causal_conv1d >= 1.5.
"""

import torch
from torch import Tensor

from implicit_llm.kernels.selection import mamba_functions

# The kernels tune themselves anew, for a minute, for every chunk length: few of them, and multiples of their tiles.
CHUNK_LENS = (64, 128, 256)


def ssd(
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
    """Work like `mamba2.ssd.ssd`. Products in the dtype of x (fp32: in TF32), as are the states between chunks."""
    length = x_BLHP.shape[1]
    chunk_scan, _ = mamba_functions()
    out = chunk_scan(
        x_BLHP,
        dt_BLH.float(),
        A_H.float(),
        B_BLGN.to(x_BLHP.dtype),
        C_BLGN.to(x_BLHP.dtype),
        next((size for size in CHUNK_LENS if size >= length), CHUNK_LENS[-1]),
        D=None if D_H is None else D_H.float(),
        initial_states=None if initial_state_BHPN is None else initial_state_BHPN.float(),
        return_final_states=return_state,
    )
    return out if return_state else (out, None)


def causal_conv(
    x_BLC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, initial_BKC: Tensor | None, *, silu: bool
) -> Tensor:
    """Work like `mamba2.causal_conv.causal_conv`; sums in fp32."""
    if not _is_aligned(x_BLC):
        x_BLC = x_BLC.clone(memory_format=torch.contiguous_format)
    initial = None if initial_BKC is None else initial_BKC.to(x_BLC.dtype).contiguous().transpose(1, 2)
    bias = None if bias_C is None else bias_C.to(weight_CK.dtype)
    _, conv = mamba_functions()
    y_BCL = conv(x_BLC.transpose(1, 2), weight_CK, bias, initial_states=initial, activation="silu" if silu else None)
    return y_BCL.transpose(1, 2)


def _is_aligned(x_BLC: Tensor) -> bool:
    """Whether the kernels can read it where it is: 16 bytes at a time, channels side by side."""
    return x_BLC.stride(2) == 1 and not (x_BLC.stride(1) % 8 or x_BLC.stride(0) % 8 or x_BLC.data_ptr() % 16)
