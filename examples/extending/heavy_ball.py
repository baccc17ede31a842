"""A solver method and a stopping rule: iterations with momentum, until nearly all tokens have converged.

Shapes: `B` batch, `L` length, `D` model.
"""

import torch
from torch import Tensor

from implicit_llm import Progress, register_method, register_stop

PLUGIN = {"methods": ["heavy_ball"], "stops": ["most_tokens"]}
MOMENTUM = 0.3
SHARE = 0.95


class HeavyBall:
    """z <- z + tau (f(z) - z) + momentum (z - z before)."""

    def __init__(self, tau: float) -> None:
        self.tau = tau
        self.step_BLD: Tensor | None = None

    def __call__(self, z_BLD: Tensor, fz_BLD: Tensor) -> Tensor:
        step_BLD = self.tau * (fz_BLD - z_BLD)
        if self.step_BLD is not None:
            step_BLD = step_BLD + MOMENTUM * self.step_BLD
        self.step_BLD = step_BLD
        return z_BLD + step_BLD

    def select(self, index_B: Tensor) -> None:
        """Go on with these sequences, the others are done."""
        if self.step_BLD is not None:
            self.step_BLD = self.step_BLD[index_B]


def most_tokens(z_BLD: Tensor, fz_BLD: Tensor, tol: float) -> Progress:
    """A sequence is done when the residual of 95 % of its tokens is below `tol`."""
    size_BL = torch.linalg.vector_norm(fz_BLD.float(), dim=-1) + 1e-8
    residual_BL = torch.linalg.vector_norm((fz_BLD - z_BLD).float(), dim=-1) / size_BL
    residual_B = residual_BL.quantile(SHARE, dim=1)
    return Progress(residual_B < tol, residual_B, residual_BL)


register_method("heavy_ball", HeavyBall)
register_stop("most_tokens", most_tokens)
