"""Compute the next iterate by a plain, damped or Anderson update, which is called as `update(z, fz) -> z_next`.

An update may remember earlier pairs (z, f(z)); `select` drops those of finished sequences.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from implicit_llm_contracts.config.registry import InvalidEntry
from implicit_llm_contracts.config.solver import METHODS

ANDERSON_MEMORY = 5
ANDERSON_RIDGE = 1e-8


class Update(Protocol):
    """A function that computes the next iterate from z and f(z), all of shape (B, L, D)."""

    def __call__(self, z_BLD: Tensor, fz_BLD: Tensor) -> Tensor: ...

    def select(self, index_B: Tensor) -> None:
        """Keep only what the update remembers of the sequences `index_B`; an update without memory does nothing."""
        return


class Plain(Update):
    """The undamped update z <- f(z)."""

    def __call__(self, z_BLD: Tensor, fz_BLD: Tensor) -> Tensor:
        return fz_BLD


class Damped(Update):
    """The damped update z <- (1 - tau) z + tau f(z)."""

    def __init__(self, tau: float) -> None:
        self.tau = tau

    def __call__(self, z_BLD: Tensor, fz_BLD: Tensor) -> Tensor:
        return torch.lerp(z_BLD, fz_BLD, self.tau)


class Anderson:
    """The Anderson update, which mixes the last iterates by a linear model of the residual (type II, memory 5).

    With residuals g_i = f(z_i) - z_i, it minimises ||sum a_i g_i|| subject to sum a_i = 1 and returns
    z_next = sum a_i (z_i + tau g_i). A token's weights a_i minimise the residual of all tokens up to this token, so
    later tokens do not change the weights. Without `is_causal`, all tokens share the weights of the whole sequence. The
    linear systems for the weights are solved in fp32 (in fp64 if the input is fp64) with a relative ridge.
    Source: Walker and Ni 2011; one set of weights for each token is new here.
    """

    def __init__(self, tau: float, *, is_causal: bool = True) -> None:
        self.tau, self.is_causal = tau, is_causal
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, z_BLD: Tensor, fz_BLD: Tensor) -> Tensor:
        self.pairs = [*self.pairs, (z_BLD, fz_BLD - z_BLD)][-ANDERSON_MEMORY:]
        z_BLMD = torch.stack([z for z, _ in self.pairs], dim=2)
        g_BLMD = torch.stack([g for _, g in self.pairs], dim=2)
        wide_BLMD = g_BLMD if g_BLMD.dtype == torch.float64 else g_BLMD.float()
        gram_BLMM = wide_BLMD @ wide_BLMD.mT
        gram_BLMM = gram_BLMM.cumsum(1) if self.is_causal else gram_BLMM.sum(1, keepdim=True)
        # Dividing by the largest squared residual makes the ridge relative. If all residuals are 0, z does not change.
        largest_BL = gram_BLMM.diagonal(dim1=2, dim2=3).amax(2).clamp_min(torch.finfo(gram_BLMM.dtype).tiny)
        gram_BLMM = gram_BLMM / largest_BL[..., None, None]
        gram_BLMM.diagonal(dim1=2, dim2=3).add_(ANDERSON_RIDGE)
        weights_BLM = torch.linalg.solve_ex(gram_BLMM, torch.ones_like(gram_BLMM[..., 0]))[0]
        weights_BLM = weights_BLM / weights_BLM.sum(2, keepdim=True)
        return (weights_BLM.to(z_BLD.dtype)[..., None] * (z_BLMD + self.tau * g_BLMD)).sum(2)

    def select(self, index_B: Tensor) -> None:
        self.pairs = [(z[index_B], g[index_B]) for z, g in self.pairs]


METHODS.update(plain=lambda tau: Plain(), damped=Damped, anderson=Anderson)


def register_method(name: str, make: Callable[[float], Update]) -> None:
    """Register a solver method: `SolverConfig(method=name)` then calls `make(tau)` for each block of a training pass.

    Raises: NameTaken if `name` is a built-in method; InvalidEntry if the update cannot iterate or drop sequences.
    """
    METHODS.refuse_builtin(name)
    _try_out(f"solver method {name!r}", make)
    METHODS.add(name, make)


def _try_out(what: str, make: Callable[[float], Update]) -> None:
    """Run an iteration with three sequences, drop one sequence, and run another. Raises: InvalidEntry."""
    z_BLD = torch.linspace(-1, 1, 24).view(3, 2, 4)
    index_B = torch.tensor([0, 2], device=z_BLD.device)
    try:
        update = make(0.5)
        for name in ("__call__", "select"):
            if not hasattr(update, name):
                raise InvalidEntry(f"{what}: what make(tau) returns has no {name}; see docs/extending.md")
        for given_BLD in (z_BLD, z_BLD[index_B]):
            if len(given_BLD) < len(z_BLD):
                update.select(index_B)
            found = update(given_BLD, given_BLD / 2)
            if not isinstance(found, Tensor) or found.shape != given_BLD.shape:
                of = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise InvalidEntry(f"{what}: update(z, f(z)) must return the next z {tuple(given_BLD.shape)}, not {of}")
    except InvalidEntry:
        raise
    except Exception as error:  # a user's code may raise any error
        raise InvalidEntry(
            f"{what}: make(tau) and two iterations, the second for sequences 0 and 2 of three, ended in "
            f"{type(error).__name__}: {error}"
        ) from error
