"""Estimate the spectral radius of df/dz at a fixed point; if it is below 1, the plain iteration contracts nearby.

f is causal, so the Jacobian over a sequence is block triangular, and its spectral radius is the largest of the radii of
single tokens. The closer it is to 1, the slower the iteration converges. Training measures it on a few tokens
(training/metrics.py).

Shapes: `B` batch, `L` length, `D` model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from implicit_llm.models.backbone import ImplicitModel
from implicit_llm.models.stack import StackInput


def spectral_radius(model: ImplicitModel, x: StackInput, z_BLD: Tensor, *, num_products: int = 60) -> Tensor:
    """Estimate the largest |eigenvalue| of df/dz at z for each sequence (B), by power iteration.

    The call does not change the global random state or the gradients of parameters.
    """
    z_BLD = z_BLD.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        fz_BLD = model.apply_stack(z_BLD, x)[0]

    def pull_back(v_BLD: Tensor) -> Tensor:
        return torch.autograd.grad(fz_BLD, z_BLD, v_BLD.to(fz_BLD.dtype), retain_graph=True)[0]

    return growth_per_product(pull_back, z_BLD, num_products)


def growth_per_product(product: Callable[[Tensor], Tensor], like_BX: Tensor, num_products: int) -> Tensor:
    """Return the geometric mean growth (B) per product in the second half of a power iteration from random vectors.

    A mean is needed because the growth of single steps oscillates if the leading eigenvalues are a complex pair.
    like_BX: an example of the vectors' shape, dtype and device.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    v_BX = torch.randn(like_BX.shape, generator=generator, dtype=like_BX.dtype).to(like_BX.device)
    growth = [v_BX.flatten(1).norm(dim=1)]
    for _ in range(num_products):
        norm_B = growth[-1].clamp_min(torch.finfo(v_BX.dtype).tiny)
        v_BX = product(v_BX / norm_B.view(-1, *(1,) * (v_BX.ndim - 1)))
        growth.append(v_BX.flatten(1).norm(dim=1))
    return torch.stack(growth[num_products // 2 + 1 :]).log().mean(0).exp()
