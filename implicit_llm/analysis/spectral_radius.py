"""The spectral radius of df/dz at a fixed point: below 1, the plain iteration contracts near it.

f is causal, so the Jacobian over a sequence is block triangular: its spectral radius is the largest over the tokens.
Training measures it together with the mode gap, on a few tokens; the closer to 1, the slower the iteration.

Shapes: `B` batch, `L` length, `D` model.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from implicit_llm.models.backbone import ImplicitModel
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.models.stack import StackInput


def spectral_radius(model: ImplicitModel, x: StackInput, z_BLD: Tensor, *, num_products: int = 60) -> Tensor:
    """Largest |eigenvalue| of df/dz at z for every sequence (B), by power iteration on vector-Jacobian products.

    A complex leading pair makes single steps swing, so the estimate is the geometric mean growth over the second half
    of the products. Takes nothing from the random state and leaves no gradient in any parameter.
    """
    z_BLD = z_BLD.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        fz_BLD = model.apply_stack(z_BLD, x)[0]
    generator = torch.Generator(device="cpu").manual_seed(0)
    v_BLD = torch.randn(z_BLD.shape, generator=generator, dtype=z_BLD.dtype).to(z_BLD.device)
    v_BLD = v_BLD / v_BLD.flatten(1).norm(dim=1)[:, None, None]
    growth = []
    for index in range(num_products):
        is_last = index == num_products - 1
        (v_BLD,) = torch.autograd.grad(fz_BLD, z_BLD, v_BLD.to(fz_BLD.dtype), retain_graph=not is_last)
        norm_B = v_BLD.flatten(1).norm(dim=1)
        v_BLD = v_BLD / norm_B.clamp_min(torch.finfo(norm_B.dtype).tiny)[:, None, None]
        growth.append(norm_B)
    return torch.stack(growth[num_products // 2 :]).log().mean(0).exp()


# The fixed point takes up to four times max_iter iterations for every block of tokens, and the products as many
# backward passes; 40 products are within a few percent of the limit on trained models.
SEQUENCES, POSITIONS, PRODUCTS = 4, 128, 40


@torch.no_grad()
def mean_spectral_radius(
    model: ImplicitForCausalLM, inputs: dict[str, Any], context: AbstractContextManager[Any]
) -> Tensor:
    """Spectral radius of df/dz at the fixed point that evaluation finds, as a mean over sequences; not yet read.

    Of the first POSITIONS of the first SEQUENCES of a micro-batch: for each sequence, the largest over its tokens.
    Takes nothing from the random state, and leaves gradients and training mode as they were. NaN where the fixed point
    is not finite.
    """
    input_ids = inputs["input_ids"][:SEQUENCES, :POSITIONS]
    base = model.base
    model.eval()
    try:
        with context:
            z_BLD = base(input_ids, use_cache=False).last_hidden_state
            x = base.stack_input(base.get_input_embeddings()(input_ids), None, None, None)
            return spectral_radius(base, x, z_BLD, num_products=PRODUCTS).float().mean()
    except FloatingPointError:
        return torch.full((), math.nan, device=input_ids.device)
    finally:
        model.train()
