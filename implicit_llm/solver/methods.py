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
    """Mix the last iterates of each sequence so that the linear model of the residual vanishes (type II, memory 5).

    With residuals g_i = f(z_i) - z_i, minimise ||sum a_i g_i|| subject to sum a_i = 1;
    z_next = sum a_i (z_i + tau g_i). The small system is solved per sequence in fp32 (fp64 input: fp64) with a relative
    ridge.
    Source: Walker and Ni 2011.
    """

    def __init__(self, tau: float) -> None:
        self.tau = tau
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, z_BLD: Tensor, fz_BLD: Tensor) -> Tensor:
        self.pairs = [*self.pairs, (z_BLD, fz_BLD - z_BLD)][-ANDERSON_MEMORY:]
        z_MBLD = torch.stack([z for z, _ in self.pairs])
        g_MBLD = torch.stack([g for _, g in self.pairs])
        g_BMX = g_MBLD.flatten(2).transpose(0, 1)
        g_BMX = g_BMX if g_BMX.dtype == torch.float64 else g_BMX.float()
        gram_BMM = g_BMX @ g_BMX.transpose(1, 2)
        ridge_B = ANDERSON_RIDGE * gram_BMM.diagonal(dim1=1, dim2=2).amax(1) + torch.finfo(gram_BMM.dtype).tiny
        gram_BMM = gram_BMM + torch.diag_embed(ridge_B[:, None].expand(-1, gram_BMM.shape[1]))
        weights_BM = torch.linalg.solve_ex(gram_BMM, torch.ones_like(gram_BMM[..., 0]))[0]
        weights_BM = weights_BM / weights_BM.sum(1, keepdim=True)
        weights_MB = weights_BM.t().to(z_BLD.dtype)[..., None, None]
        return (weights_MB * (z_MBLD + self.tau * g_MBLD)).sum(0)

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
