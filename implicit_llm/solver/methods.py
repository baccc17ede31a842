"""How the next iterate is made from the last one: plain, damped, Anderson. Each is `update(z, fz) -> z_next`.

An update may remember earlier pairs; `select` keeps the memory of the sequences that are still being solved.
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
    """Makes the next iterate; shapes (B, L, D)."""

    def __call__(self, z_BLD: Tensor, fz_BLD: Tensor) -> Tensor: ...

    def select(self, index_B: Tensor) -> None:
        """Keep what is remembered of these sequences; by default nothing is."""
        return


class Plain(Update):
    """z <- f(z)."""

    def __call__(self, z_BLD: Tensor, fz_BLD: Tensor) -> Tensor:
        return fz_BLD


class Damped(Update):
    """z <- (1 - tau) z + tau f(z)."""

    def __init__(self, tau: float) -> None:
        self.tau = tau

    def __call__(self, z_BLD: Tensor, fz_BLD: Tensor) -> Tensor:
        return torch.lerp(z_BLD, fz_BLD, self.tau)


class Anderson:
    """Mix the last iterates so that the linear model of the residual vanishes (type II, memory 5).

    With residuals g_i = f(z_i) - z_i, minimise ||sum a_i g_i|| subject to sum a_i = 1;
    z_next = sum a_i (z_i + tau g_i). The weights of a token minimise the residual of the tokens up to it, so later
    tokens do not change it; without `is_causal` all tokens share the weights of the whole sequence. The small systems
    are solved in fp32 (fp64 input: fp64) with a relative ridge.
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
        # Relative to the largest residual, so that tokens whose residuals are all zero stay where they are.
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
    """Make `SolverConfig(method=name)` find fixed points by the update that `make(tau)` returns, one for each block.

    Raises: NameTaken for a built-in method; InvalidEntry for one that cannot iterate, or drop sequences.
    """
    METHODS.refuse_builtin(name)
    _try_out(f"solver method {name!r}", make)
    METHODS.add(name, make)


def _try_out(what: str, make: Callable[[float], Update]) -> None:
    """Run two iterations, the second without one of three sequences. Raises: InvalidEntry."""
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
    except Exception as error:  # of a user's code
        raise InvalidEntry(
            f"{what}: make(tau) and two iterations, the second for sequences 0 and 2 of three, ended in "
            f"{type(error).__name__}: {error}"
        ) from error


def make_update(method: str, tau: float) -> Update:
    """The update named by `SolverConfig.method`; `tau` damps "damped" and mixes "anderson". Raises: UnknownName."""
    return METHODS[method](tau)
