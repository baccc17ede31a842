"""What an evaluation is: every field here changes the numbers (identity); batch size and device are runtime."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.fill import AsGiven, Only
from implicit_llm_contracts.config.solver import AS_TRAINED, STOPS, EvalMode, SolverConfig
from implicit_llm_contracts.config.values import DISTINCT, SOME, BatchSize, Count, Iterations, Names, Number, Share
from implicit_llm_contracts.errors import UserError, refuse_if
from implicit_llm_contracts.hints import nearest

PARALLEL = "parallel"  # the one mode of an explicit model
SEQUENTIAL = "sequential"
COSTS = ("f_evaluations_per_token", "unconverged_share")  # numbers that a record of each kind may have
# A mode by hand: simultaneous, with the released code's criterion, one norm over the whole batch.
RELEASED_CRITERION = "released-criterion"

# The rule "batch" couples the sequences of a batch: its batch size changes the numbers and is not the machine's choice.
COUPLED_BATCH_SIZE = 64
# Draws behind the standard error of a perplexity; the harness's own number.
BOOTSTRAP_DRAWS = 100_000
AtLeastTwo = Annotated[int, Only(lambda value: value >= 2, "an integer of at least 2")]
EXAMPLE = "{name: blockwise-8-token, eval_mode: blockwise, eval_block_len: 8, eval_stop: token}"


class EvaluateConfigError(UserError):
    """An evaluation that cannot be run as configured."""


@dataclass(frozen=True)
class SweptSetting:
    """The mode `base` with its field `key` set to `value`."""

    base: str
    key: str
    value: int | float


@dataclass(frozen=True)
class ModeConfig(AsGiven):
    """One way of solving an implicit model; None keeps what the model was saved with.

    "as_trained" is the pass of the phase the model was saved in, with all of its settings.
    `eval_tol` is relative, in (0, 1); `eval_max_iter` counts f-evaluations; `max_samples` takes the first samples of a
    data set only; `batch_size` (sequences) is fixed here for stopping rules that couple the sequences of a batch, and
    is the machine's choice otherwise.
    """

    name: str
    eval_mode: EvalMode
    eval_max_iter: Iterations | None = None
    eval_tol: Share | None = None
    eval_stop: str | None = None
    eval_block_len: Count | None = None
    max_samples: Count | None = None
    batch_size: BatchSize | None = None
    sweep: SweptSetting | None = None  # set by `swept_modes`

    def __post_init__(self) -> None:
        rule = self.eval_stop
        if rule is not None:
            refuse_if(not STOPS.knows(rule), f"eval_stop: there is no {rule!r}; {nearest(rule, STOPS)}")
        if self.eval_mode == AS_TRAINED:
            for key in ("eval_max_iter", "eval_tol", "eval_stop", "eval_block_len"):
                refuse_if(
                    getattr(self, key) is not None,
                    f"{key}: the mode as_trained takes all settings from training; remove it",
                )

    def coupled_batch_size(self, trained: SolverConfig | None) -> int | None:
        """The batch size that belongs to the result, None when the sequences do not influence each other.

        `trained` is the solver the model was saved with, which may have the rule "batch" too; None: an explicit model.
        """
        if self.batch_size is not None or trained is None:
            return self.batch_size
        stop = trained.stop if self.eval_mode == AS_TRAINED else self.solver(trained).eval_stop
        return COUPLED_BATCH_SIZE if stop == "batch" else None

    def solver(self, trained: SolverConfig) -> SolverConfig:
        """The solver the model was saved with, with this mode's evaluation fields."""
        changed: dict[str, Any] = {
            "eval_mode": self.eval_mode,
            "eval_max_iter": self.eval_max_iter,
            "eval_stop": self.eval_stop,
            "eval_block_len": self.eval_block_len,
            "tol": self.eval_tol,
        }
        return dataclasses.replace(trained, **{key: value for key, value in changed.items() if value is not None})

    def record(self, trained: SolverConfig | None) -> dict[str, Any]:
        """What a record of metrics.json says of the mode: the settings that were used, None for an explicit model.

        The mode "as_trained" has the settings of the phase. The record of an explicit model also says that it belongs
        to a sweep, although nothing is swept: otherwise the report would show the model twice.
        """
        keys = ("eval_mode", "eval_stop", "eval_block_len")
        unknown = dict.fromkeys((*keys, "eval_max_iter", "eval_tol", "sweep"))
        if trained is None:
            return unknown | {"sweep": None if self.sweep is None else {"base": PARALLEL, "key": None, "value": None}}
        if self.eval_mode == AS_TRAINED:
            return unknown | {"eval_mode": AS_TRAINED}
        used = self.solver(trained)
        sweep = None if self.sweep is None else dataclasses.asdict(self.sweep)
        budget = {"eval_max_iter": used.eval_budget, "eval_tol": used.tol}
        return {key: getattr(used, key) for key in keys} | budget | {"sweep": sweep}


@dataclass(frozen=True)
class SweepConfig(AsGiven):
    """Values of a mode's fields, for test-time compute."""

    eval_max_iter: tuple[Count, ...] = ()
    eval_tol: tuple[Share, ...] = ()


def modes_of(modes: tuple[ModeConfig, ...], sweep: SweepConfig | None, where: str) -> tuple[ModeConfig, ...]:
    """The modes that are evaluated: those of the config, or those of its sweep. Raises: EvaluateConfigError."""
    unswept = next((mode.name for mode in modes if mode.eval_mode == AS_TRAINED), None)
    if sweep is not None and unswept is not None:
        raise EvaluateConfigError(
            f"{where}.sweep: mode {unswept!r} is as_trained: give it an evaluation without a sweep"
        )
    swept = swept_modes(modes, sweep)
    names = [PARALLEL, *(mode.name for mode in (*modes, *(swept if sweep else ())))]
    for name in names:
        if names.count(name) > 1:
            raise EvaluateConfigError(f"{where}.modes: mode name {name!r} is taken; give every mode a name of its own")
    if not swept:
        key = "modes" if sweep is None else "sweep"
        raise EvaluateConfigError(f"{where}.{key}: no mode given; name at least one, for example {EXAMPLE}")
    return swept


