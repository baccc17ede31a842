"""Compute the cross entropy of a linear head and its gradient in slices of tokens, without storing all logits.

For 16,384 tokens and a vocabulary of 50,000 the fp32 logits alone are 3.3 GB, and moving them through memory takes
longer than the products. The vocabulary is rounded up to a multiple of 64, because cuBLAS runs the published size
50277 at an eighth of its speed.
Shapes: `T` tokens, `D` width, `V` vocabulary, `U` vocabulary rounded up.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_llm.kernels import selection

SLICE_TOKENS = 4096  # 0.8 GB of fp32 logits with a vocabulary of 50,000
WIDTH_MULTIPLE = 64
# Small probabilities round to zero in fp16, so gradients are multiplied by this factor and scaled back in fp32.
FP16_SCALE = 1024.0


def linear_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the cross entropy in nats of `hidden @ weight.T`, summed over tokens, in fp32 (fp64 for fp64 products).

    Products are computed in autocast's dtype if autocast is on and hidden is not fp64, otherwise in hidden's dtype. The
    softmax is computed in the dtype of the result. Tokens with label `ignore_index` are skipped.
    The result can be differentiated once, with respect to hidden and weight. The `reference` kernels store all logits,
    and their result can be differentiated any number of times.
    """
    device = hidden_TD.device.type
    if torch.is_autocast_enabled(device) and hidden_TD.dtype != torch.float64:  # autocast does not cast fp64 either
        hidden_TD = hidden_TD.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        if selection.is_reference():
            logits_TV = F.linear(hidden_TD, weight_VD.to(hidden_TD.dtype))
            wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
            return F.cross_entropy(wide_TV, labels_T, ignore_index=ignore_index, reduction="sum")
        return _LinearCrossEntropy.apply(hidden_TD, weight_VD, labels_T, ignore_index)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        padded_UD = F.pad(weight.to(hidden.dtype), (0, 0, 0, -len(weight) % WIDTH_MULTIPLE))
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        scale = FP16_SCALE if hidden.dtype == torch.float16 else 1.0
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros(padded_UD.shape, dtype=wide, device=weight.device) if wants_weight else None
        losses_T = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        wants_gradient = wants_hidden or wants_weight
        for start in range(0, len(hidden), SLICE_TOKENS):
            rows = slice(start, start + SLICE_TOKENS)
            logits_TU = hidden[rows] @ padded_UD.t()
            losses_T[rows], gradient_TU = _losses(
                logits_TU, labels[rows], len(weight), ignore_index, scale, wants_gradient
            )
            if d_hidden is not None:
                d_hidden[rows] = gradient_TU @ padded_UD
            if d_weight is not None:
                d_weight += gradient_TU.t() @ hidden[rows]
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight[: len(weight)])
        ctx.scale, ctx.weight_dtype = scale, weight.dtype
        return losses_T.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        grad = grad / ctx.scale
        return (
            # For a product with the 0-d `grad`, a GPU would first round `grad` to fp16, where a small one becomes 0.
            None if d_hidden is None else (d_hidden.to(grad.dtype) * grad).to(d_hidden.dtype),
            None if d_weight is None else (d_weight * grad).to(ctx.weight_dtype),
            None,
            None,
        )


def _losses(
    logits_TU: Tensor, labels_T: Tensor, vocab: int, ignore_index: int, scale: float, wants_gradient: bool
) -> tuple[Tensor, Any]:
    """Return each token's loss in fp32 or wider, and `scale` times its gradient (T, U) in the logits' dtype.

    Without `wants_gradient`, the second value has no meaning. The call may overwrite the logits.
    """
    if selection.softmax_runs_on_triton(logits_TU):
        from implicit_llm.kernels.triton import softmax as triton_softmax

        return triton_softmax.losses(logits_TU, labels_T, vocab, ignore_index, scale, wants_gradient), logits_TU
    is_counted_T = labels_T != ignore_index
    target_T1 = labels_T.masked_fill(~is_counted_T, 0).unsqueeze(1)
    wide_TU = logits_TU.to(torch.promote_types(logits_TU.dtype, torch.float32))
    wide_TU[:, vocab:] = -torch.inf
    lse_T1 = wide_TU.logsumexp(1, keepdim=True)
    losses_T = (lse_T1 - wide_TU.gather(1, target_T1)).squeeze(1).masked_fill(~is_counted_T, 0)
    if not wants_gradient:
        return losses_T, None
    gradient_TU = wide_TU.sub_(lse_T1).exp_()
    gradient_TU.scatter_add_(1, target_T1, torch.full_like(lse_T1, -1.0))
    gradient_TU.mul_(scale).masked_fill_(~is_counted_T.unsqueeze(1), 0)
    return losses_T, gradient_TU.to(logits_TU.dtype)
