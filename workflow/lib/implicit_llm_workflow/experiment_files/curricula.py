"""Build curricula, in which the phases of a training run form a tree over one axis of global steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from implicit_llm_contracts.config.fill import Only, fill
from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_contracts.config.training import PhaseConfig
from implicit_llm_contracts.config.values import SOME, Count, Name, Text
from implicit_llm_contracts.errors import ConfigError, InvalidValue, refuse_if
from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.experiment_files.yaml_files import check_keys

# Settings without effect in a mode, in training and in the evaluation of the trained model.
_IDLE = {"unrolled": ("method", "stop", "block_len"), "fixed_point": ("num_unroll",)}
_TRAINING = [key for key in SolverConfig.__dataclass_fields__ if not key.startswith("eval_")]


def _is_step(value: Any) -> bool:
    return value >= 1 if isinstance(value, int) else 0 < value < 1


Step = Annotated[int | float, Only(_is_step, "a number of steps, or a share of total_steps below 1")]
Steps = Annotated[
    int | float | str,
    Only(
        lambda value: value == "rest" if isinstance(value, str) else _is_step(value),
        'a number of steps, a share of total_steps below 1, or "rest"',
    ),
]


@dataclass(frozen=True)
class PhaseEntry:
    """A phase as the curriculum's file describes it. Numbers of steps below 1 are shares of total_steps.

    `steps`: optimizer steps; "rest" continues to the end of the training run. `solver`: settings of the fixed point,
    with `mode`; null for explicit models. `after`: the earlier phase that it resumes from, by default the previous one
    in the list. `start`: the step at which it resumes, by default the end of that earlier phase, which must keep the
    checkpoint of this step. `keep`: steps whose checkpoints are kept for other phases; like `start`, they count from
    the start of the training run. `state_passing`: the number of sequences in the longest chains. In a chain, each
    sequence starts in the final state of the one before it; by default every sequence starts in the empty state. After
    every `state_passing` steps of the phase, all chains restart, and `keep` accepts only these steps.
    `restart_when_wrong`: whether a chain also restarts from the empty state after a wrong last prediction; the
    published chains do not.
    """

    name: Name
    steps: Steps
    solver: SolverConfig | None
    after: Text | None = None
    start: Step | None = None
    keep: tuple[Step, ...] = ()
    state_passing: Count | None = None
    restart_when_wrong: bool = True

    def __post_init__(self) -> None:
        refuse_if(
            not self.restart_when_wrong and self.state_passing is None,
            "restart_when_wrong: without state_passing no word starts in a carried state; add state_passing, or remove "
            "the key",
        )


@dataclass(frozen=True)
class CurriculumFile:
    """A file workflow/config/curricula/<name>.yaml; each of its phases is one training job for each seed."""

    phases: Annotated[tuple[dict[str, Any], ...], SOME]


def fill_phase(phase: Mapping[str, Any], at: str) -> PhaseEntry:
    """Return a phase from its values. Raises: ConfigError that starts with `at`."""
    entry = fill(PhaseEntry, phase, at)
    if entry.solver is not None:
        check_keys(entry.solver.given, _TRAINING, f"{at}.solver")
        if "mode" not in entry.solver.given:
            raise ConfigError(f"{at}.solver: the key 'mode' is missing; add it, unrolled or fixed_point")
        for key in _IDLE[entry.solver.mode]:
            if key in entry.solver.given:
                raise ConfigError(f"{at}.solver.{key}: does nothing in the mode {entry.solver.mode}; remove it")
    return entry


def build_phases(
    entries: Sequence[PhaseEntry], total_steps: int, where: str
) -> tuple[dict[str, PhaseConfig], dict[str, str]]:
    """Return two mappings by the name of a phase: its config, and the phase from which it resumes, if any.

    Each phase comes after the phase from which it resumes. Raises: ConfigError for equal names, an unknown phase, a
    last phase that does not end at `total_steps`, a start without a checkpoint, or a step that cannot be kept.
    """
    placed: dict[str, PhaseConfig] = {}
    starts: dict[str, str] = {}
    for entry in entries:
        if entry.name in placed:
            raise ConfigError(f"{where}: two phases are called {entry.name!r}; rename one")
        before = entry.after or next(reversed(placed), None)
        placed[entry.name] = _place(entry, before, placed, total_steps, f"{where}.{entry.name}")
        if before is not None:
            starts[entry.name] = before
    continued = {(before, placed[name].start_step) for name, before in starts.items()}
    for phase in placed.values():
        if phase.end_step != total_steps and (phase.name, phase.end_step) not in continued:
            raise ConfigError(
                f"{where}: the phases up to {phase.name!r} have {phase.end_step} steps, the task has total_steps "
                f"{total_steps}; make them equal or give the last phase 'rest'"
            )
    return placed, starts


def _place(
    entry: PhaseEntry, name: str | None, placed: Mapping[str, PhaseConfig], total_steps: int, at: str
) -> PhaseConfig:
    if name is not None and name not in placed:
        raise ConfigError(f"{at}.after: there is no phase {name!r} before this one; {nearest(name, placed)}")
    before = placed[name] if name is not None else None
    start = _start_step(entry, before, total_steps, at)
    end = total_steps if isinstance(entry.steps, str) else start + _step(entry.steps, total_steps)
    if not start < end <= total_steps:
        raise ConfigError(
            f"{at}.steps: the phase would be steps {start} to {end}, the task has total_steps {total_steps}; give the "
            "phases fewer steps, or the last one 'rest'"
        )
    keep = sorted({_step(value, total_steps) for value in entry.keep})
    outside = next((step for step in keep if not start < step < end), None)
    if outside is not None:
        raise ConfigError(
            f"{at}.keep: step {outside} is not between the phase's start {start} and end {end} (the end is kept "
            "anyway); remove it"
        )
    index = before.index + 1 if before is not None else 0
    try:
        return PhaseConfig(
            entry.name, index, start, end, entry.solver, tuple(keep), entry.state_passing, entry.restart_when_wrong
        )
    except InvalidValue as error:
        raise ConfigError(f"{at}.{error}") from error


def _start_step(entry: PhaseEntry, before: PhaseConfig | None, total_steps: int, at: str) -> int:
    """Return the global step at which a phase starts.

    Raises: ConfigError if `before` keeps no checkpoint of this step, or if the first phase has a `start`.
    """
    if before is None:
        if entry.start is not None:
            raise ConfigError(f"{at}.start: the first phase starts at step 0; remove the key")
        return 0
    start = before.end_step if entry.start is None else _step(entry.start, total_steps)
    passing = before.state_passing
    if passing is not None and start != before.end_step and (start - before.start_step) % passing:
        raise ConfigError(
            f"{at}.start: at step {start} some sequences of phase {before.name!r} continue a carried state, which a "
            f"checkpoint lacks; start after a multiple of its {passing} steps, or at its end {before.end_step}"
        )
    if start not in (before.end_step, *before.keep):
        raise ConfigError(
            f"{at}.start: phase {before.name!r}, steps {before.start_step} to {before.end_step}, does not keep step "
            f"{start}; add {entry.start} to its list `keep`, or choose another start"
        )
    return start


def _step(value: int | float, total_steps: int) -> int:
    """Return a number of steps; a value below 1 is a share of total_steps."""
    return max(1, round(value * total_steps)) if value < 1 else int(value)
