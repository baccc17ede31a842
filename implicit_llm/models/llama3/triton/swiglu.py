"""SwiGLU and its gradient, in one kernel each way. Imported where Triton kernels run.

The backward pass computes silu(gate) anew from the product, which is all that is kept, and writes the gradients of gate
and up side by side. The plain PyTorch twin is `llama3.attention.swiglu`.

Shapes: `T` tokens, `M` MLP width, `G` 2 M (gate, up).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from implicit_llm.kernels.triton.memory import wide

BLOCK, WARPS = 1024, 4
FEW_TOKENS, SMALL_BLOCK = 256, 256  # with fewer tokens, smaller blocks occupy more of the GPU


def swiglu(gate_up: Tensor) -> Tensor:
    """Work like `llama3.attention.swiglu`."""
    found: Tensor = _SwiGLU.apply(gate_up)
    return found


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        rows_TG = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _launch(_forward_kernel, rows_TG, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows_TG = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        gradient = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        _launch(_backward_kernel, rows_TG, grad.contiguous(), gradient)
        return gradient


def _launch(kernel: Any, rows_TG: Tensor, *others: Tensor) -> None:
    tokens, width = len(rows_TG), rows_TG.shape[1] // 2
    block = min(SMALL_BLOCK if tokens < FEW_TOKENS else BLOCK, triton.next_power_of_2(width))
    if tokens:
        kernel[(tokens, triton.cdiv(width, block))](rows_TG, *others, width, BLOCK=block, num_warps=WARPS)


@triton.jit
def _forward_kernel(gate_up_ptr, out_ptr, width, BLOCK: constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up_ptr += token * 2 * width
    gate = wide(gate_up_ptr + column, column < width)
    up = wide(gate_up_ptr + width + column, column < width)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * width + column, out, column < width)


@triton.jit
def _backward_kernel(gate_up_ptr, grad_ptr, gradient_ptr, width, BLOCK: constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up_ptr += token * 2 * width
    gradient_ptr += token * 2 * width
    gate = wide(gate_up_ptr + column, column < width)
    up = wide(gate_up_ptr + width + column, column < width)
    grad = wide(grad_ptr + token * width + column, column < width)
    share = tl.sigmoid(gate)
    of_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    of_up = grad * gate * share
    tl.store(gradient_ptr + column, of_gate, column < width)
    tl.store(gradient_ptr + width + column, of_up, column < width)
