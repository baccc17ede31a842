"""Compute relative residuals and decide when an iteration stops. A rule maps one iteration to its `Progress`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from implicit_llm_contracts.config.registry import InvalidEntry
from implicit_llm_contracts.config.solver import STOPS

EPS = 1e-8
RELEASED_EPS = 1e-6  # of the released code's evaluation criterion, which divides by the norm of z


@dataclass
class Progress:
    """A rule's judgement of one iteration: done and residual per sequence, residual per position.

    by_token: whether the solver chooses the iterate to store for each token separately: the one in which the worst
        residual of all tokens up to this token is lowest, so later tokens do not affect the choice. If False, it
        chooses one iterate for the whole sequence: the one with the lowest `residual_B`.
    keeps_last: whether the solver stores the newest iterate instead.
    """

    done_B: Tensor
    residual_B: Tensor
    residual_BL: Tensor
    by_token: bool = False
    keeps_last: bool = False

    @property
    def rank_BL(self) -> Tensor:
        """The quantity (B, L) that a token's stored iterate minimises; the last column is the sequence's residual."""
        if self.by_token:
            return self.residual_BL.cummax(1).values
        return self.residual_B[:, None].expand_as(self.residual_BL)


@dataclass(frozen=True, eq=False)  # torch.compile of PyTorch 2.7 hashes a rule before its fields are set
class Rule:
    """A stopping rule. Call it with z and f(z) (B, L, D), both zero at padding, to get the `Progress`."""

    stop: str
    tol: float
    judge: Callable[[Tensor, Tensor, float], Progress]

    def __call__(self, z_BLD: Tensor, fz_BLD: Tensor) -> Progress:
        return self.judge(z_BLD, fz_BLD, self.tol)


def _norms(t_BLD: Tensor) -> Tensor:
    """Return the norm of every position (B, L), in fp64 if t is fp64, else in fp32."""
    return torch.linalg.vector_norm(t_BLD if t_BLD.dtype == torch.float64 else t_BLD.float(), dim=-1)


def _relative(z_BLD: Tensor, fz_BLD: Tensor) -> tuple[Tensor, Tensor]:
    """Return ||f(z) - z|| / ||f(z)|| of each sequence (B) and of each position (B, L)."""
    change_BL, size_BL = _norms(fz_BLD - z_BLD), _norms(fz_BLD)
    by_token = change_BL / (size_BL + EPS)
    by_sequence = torch.linalg.vector_norm(change_BL, dim=1) / (torch.linalg.vector_norm(size_BL, dim=1) + EPS)
    return by_sequence, by_token


def _judge_sequences(z: Tensor, fz: Tensor, tol: float) -> Progress:
    """Stop each sequence by itself, when its residual over all positions is below tol."""
    by_sequence, by_token = _relative(z, fz)
    return Progress(by_sequence < tol, by_sequence, by_token)


def _judge_tokens(z: Tensor, fz: Tensor, tol: float) -> Progress:
    """Stop each sequence by itself, when the residual of each of its tokens is below tol."""
    _, by_token = _relative(z, fz)
    worst = by_token.amax(1)
    return Progress(worst < tol, worst, by_token, by_token=True)


def _judge_released_training(z: Tensor, fz: Tensor, tol: float) -> Progress:
    """Stop all sequences when the largest of their residuals is below tol: the released code's training criterion."""
    by_sequence, by_token = _relative(z, fz)
    done = (by_sequence.amax() < tol).expand(len(by_sequence))
    return Progress(done, by_sequence, by_token)


def _judge_released_evaluation(z: Tensor, fz: Tensor, tol: float) -> Progress:
    """Stop all sequences if ||f(z) - z|| / ||z|| < tol over the batch: the released code's evaluation criterion."""
    change_BL, size_BL = _norms(fz - z), _norms(z)
    ratio = torch.linalg.vector_norm(change_BL) / (torch.linalg.vector_norm(size_BL) + RELEASED_EPS)
    batch = len(z)
    return Progress(
        (ratio < tol).expand(batch), ratio.expand(batch), change_BL / (size_BL + RELEASED_EPS), keeps_last=True
    )


STOPS.update(sequence=_judge_sequences, token=_judge_tokens, batch=_judge_released_training)


def register_stop(name: str, judge: Callable[[Tensor, Tensor, float], Progress]) -> None:
    """Register a stopping rule: `judge(z, f(z), tol)` then decides for `SolverConfig(stop=name)` or `eval_stop=name`.

    Raises: NameTaken if `name` is a built-in rule; InvalidEntry if `judge` fails on a small example or returns no
        `Progress` with the right shapes and dtypes.
    """
    STOPS.refuse_builtin(name)
    what = f"stopping rule {name!r}: judge(z, f(z), tol)"
    z_BLD = torch.linspace(-1, 1, 24).view(3, 2, 4)
    try:
        found = judge(z_BLD, z_BLD / 2, 0.05)
    except Exception as error:  # a user's code may raise any error
        raise InvalidEntry(f"{what} ended in {type(error).__name__}: {error}") from error
    if not isinstance(found, Progress):
        raise InvalidEntry(f"{what} must return a Progress, not {type(found).__name__}")
    for field, shape in (("done_B", (3,)), ("residual_B", (3,)), ("residual_BL", (3, 2))):
        value = getattr(found, field)
        is_done = field == "done_B"
        if not isinstance(value, Tensor) or value.shape != shape or (value.dtype == torch.bool) != is_done:
            of = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            kind = "booleans" if is_done else "numbers"
            raise InvalidEntry(f"{what} must return {field} as a tensor of {kind} {shape} for z (3, 2, 4), not {of}")
    STOPS.add(name, judge)


def make_rule(stop: str, tol: float, *, is_training: bool) -> Rule:
    """Return the rule named by `SolverConfig.stop` (training) or `SolverConfig.eval_stop` (evaluation).

    The released code's criterion, "batch", differs between training and evaluation. Raises: UnknownName.
    """
    return Rule(stop, tol, _judge_released_evaluation if stop == "batch" and not is_training else STOPS[stop])
