"""Define how a fixed point is found in training and in evaluation: one frozen record, which is saved with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.fill import AsGiven, Only, check_fields, fill
from implicit_llm_contracts.config.registry import Registry
from implicit_llm_contracts.config.values import Count, Iterations, Share
from implicit_llm_contracts.errors import refuse_if

Mode = Literal["unrolled", "fixed_point"]
EvalMode = Literal["blockwise", "simultaneous", "sequential", "as_trained"]
AS_TRAINED: EvalMode = "as_trained"
Gradient = Literal["phantom", "series", "implicit"]

# The library registers the function of each name.
METHODS: Registry[Any] = Registry("solver method", dict.fromkeys(("plain", "damped", "anderson")))
STOPS: Registry[Any] = Registry("stopping rule", dict.fromkeys(("sequence", "token", "batch")))


@dataclass(frozen=True)
class SolverConfig(AsGiven):
    """The solver of one curriculum phase; assign another one to `model.solver` to change the phase.

    Training. `mode="unrolled"` differentiates through `num_unroll` iterations; the first is undamped, and `tau` damps
    the others. `mode="fixed_point"` runs up to `max_iter` iterations of `method` without gradient until the relative
    residual is below `tol`. Then it runs `phantom_steps` differentiated steps z <- (1-tau) z + tau f(z); the paper
    calls this (max_iter + phantom_steps). `stop` selects the residual that must be below tol before a sequence stops:
    the sequence's residual over all positions ("sequence"), the residual of each of its tokens ("token"), or the
    largest residual of all sequences ("batch", the released code's training criterion). With "batch" all sequences stop
    together.
    `block_len` solves blocks of this many tokens one after another; None solves the whole sequence at once.

    Evaluation. `eval_mode` "blockwise" solves blocks of `eval_block_len` tokens from the converged state before them.
    In "sequential" a block is one token, and in "simultaneous" it is the whole sequence. For every `method`, iterations
    are damped by `tau`, and one undamped f closes each block. A block evaluates f at most `eval_max_iter` times in all
    (None: four times `max_iter`), but at least twice. `eval_stop="token"` iterates a block until each of its
    tokens has converged. With "sequence", the residual over all tokens can hide that late ones have not. "batch" is
    the released code's evaluation criterion: the norm of f(z) - z over the whole batch, relative to that of z. The mode
    "as_trained" runs the training pass with its settings, from an empty state, and returns no state.

    Gradient, in a free training pass and in evaluation. "phantom" differentiates the `phantom_steps`. "series" runs the
    same steps, but differentiates f only at the last one: with M = (1-tau) + tau (df/dz)^T it sums M^m g over
    m < `phantom_steps`, and one backward pass propagates tau times this sum to the weights. This equals the phantom
    gradient if f is linear, or if z hardly changes any more. "series" stores the activations of one step. "implicit"
    runs one step f(z). Its backward pass solves u = g + (df/dz)^T u (implicit function theorem) by Anderson's method to
    the relative residual `gradient_tol`, with at most `eval_budget` products.

    Source: Schöne et al. 2025, section 2; phantom gradient of Geng et al. 2021, "series" is its Neumann form; blockwise
    evaluation is new here.
    """

    mode: Mode = "fixed_point"
    num_unroll: Iterations = 4
    method: str = "plain"
    max_iter: Iterations = 32
    tol: Share = 0.05
    stop: str = "sequence"
    phantom_steps: Iterations = 4
    tau: Annotated[float, Only(lambda value: 0 < value <= 1, "a number above 0, at most 1, which is undamped")] = 0.8
    block_len: Count | None = None
    eval_mode: EvalMode = "blockwise"
    eval_max_iter: Iterations | None = None
    eval_stop: str = "token"
    eval_block_len: Count = 32
    gradient: Gradient = "phantom"
    gradient_tol: Share = 1e-4

    def __post_init__(self) -> None:
        """Check all values. Raises: ConfigError or InvalidValue, which name the key and the allowed values."""
        for key, names in (("method", METHODS), ("stop", STOPS), ("eval_stop", STOPS)):
            value = getattr(self, key)
            refuse_if(not names.knows(value), f"{key}: {value!r} is none of {', '.join(names)}")
        check_fields(self, "solver")

    @classmethod
    def of(cls, solver: SolverConfig | Mapping[str, Any], before: SolverConfig | None = None) -> SolverConfig:
        """Return `solver` if it is a record, else a record of its settings; `before` or the defaults supply the rest.

        Raises: ConfigError.
        """
        if before is not None and isinstance(solver, Mapping):
            solver = before.to_dict() | dict(solver)
        return solver if isinstance(solver, SolverConfig) else fill(cls, solver, "solver")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, from which `of` restores the same record."""
        return asdict(self)

    @property
    def steps_after_solve(self) -> int:
        """The number of evaluations of f over the whole sequence after a solve, for the gradient of the pass."""
        return 1 if self.gradient == "implicit" else self.phantom_steps

    @property
    def eval_budget(self) -> int:
        """The maximum number of evaluations of f for one block in evaluation; with 1, two are still made.

        It includes the last, undamped evaluation, which gives the block's output and the state for the next block.
        """
        return 4 * self.max_iter if self.eval_max_iter is None else self.eval_max_iter

    def eval_width(self, length: int) -> int:
        """Return the block length (tokens) for `length` tokens in evaluation. Raises: KeyError for "as_trained"."""
        return {"simultaneous": length, "sequential": 1, "blockwise": self.eval_block_len}[self.eval_mode]


def solver_of(model: object) -> SolverConfig | None:
    """Return the attribute `solver` of a model; None for explicit models and models of other packages.

    Wrappers (peft, torch.compile) forward the attribute only on access, so isinstance would not find it.
    """
    return getattr(model, "solver", None)
