"""Define the settings of evaluations. Keys that a config gives are part of the identity; runtime settings are not."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.fill import AsGiven
from implicit_llm_contracts.config.solver import AS_TRAINED, STOPS, EvalMode, SolverConfig
from implicit_llm_contracts.config.values import (
    DISTINCT,
    BatchSize,
    Count,
    Iterations,
    ModeName,
    Names,
    Number,
    Share,
    integer,
)
from implicit_llm_contracts.errors import UserError, refuse_if
from implicit_llm_contracts.hints import nearest

PARALLEL = "parallel"  # the mode of an explicit model, which evaluates all tokens at once
UNSWEPT = {"base": PARALLEL, "key": None, "value": None}  # the field `sweep` in the record of an explicit model
SEQUENTIAL = "sequential"
COSTS = ("f_evaluations_per_token", "unconverged_share")  # numbers that records of every kind may have
# The mode of `implicit-llm evaluate` that solves simultaneously and stops by the released code's criterion: a relative
# residual over the whole batch.
RELEASED_CRITERION = "released-criterion"

# The stopping rule "batch" couples the sequences of a batch, so the batch size changes the numbers and is fixed.
COUPLED_BATCH_SIZE = 64
# The default number of draws of the Language Model Evaluation Harness, for the standard error of a perplexity.
BOOTSTRAP_DRAWS = 100_000
AtLeastTwo = Annotated[int, integer(2)]
Precision = Literal["fp32", "bf16"]
EXAMPLE = "{name: blockwise-8-token, eval_mode: blockwise, eval_block_len: 8, eval_stop: token}"


class EvaluateConfigError(UserError):
    """The evaluation cannot run as configured."""


@dataclass(frozen=True)
class SweptSetting:
    """The origin of a mode in a sweep: the mode `base` with its field `key` set to `value`."""

    base: str
    key: str
    value: int | float


@dataclass(frozen=True)
class ModeConfig(AsGiven):
    """An evaluation mode of an implicit model; a solver setting that is None keeps the value saved with the model.

    "as_trained" is the training pass, with all settings of the phase in which the model was saved. `eval_tol` is a
    relative residual in (0, 1). `eval_max_iter` counts f-evaluations. `max_samples` selects the first samples of a data
    set; None for all. `batch_size` (sequences) is set here for stopping rules that couple the sequences of a batch;
    otherwise it is a runtime setting.
    """

    name: ModeName
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
        refuse_if(
            self.eval_mode != "blockwise" and self.eval_block_len is not None,
            f"eval_block_len: does nothing in the mode {self.eval_mode}; remove it, or set eval_mode to blockwise",
        )

    @property
    def swept(self) -> tuple[str, float] | None:
        """The swept setting and its value, or None without a sweep."""
        return None if self.sweep is None else (self.sweep.key, self.sweep.value)

    def coupled_batch_size(self, trained: SolverConfig | None) -> int | None:
        """Return `batch_size` if it is set, else COUPLED_BATCH_SIZE if the sequences influence each other, else None.

        trained: the solver saved with the model, which supplies the stopping rule if the mode sets none; None for an
            explicit model.
        """
        if self.batch_size is not None or trained is None:
            return self.batch_size
        stop = trained.stop if self.eval_mode == AS_TRAINED else self.solver(trained).eval_stop
        return COUPLED_BATCH_SIZE if stop == "batch" else None

    def solver(self, trained: SolverConfig) -> SolverConfig:
        """Return `trained`, the solver saved with the model, changed by the settings of this mode that are not None."""
        keys = ("eval_mode", "eval_max_iter", "eval_stop", "eval_block_len")
        changed = {key: getattr(self, key) for key in keys} | {"tol": self.eval_tol}
        return dataclasses.replace(trained, **{key: value for key, value in changed.items() if value is not None})

    def record(self, trained: SolverConfig | None) -> dict[str, Any]:
        """Return the mode's fields in a record of metrics.json: its settings, which are None for an explicit model.

        In the mode "as_trained" all except `eval_mode` are None, because the phase defines them. In a sweep, the record
        of an explicit model has a sweep whose key is None; without this sweep, the report would show the model twice.
        trained: the solver saved with the model; None for an explicit model.
        """
        keys = ("eval_mode", "eval_stop", "eval_block_len")
        unknown = dict.fromkeys((*keys, "eval_max_iter", "eval_tol", "sweep"))
        if trained is None:
            return unknown | {"sweep": self.sweep and UNSWEPT}
        if self.eval_mode == AS_TRAINED:
            return unknown | {"eval_mode": AS_TRAINED}
        used = self.solver(trained)
        sweep = None if self.sweep is None else dataclasses.asdict(self.sweep)
        budget = {"eval_max_iter": used.eval_budget, "eval_tol": used.tol}
        return {key: getattr(used, key) for key in keys} | budget | {"sweep": sweep}


@dataclass(frozen=True)
class SweepConfig(AsGiven):
    """The values of a mode's fields in a sweep of test-time compute."""

    eval_max_iter: tuple[Count, ...] = ()
    eval_tol: tuple[Share, ...] = ()


def modes_of(modes: tuple[ModeConfig, ...], sweep: SweepConfig | None, where: str) -> tuple[ModeConfig, ...]:
    """Return the modes to evaluate: those of the config, or those of its sweep.

    Raises: EvaluateConfigError for no mode, a name that two modes share, the name "parallel", or a sweep of
        "as_trained".
    """
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


# The modes, from the most to the least similar to generation; the more similar mode of a pair is the reference.
_NEARNESS = (SEQUENTIAL, "blockwise", "simultaneous", AS_TRAINED)


