"""What an evaluation is: every field here changes the numbers (identity); batch size and device are runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from implicit_llm_contracts.config.solver import STOPS, SolverConfig
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import UserError, refuse_if

PARALLEL = "parallel"  # the one mode of an explicit model
SEQUENTIAL = "sequential"
PUBLISHED = "published"  # simultaneous, with the published stopping rule: one norm over the whole batch

# The rule "batch" couples the sequences of a batch: its batch size changes the numbers and is not the machine's choice.
COUPLED_BATCH_SIZE = 64
# Draws behind the standard error of a perplexity; the harness's own number.
BOOTSTRAP_DRAWS = 100_000


class EvaluateConfigError(UserError):
    """An evaluation that cannot be run as configured."""


@dataclass(frozen=True)
class SweptSetting:
    """The mode `base` with its field `key` set to `value`."""

    base: str
    key: str
    value: int | float


@dataclass(frozen=True)
class ModeConfig:
    """One way of solving an implicit model; None keeps what the model was saved with.

    `eval_tol` is relative, in (0, 1); `eval_max_iter` counts f-evaluations; `max_samples` takes the first samples of a
    data set only; `batch_size` (sequences) is fixed here for stopping rules that couple the sequences of a batch, and
    is the machine's choice otherwise.
    """

    name: str
    eval_mode: Literal["simultaneous", "blockwise", "sequential"]
    eval_max_iter: int | None = None
    eval_tol: float | None = None
    eval_stop: str | None = None
    eval_block_len: int | None = None
    max_samples: int | None = None
    batch_size: int | None = None
    sweep: SweptSetting | None = None  # set by `swept_modes`

    def coupled_batch_size(self, trained: SolverConfig | None) -> int | None:
        """The batch size that belongs to the result, None when the sequences do not influence each other.

        `trained` is the solver the model was saved with, which may have the rule "batch" too; None: an explicit model.
        """
        is_coupled = trained is not None and self.solver(trained).eval_stop == "batch"
        return self.batch_size or (COUPLED_BATCH_SIZE if is_coupled else None)

    @property
    def stop(self) -> str | None:
        """The stopping rule; the mode named "published" stands for the rule of that name unless it says otherwise."""
        name = self.name if self.sweep is None else self.sweep.base
        return self.eval_stop or ("batch" if name == PUBLISHED else None)

    def solver(self, trained: SolverConfig) -> SolverConfig:
        """The solver the model was saved with, with this mode's evaluation fields."""
        changed: dict[str, Any] = {
            "eval_mode": self.eval_mode,
            "eval_max_iter": self.eval_max_iter,
            "eval_stop": self.stop,
            "eval_block_len": self.eval_block_len,
            "tol": self.eval_tol,
        }
        return dataclasses.replace(trained, **{key: value for key, value in changed.items() if value is not None})

    def record(self, trained: SolverConfig | None) -> dict[str, Any]:
        """What a record of metrics.json says of the mode: the settings that were used, None for an explicit model.

        An explicit model has nothing to sweep; that its record is one of a sweep is told all the same, so that the
        model does not stand in the report twice.
        """
        keys = ("eval_mode", "eval_stop", "eval_block_len")
        if trained is None:
            is_swept = None if self.sweep is None else {"base": PARALLEL, "key": None, "value": None}
            return dict.fromkeys((*keys, "eval_max_iter", "eval_tol")) | {"sweep": is_swept}
        used = self.solver(trained)
        sweep = None if self.sweep is None else dataclasses.asdict(self.sweep)
        budget = {"eval_max_iter": used.eval_budget, "eval_tol": used.tol}
        return {key: getattr(used, key) for key in keys} | budget | {"sweep": sweep}


@dataclass(frozen=True)
class SweepConfig:
    """Values of a mode's fields, for test-time compute."""

    eval_max_iter: tuple[int, ...] = ()
    eval_tol: tuple[float, ...] = ()


