"""The spectral radius of df/dz at a fixed point: below 1, the plain iteration contracts near it.

f is causal, so the Jacobian over a sequence is block triangular: its spectral radius is the largest over the tokens.
Training measures it on a few tokens (training/mode_gap.py); the closer to 1, the slower the iteration.

Shapes: `B` batch, `L` length, `D` model.
"""

import torch
from torch import Tensor

from implicit_llm.models.backbone import ImplicitModel
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
