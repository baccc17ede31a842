"""How the kernels read memory: masked, and where they compute in it, in fp32."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def load(at, is_there):
    """The entries at these addresses; 0 for those that are not there."""
    return tl.load(at, mask=is_there, other=0.0)


@triton.jit
def wide(at, is_there):
    """Work like `load`, in fp32."""
    return load(at, is_there).to(tl.float32)


@triton.jit
def wide_sum(given_ptr, injection_ptr, at, is_there, INJECT: constexpr):
    """Entries plus those of the injection at the same places, in fp32."""
    entries = wide(given_ptr + at, is_there)
    if INJECT:
        entries += wide(injection_ptr + at, is_there)
    return entries
