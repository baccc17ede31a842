"""The spectral radius of df/dz at a fixed point: below 1, the plain iteration contracts near it.

f is causal, so the Jacobian over a sequence is block triangular: its spectral radius is the largest over the tokens.
Training measures it on a few tokens (training/metrics.py); the closer to 1, the slower the iteration.

Shapes: `B` batch, `L` length, `D` model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from implicit_llm.models.backbone import ImplicitModel
from implicit_llm.models.stack import StackInput


def spectral_radius(model: ImplicitModel, x: StackInput, z_BLD: Tensor, *, num_products: int = 60) -> Tensor:
    """Largest |eigenvalue| of df/dz at z for every sequence (B), by power iteration on vector-Jacobian products.

    Takes nothing from the random state and leaves no gradient in any parameter.
    """
    z_BLD = z_BLD.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        fz_BLD = model.apply_stack(z_BLD, x)[0]

    def pull_back(v_BLD: Tensor) -> Tensor:
        return torch.autograd.grad(fz_BLD, z_BLD, v_BLD.to(fz_BLD.dtype), retain_graph=True)[0]

    return growth_per_product(pull_back, z_BLD, num_products)


def growth_per_product(product: Callable[[Tensor], Tensor], like_BX: Tensor, num_products: int) -> Tensor:
    """Power iteration from random vectors like these: growth (B) in the geometric mean over the second half.

    A complex leading pair makes single steps swing.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    v_BX = torch.randn(like_BX.shape, generator=generator, dtype=like_BX.dtype).to(like_BX.device)
    growth = [v_BX.flatten(1).norm(dim=1)]
    for _ in range(num_products):
        norm_B = growth[-1].clamp_min(torch.finfo(v_BX.dtype).tiny)
        v_BX = product(v_BX / norm_B.view(-1, *(1,) * (v_BX.ndim - 1)))
        growth.append(v_BX.flatten(1).norm(dim=1))
    return torch.stack(growth[num_products // 2 + 1 :]).log().mean(0).exp()
