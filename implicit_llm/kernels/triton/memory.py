"""Load entries of memory with a mask, in their own dtype or in fp32."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def load(at, is_there):
    """Load the entries at these addresses, and 0 where `is_there` is false."""
    return tl.load(at, mask=is_there, other=0.0)


@triton.jit
def wide(at, is_there):
    """Load like `load`, and convert to fp32."""
    return load(at, is_there).to(tl.float32)


@triton.jit
def wide_sum(given_ptr, injection_ptr, at, is_there, INJECT: constexpr):
    """Load entries in fp32; with `INJECT`, add the injection's entries at the same offsets."""
    entries = wide(given_ptr + at, is_there)
    if INJECT:
        entries += wide(injection_ptr + at, is_there)
    return entries