def pairs_of(modes: Sequence[ModeConfig], *, is_implicit: bool) -> list[tuple[str, str]]:
    """Return every pair of modes; the second one is the reference, which is more similar to generation.

    If both are equally similar, the reference is the mode named first. In a sweep, both modes of a pair have the same
    value of the same setting. For an explicit model, the only pair is parallel and sequential.
    """
    if not is_implicit:
        return [(PARALLEL, SEQUENTIAL)]
    pairs = itertools.combinations(sorted(modes, key=lambda mode: _NEARNESS.index(mode.eval_mode)), 2)
    return [(mode.name, other.name) for other, mode in pairs if mode.swept == other.swept]


def missing_length(lengths: Sequence[int], present: Sequence[int]) -> str | None:
    """Return the error about the first of `lengths` that no test set has, or None if all are `present`."""
    for length in lengths:
        if length not in present:
            return (
                f"no test set has sequences of {length} tokens; there are {', '.join(map(str, present))}: add "
                "the length to the data's test lengths, or take it out"
            )
    return None


@dataclass(frozen=True)
class InModes(AsGiven):
    """A kind of evaluation that evaluates implicit models in `modes` and explicit models in the mode "parallel"."""

    kind: str
    modes: tuple[ModeConfig, ...]
    sweep: SweepConfig | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class EvaluateConfig(InModes):
    """The accuracy on word problems.

    `lengths`: the lengths (tokens) of the test sets to evaluate; None for all. `precision`: see `PerplexityConfig`; on
    a GPU, bf16 evaluates long sequences in short blocks much faster.
    """

    kind: Literal["word_problem"]
    lengths: Annotated[tuple[Count, ...], DISTINCT] | None = None
    precision: Precision = "fp32"


@dataclass(frozen=True)
class CatbabiEvaluation(InModes):
    """The accuracy on the questions of CatbAbI in each of `protocols` (implicit_llm/evaluation/kinds/catbabi.py).

    `carried_max_tokens`: the maximum number of tokens in the protocol "carried", which evaluates one window at a time;
    None for all windows.
    """

    kind: Literal["catbabi"]
    protocols: Annotated[tuple[Literal["windowed", "carried"], ...], DISTINCT] = ("windowed",)
    carried_max_tokens: Count | None = None

    def __post_init__(self) -> None:
        is_lost = "carried" in self.protocols and any(mode.eval_mode == AS_TRAINED for mode in self.modes)
        refuse_if(is_lost, "protocols: carried needs a state, which the mode as_trained does not leave; use windowed")
        refuse_if(
            self.carried_max_tokens is not None and "carried" not in self.protocols,
            "carried_max_tokens: does nothing without the protocol carried; add it to protocols, or remove the key",
        )


@dataclass(frozen=True)
class PerplexityConfig(InModes):
    """The perplexity of language models on the test set.

    `lengths`: the test set is cut into sequences of each of these lengths (tokens); None keeps the sequences of the
    data set. Without this key, an experiment uses all lengths of the evaluated split. `max_tokens`: limits the
    evaluation to the first sequences, at least one per length; None for all.
    `precision`: bf16 runs the model under autocast, so that large models finish in time on a GPU; losses are fp32.
    """

    kind: Literal["perplexity"]
    lengths: Annotated[tuple[AtLeastTwo, ...], DISTINCT] | None = None
    max_tokens: Count | None = None
    precision: Precision = "fp32"


@dataclass(frozen=True)
class DualityConfig(InModes):
    """The agreement of all modes on the same tokens, and the speed at which the simultaneous iteration converges.

    lengths: tokens per sequence; None keeps the sequences of the data set, the only choice for word problems and
    CatbAbI. Without this key, an experiment uses the shortest length of the evaluated split. max_tokens: limits the
    comparison to the first sequences, at least one per length; the paper compares 3 million tokens. The max_samples of
    a mode limits all modes, because they are compared on the same sequences. trace_tokens: limits the record of
    convergence to the first of these sequences, at least one per length. precision: see `PerplexityConfig`.
    """

    kind: Literal["duality"]
    lengths: Annotated[tuple[Count, ...], DISTINCT] | None = None
    max_tokens: Count | None = None
    trace_tokens: Count = 16384
    precision: Precision = "fp32"


@dataclass(frozen=True)
class JacobianConfig(AsGiven):
    """The Jacobian of a layer's state at tokens of the test sequences.

    `positions`: the tokens at which to compute the Jacobian, counted from 1. If empty: at most 16 tokens, spread evenly
    from the second to the last one, or to the 256th in a longer sequence. `num_sequences`: the number of sequences, the
    first ones of the shortest test set. The defaults give 128 or more tokens in total if sequences have at least 16.
    `checked_rows`: at the last position of each sequence, this many rows of the Jacobian are compared with autograd
    through the iteration; each row costs a solve.
    """

    kind: Literal["jacobian"]
    positions: tuple[AtLeastTwo, ...] = ()  # the first token has no state before it
    num_sequences: Count = 9
    layer: Number = 0
    checked_rows: Count = 4


@dataclass(frozen=True)
class LmEvalConfig(InModes):
    """Downstream tasks of the Language Model Evaluation Harness by name, with the metrics that their YAML files name.

    `limit`: the maximum number of documents per task; None for all. `task_path`: a folder of further tasks.
    `task_files`: the sha256 of each file of this folder by its path there; None skips the check. `precision`: bf16 runs
    the model under autocast. `bootstrap_draws`: the number of draws for the standard error of a perplexity.
    """

    kind: Literal["lm_eval"]
    tasks: Names
    num_fewshot: Number = 0
    limit: Count | None = None
    precision: Precision = "fp32"
    task_path: str | None = None
    task_files: Mapping[str, str] | None = None
    bootstrap_draws: Number = BOOTSTRAP_DRAWS  # 0 gives no standard error
