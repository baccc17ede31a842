"""How a fixed point is found in training and in evaluation, as one frozen record that is saved with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Protocol

from implicit_llm_contracts.config.fill import AsGiven, Only, check_fields, fill
from implicit_llm_contracts.config.registry import Registry
from implicit_llm_contracts.config.values import Count, Iterations, Share
from implicit_llm_contracts.errors import refuse_if

Mode = Literal["unrolled", "fixed_point"]
EvalMode = Literal["blockwise", "simultaneous", "sequential", "as_trained"]
AS_TRAINED: EvalMode = "as_trained"
Gradient = Literal["phantom", "series", "implicit"]

# The library puts the functions behind the names.
METHODS: Registry[Any] = Registry("solver method", dict.fromkeys(("plain", "damped", "anderson")))
STOPS: Registry[Any] = Registry("stopping rule", dict.fromkeys(("sequence", "token", "batch")))


@dataclass(frozen=True)
class SolverConfig(AsGiven):
    """Settings of one curriculum phase; assign a new one to `model.solver` to change the phase.

    Training. `mode="unrolled"` differentiates through `num_unroll` iterations (the first undamped, the others damped by
    `tau`). `mode="fixed_point"` runs up to `max_iter` iterations of `method` without gradient until the relative
    residual is below `tol`, then `phantom_steps` differentiated steps z <- (1-tau) z + tau f(z): the paper's
    (max_iter + phantom_steps). `stop` says what must be below tol before a sequence stops: its residual over all
    positions ("sequence"), the residual of each of its tokens ("token"), or the largest residual of all sequences, none
    leaving early ("batch", the released code's criterion). `block_len` solves blocks of that many tokens one after
    another (None: the whole sequence at once).

    Evaluation. `eval_mode` "blockwise" solves blocks of `eval_block_len` tokens from the converged state before them,
    "sequential" is a block of one token, "simultaneous" a block of the whole sequence. Iterations are damped by `tau`
    whatever `method` is, at most `eval_max_iter` per block (None: four times `max_iter`), and one undamped f closes
    each block. `eval_stop="token"` iterates a block until each of its tokens has converged; a residual over all of
    them ("sequence") hides late tokens that have not. "batch" is the released code's criterion: one norm over the whole
    batch, relative to the iterate before f. "as_trained" looks for no fixed point: it is the training pass, with the
    training settings, from an empty state, and leaves no state to carry on.

    Gradient, of a free training pass and of evaluation: "phantom" differentiates the `phantom_steps`. "series" takes
    the same steps, but differentiates f only at the last of them: with M = (1-tau) + tau (df/dz)^T it sums M^m g over
    m < `phantom_steps`, and one backward pass takes tau times that sum to the weights. For a linear f that is the
    phantom gradient; for others they agree where z hardly moves any more. It keeps the activations of one step.
    "implicit" takes one step f(z) and solves u = g + (df/dz)^T u for its backward pass (implicit function theorem) by
    Anderson's method to the relative residual `gradient_tol`, in at most as many products as evaluation has iterations.

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
        """Raises: ConfigError or InvalidValue, which name the key and what is allowed."""
        for key, names in (("method", METHODS), ("stop", STOPS), ("eval_stop", STOPS)):
            value = getattr(self, key)
            refuse_if(not names.knows(value), f"{key}: {value!r} is none of {', '.join(names)}")
        check_fields(self, "solver")

    @classmethod
    def of(cls, solver: SolverConfig | Mapping[str, Any], before: SolverConfig | None = None) -> SolverConfig:
        """The record itself, or one with these settings and those of `before`, or defaults, for the others.

        Raises: ConfigError.
        """
        if before is not None and isinstance(solver, Mapping):
            solver = before.to_dict() | dict(solver)
        return solver if isinstance(solver, SolverConfig) else fill(cls, solver, "solver")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `of` gives the same record back."""
        return asdict(self)

    @property
    def steps_after_solve(self) -> int:
        """Evaluations of f after a solve, over the whole sequence, for the gradient of the pass."""
        return 1 if self.gradient == "implicit" else self.phantom_steps

    @property
    def eval_budget(self) -> int:
        """Iterations allowed for one block in evaluation."""
        return 4 * self.max_iter if self.eval_max_iter is None else self.eval_max_iter

    def eval_width(self, length: int) -> int:
        """Tokens of a block in evaluation, of sequences of `length` tokens."""
        return {"simultaneous": length, "sequential": 1, "blockwise": self.eval_block_len}[self.eval_mode]


class HasSolver(Protocol):
    """A model that finds its fixed point as `solver` says, in training and in evaluation; None: an explicit model.

    Assign another solver to change the phase or the mode.
    """

    solver: SolverConfig | None


def solver_of(model: object) -> SolverConfig | None:
    """The solver of a model that `HasSolver`; None for explicit models and those of other packages.

    Wrappers (peft, torch.compile) pass the attribute on only when asked for it: isinstance would not find it.
    """
    return getattr(model, "solver", None)
