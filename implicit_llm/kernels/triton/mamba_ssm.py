"""The kernels of mamba_ssm and causal_conv1d behind this package's signatures. Imported by kernels.selection alone.

Shapes: `B` batch, `L` length, `H` heads, `P` head width, `G` groups, `N` state, `C` channels, `K` kernel width.
Source: mamba_ssm >= 2.2.4 (ops/triton), causal_conv1d >= 1.5.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

import torch
from torch import Tensor


def _mamba_module(name: str) -> ModuleType:
    """A module of mamba_ssm without running mamba_ssm/__init__, which imports compiled parts not needed here."""
    if "mamba_ssm" not in sys.modules:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("mamba_ssm is not installed")
        package = ModuleType("mamba_ssm")
        package.__spec__ = importlib.machinery.ModuleSpec("mamba_ssm", None, is_package=True)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["mamba_ssm"] = package
        try:
            return importlib.import_module(f"mamba_ssm.{name}")
        except BaseException:
            del sys.modules["mamba_ssm"]
            raise
    return importlib.import_module(f"mamba_ssm.{name}")


_chunk_scan = _mamba_module("ops.triton.ssd_combined").mamba_chunk_scan_combined
_conv = importlib.import_module("causal_conv1d").causal_conv1d_fn


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
    chunk_len: int,
) -> tuple[Tensor, Tensor | None]:
    """Work like `kernels.ssd.ssd`. Products in the dtype of x (fp32: in TF32), as are the states between chunks."""
    out = _chunk_scan(
        x_BLHP,
        dt_BLH.float(),
        A_H.float(),
        B_BLGN.to(x_BLHP.dtype),
        C_BLGN.to(x_BLHP.dtype),
        chunk_len,
        D=None if D_H is None else D_H.float(),
        initial_states=None if initial_state_BHPN is None else initial_state_BHPN.float(),
        return_final_states=return_state,
    )
    return out if return_state else (out, None)


def causal_conv(
    x_BLC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, initial_BKC: Tensor | None, *, silu: bool
) -> Tensor:
    """Work like `kernels.causal_conv.causal_conv`; sums in fp32."""
    if not _is_aligned(x_BLC):
        x_BLC = x_BLC.clone(memory_format=torch.contiguous_format)
    initial = None if initial_BKC is None else initial_BKC.to(x_BLC.dtype).contiguous().transpose(1, 2)
    bias = None if bias_C is None else bias_C.to(weight_CK.dtype)
    y_BCL = _conv(x_BLC.transpose(1, 2), weight_CK, bias, initial_states=initial, activation="silu" if silu else None)
    return y_BCL.transpose(1, 2)


def _is_aligned(x_BLC: Tensor) -> bool:
    """Whether the kernels can read it where it is: 16 bytes at a time, channels side by side."""
    return x_BLC.stride(2) == 1 and not (x_BLC.stride(1) % 8 or x_BLC.stride(0) % 8 or x_BLC.data_ptr() % 16)