def modes_of(modes: tuple[ModeConfig, ...], sweep: SweepConfig | None, where: str) -> tuple[ModeConfig, ...]:
    """The modes that are evaluated: those of the config, or those of its sweep. Raises: EvaluateConfigError."""
    check_modes(modes, f"{where}.modes")
    swept = swept_modes(modes, sweep)
    check_modes(swept, f"{where}.{'modes' if sweep is None else 'sweep'}")
    return swept


def swept_modes(modes: tuple[ModeConfig, ...], sweep: SweepConfig | None) -> tuple[ModeConfig, ...]:
    """Each mode once for each value of each field of the sweep, the other fields as they are; all modes without one."""
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


@dataclass(frozen=True)
class EvaluateConfig:
    """Word problems. In every kind implicit models are evaluated in `modes`, explicit ones in the mode "parallel".

    `lengths` takes the test sets of these lengths (tokens) only; None takes all.
    """

    kind: Literal["word_problem"]
    modes: tuple[ModeConfig, ...]
    lengths: tuple[int, ...] | None = None
    sweep: SweepConfig | None = None


@dataclass(frozen=True)
class CatbabiConfig:
    """Questions of CatbAbI, read by each of `protocols` (catbabi.py).

    `carried_max_tokens` takes the first windows only in the protocol carried, which reads one window at a time.
    """

    kind: Literal["catbabi"]
    modes: tuple[ModeConfig, ...]
    protocols: tuple[Literal["windowed", "carried"], ...] = ("windowed",)
    carried_max_tokens: int | None = None
    sweep: SweepConfig | None = None

    def __post_init__(self) -> None:
        refuse_if(
            not self.protocols or len(set(self.protocols)) < len(self.protocols),
            f"protocols: {list(self.protocols)} must name windowed, carried or both, each once",
        )
        _check_positive("carried_max_tokens", self.carried_max_tokens)


@dataclass(frozen=True)
class PerplexityConfig:
    """Perplexity of language models on the test set, cut into rows of each of `lengths` (tokens).

    `max_tokens` takes the first rows only, at least one a length; None takes all. `precision` bf16 runs the model under
    autocast, which a large model on a GPU needs to finish in time; losses are fp32.
    """

    kind: Literal["perplexity"]
    modes: tuple[ModeConfig, ...]
    lengths: tuple[int, ...]
    max_tokens: int | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    sweep: SweepConfig | None = None

    def __post_init__(self) -> None:
        refuse_if(
            not self.lengths or min(self.lengths) < 2,
            f"lengths: {list(self.lengths)} must name at least one length, each of 2 tokens or more",
        )
        refuse_if(
            len(set(self.lengths)) < len(self.lengths),
            f"lengths: {list(self.lengths)} names a length twice; remove one",
        )
        _check_positive("max_tokens", self.max_tokens)


@dataclass(frozen=True)
class DualityConfig:
    """Whether all modes give the same answers to the same tokens, and how fast the simultaneous iteration converges.

    lengths: tokens of a row; None takes the rows as the data set has them, the only choice for word problems and
    CatbAbI. max_tokens: the first rows only, at least one a length; the paper compares 3 million. A mode's max_samples
    holds for all modes, which are compared on the same rows. trace_tokens: of these, how many the convergence is
    followed on. precision: as for perplexity.
    """

    kind: Literal["duality"]
    modes: tuple[ModeConfig, ...]
    lengths: tuple[int, ...] | None = None
    max_tokens: int | None = None
    trace_tokens: int = 16384
    precision: Literal["fp32", "bf16"] = "fp32"
    sweep: SweepConfig | None = None

    def __post_init__(self) -> None:
        refuse_if(
            self.lengths is not None and (not self.lengths or min(self.lengths) < 1),
            f"lengths: {list(self.lengths or ())} must name at least one length of 1 or more, or be left out",
        )
        _check_positive("max_tokens", self.max_tokens)
        _check_positive("trace_tokens", self.trace_tokens)


