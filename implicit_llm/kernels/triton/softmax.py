"""Compute losses and gradients of a softmax over a large vocabulary, in place (imported only if Triton kernels run).

`linear_cross_entropy._losses` does the same in plain PyTorch. Shapes: `T` tokens, `U` vocabulary, rounded up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

BLOCK = 4096


def losses(
    logits_TU: Tensor, labels_T: Tensor, vocab: int, ignore_index: int, scale: float, wants_gradient: bool
) -> Tensor:
    """Return each token's loss in fp32; with `wants_gradient`, overwrite the logits with `scale` times its gradient."""
    found_T = torch.empty(len(logits_TU), dtype=torch.float32, device=logits_TU.device)
    _softmax_kernel[(len(logits_TU),)](
        logits_TU, labels_T, found_T, logits_TU.shape[1], vocab, ignore_index, scale, wants_gradient, BLOCK, num_warps=8
    )
    return found_T


@triton.jit
def _softmax_kernel(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    width,
    vocab,
    ignore_index,
    scale,
    WANTS_GRADIENT: constexpr,
    BLOCK: constexpr,
):
    """Process one token: one pass over its logits for the log of the sum of exponentials, a second for the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    label = tl.load(labels_ptr + row)
    is_counted = label != ignore_index
    target = tl.where(is_counted, label, 0)
    top = -float("inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(logit, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(logit - new_top), axis=0)
        top = new_top
    lse = top + tl.log(total)
    loss = lse - tl.load(logits_ptr + target).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(is_counted, loss, 0.0))
    if WANTS_GRADIENT:
        tl.debug_barrier()  # all threads must have loaded the label's logit before it is overwritten
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            logit = tl.load(logits_ptr + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
            gradient = (tl.exp(logit - lse) - tl.where(column == target, 1.0, 0.0)) * scale
            gradient = tl.where(is_counted & (column < vocab), gradient, 0.0)
            tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), column < width)