def swept_modes(modes: tuple[ModeConfig, ...], sweep: SweepConfig | None) -> tuple[ModeConfig, ...]:
    """Return each mode once for each value of each swept field, or all modes as they are without a sweep."""
    if sweep is None:
        return modes
    return tuple(
        dataclasses.replace(
            mode, name=f"{mode.name}@{key}={value:g}", sweep=SweptSetting(mode.name, key, value), **{key: value}
        )
        for mode in modes
        for key, values in dataclasses.asdict(sweep).items()
        for value in values
    )


# From the one nearest to generation; of a pair of modes the nearer one is the reference.
_NEARNESS = (SEQUENTIAL, "blockwise", "simultaneous", AS_TRAINED)


def pairs_of(modes: Sequence[ModeConfig], *, is_implicit: bool) -> list[tuple[str, str]]:
    """Every two modes, the reference second: the one nearer to generation, of equals the one named first.

    In a sweep, both modes have the same value of the same setting.
    """
    if not is_implicit:
        return [(PARALLEL, SEQUENTIAL)]
    pairs = itertools.combinations(sorted(modes, key=lambda mode: _NEARNESS.index(mode.eval_mode)), 2)
    return [(mode.name, other.name) for other, mode in pairs if _swept(mode) == _swept(other)]


def _swept(mode: ModeConfig) -> tuple[str, float] | None:
    return None if mode.sweep is None else (mode.sweep.key, mode.sweep.value)


@dataclass(frozen=True)
class InModes(AsGiven):
    """A kind of evaluation in which implicit models are evaluated in `modes`, explicit ones in the mode "parallel"."""

    kind: str
    modes: tuple[ModeConfig, ...]
    sweep: SweepConfig | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class EvaluateConfig(InModes):
    """Word problems.

    `lengths` takes the test sets of these lengths (tokens) only; None takes all. precision: as for perplexity; in bf16
    long sequences in short blocks take a fraction of the time on a GPU.
    """

    kind: Literal["word_problem"]
    lengths: tuple[Count, ...] | None = None
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class CatbabiEvaluation(InModes):
    """Questions of CatbAbI, read by each of `protocols` (catbabi.py).

    `carried_max_tokens` takes the first windows only in the protocol carried, which reads one window at a time.
    """

    kind: Literal["catbabi"]
    protocols: Annotated[tuple[Literal["windowed", "carried"], ...], DISTINCT] = ("windowed",)
    carried_max_tokens: Count | None = None

    def __post_init__(self) -> None:
        is_lost = "carried" in self.protocols and any(mode.eval_mode == AS_TRAINED for mode in self.modes)
        refuse_if(is_lost, "protocols: carried needs a state, which the mode as_trained does not leave; use windowed")


@dataclass(frozen=True)
class PerplexityConfig(InModes):
    """Perplexity of language models on the test set, cut into rows of each of `lengths` (tokens); None takes
    the rows as the data set has them.

    `max_tokens` takes the first rows only, at least one a length; None takes all. `precision` bf16 runs the model under
    autocast, which a large model on a GPU needs to finish in time; losses are fp32.
    """

    kind: Literal["perplexity"]
    lengths: Annotated[tuple[AtLeastTwo, ...], DISTINCT] | None = None
    max_tokens: Count | None = None
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class DualityConfig(InModes):
    """Whether all modes give the same answers to the same tokens, and how fast the simultaneous iteration converges.

    lengths: tokens of a row; None takes the rows as the data set has them, the only choice for word problems and
    CatbAbI. max_tokens: the first rows only, at least one a length; the paper compares 3 million. A mode's max_samples
    holds for all modes, which are compared on the same rows. trace_tokens: of these, how many the convergence is
    followed on. precision: as for perplexity.
    """

    kind: Literal["duality"]
    lengths: Annotated[tuple[Count, ...], SOME] | None = None
    max_tokens: Count | None = None
    trace_tokens: Count = 16384
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class JacobianConfig(AsGiven):
    """The tokens of the test rows to measure, and the layer.

    `positions` count tokens from 1; empty: 16 of them, spread evenly from the second token to the last or the 256th.
    `num_sequences` are the first rows of the shortest test set: with the defaults there are at least 128 tokens where
    rows have 16 or more. At the last position of each row, `checked_rows` rows of the Jacobian are compared with
    autograd through the iteration, which costs a solve each.
    """

    kind: Literal["jacobian"]
    positions: tuple[AtLeastTwo, ...] = ()  # the first token has no state before it
    num_sequences: Count = 9
    layer: Number = 0
    checked_rows: Count = 4


@dataclass(frozen=True)
class LmEvalConfig(InModes):
    """Tasks of the harness, by name, each with the metrics that its YAML file names.

    `limit` takes the first documents of each task only; None takes all. `task_path` is a folder of further tasks, whose
    files have the digests `task_files` (sha256 by path below the folder; None does not check). `precision` bf16 runs
    the model under autocast. `bootstrap_draws`: for the standard error of a perplexity.
    """

    kind: Literal["lm_eval"]
    tasks: Names
    num_fewshot: Number = 0
    limit: Count | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    task_path: str | None = None
    task_files: Mapping[str, str] | None = None
    bootstrap_draws: Number = BOOTSTRAP_DRAWS  # 0 gives no standard error