@dataclass(frozen=True)
class JacobianConfig:
    """Which tokens of the test rows to measure, and in which layer.

    `positions` count tokens from 1; empty: 16 of them, spread evenly from the second token to the last or the 256th.
    `num_sequences` are the first rows of the shortest test set: with the defaults there are at least 128 tokens where
    rows have 16 or more. At the last position of each row, `checked_rows` rows of the Jacobian are compared with
    autograd through the iteration, which costs a solve each.
    """

    kind: Literal["jacobian"]
    positions: tuple[int, ...] = ()
    num_sequences: int = 9
    layer: int = 0
    checked_rows: int = 4

    def __post_init__(self) -> None:
        refuse_if(
            self.positions and min(self.positions) < 2,
            f"positions: {list(self.positions)} must name tokens from the second on, which have a state before them",
        )
        for key in ("num_sequences", "checked_rows"):
            refuse_if(getattr(self, key) < 1, f"{key}: {getattr(self, key)} is not a positive integer; use 1 or more")
        refuse_if(self.layer < 0, f"layer: {self.layer} is negative; layers count from 0")


@dataclass(frozen=True)
class LmEvalConfig:
    """Tasks of the harness, by name, each with the metrics that its YAML file names.

    `limit` takes the first documents of each task only; None takes all. `task_path` is a folder of further tasks, whose
    files have the digests `task_files` (sha256 by path below the folder; None does not check). `precision` bf16 runs
    the model under autocast. `bootstrap_draws`: for the standard error of a perplexity.
    """

    kind: Literal["lm_eval"]
    modes: tuple[ModeConfig, ...]
    tasks: tuple[str, ...]
    num_fewshot: int = 0
    limit: int | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    task_path: str | None = None
    task_files: Mapping[str, str] | None = field(default=None)
    bootstrap_draws: int = BOOTSTRAP_DRAWS
    sweep: SweepConfig | None = None

    def __post_init__(self) -> None:
        refuse_if(not self.tasks, "tasks: names no task; name at least one, for example arc_easy")
        refuse_if(
            len(set(self.tasks)) < len(self.tasks), f"tasks: {', '.join(self.tasks)} names a task twice; remove one"
        )
        refuse_if(
            self.num_fewshot < 0, f"num_fewshot: {self.num_fewshot} is negative; the paper's tables are zero-shot, 0"
        )
        _check_positive("limit", self.limit)
        refuse_if(
            self.bootstrap_draws < 0, f"bootstrap_draws: {self.bootstrap_draws} is negative; 0 gives no standard error"
        )


def _check_positive(key: str, value: int | None) -> None:
    refuse_if(
        value is not None and value < 1, f"{key}: {value} is not a positive integer; use 1 or more, or leave it out"
    )


def check_modes(modes: Iterable[ModeConfig], where: str) -> None:
    """Refuse what would be ambiguous or impossible. Raises: EvaluateConfigError."""
    seen: set[str] = set()
    for mode in modes:
        if mode.name in seen or mode.name == PARALLEL:
            raise EvaluateConfigError(f"{where}: mode name {mode.name!r} is taken; give every mode a name of its own")
        seen.add(mode.name)
        for key in ("eval_max_iter", "eval_block_len", "max_samples", "batch_size"):
            value = getattr(mode, key)
            if value is not None and value < 1:
                raise EvaluateConfigError(
                    f"{where}.{mode.name}.{key}: {value} is not a positive integer; use 1 or more, or leave it out"
                )
        if mode.eval_stop is not None and mode.eval_stop not in STOPS:
            raise EvaluateConfigError(
                f"{where}.{mode.name}.eval_stop: there is no {mode.eval_stop!r}; {nearest(mode.eval_stop, STOPS)}"
            )
        if mode.eval_tol is not None and not 0 < mode.eval_tol < 1:
            raise EvaluateConfigError(
                f"{where}.{mode.name}.eval_tol: {mode.eval_tol} is outside (0, 1); the published value is 0.05"
            )
    if not seen:
        raise EvaluateConfigError(
            f"{where}: no mode given; name at least one, for example {{name: blockwise, eval_mode: blockwise}}"
        )
