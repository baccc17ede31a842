"""Curricula: the phases of a training as a tree on one axis of global steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_contracts.config.values import SOME, Name, Share
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fill import Only, fill
from implicit_llm_workflow.experiment_files.values import as_given, check_keys

_TRAINING = [key for key in SolverConfig.__dataclass_fields__ if not key.startswith("eval_")]


def _is_step(value: Any) -> bool:
    return value >= 1 if isinstance(value, int) else 0 < value < 1


Step = Annotated[int | float, Only(_is_step, "a number of steps, or a share of total_steps below 1")]
Steps = Annotated[
    int | float | str,
    Only(
        lambda value: value in ("all", "rest") if isinstance(value, str) else _is_step(value),
        'a number of steps, a share of total_steps below 1, "rest" or "all"',
    ),
]


@dataclass(frozen=True)
class PhaseEntry:
    """A phase as a curriculum's file describes it. Shares of total_steps are numbers below 1.

    `steps`: optimizer steps; "all" is total_steps, "rest" what the phases before and after it leave. `solver`: settings
    of the fixed point, null for explicit models. `after`: the phase it goes on from, by default the one before it in
    the list; `start`: the step at which it leaves that phase, which must keep the checkpoint, by default its end;
    `start_of_phase`: the same as a share of that phase. `keep`: steps whose checkpoints stay, for others to start from.
    """

    name: Name
    steps: Steps
    solver: dict[str, Any] | None
    after: str | None = None
    start: Step | None = None
    start_of_phase: Share | None = None
    keep: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if self.start is not None and self.start_of_phase is not None:
            raise ValueError("start: start and start_of_phase exclude each other; remove one")

    @property
    def start_key(self) -> str | None:
        """The key that says where it leaves the phase before it, None if it goes on from its end."""
        return next((key for key in ("start", "start_of_phase") if getattr(self, key) is not None), None)


@dataclass(frozen=True)
class CurriculumFile:
    """workflow/config/curricula/<name>.yaml: phases, each of which is one training job."""

    phases: Annotated[tuple[dict[str, Any], ...], SOME]


def check_curriculum(values: Mapping[str, Any], path: str) -> None:
    """Check the values of a curriculum's file. Raises: ConfigError."""
    for index, phase in enumerate(fill(CurriculumFile, values, path).phases):
        fill_phase(phase, f"{path}: phases[{index}]")


@dataclass(frozen=True)
class Phase:
    """One training job: global steps start_step (inclusive) to end_step (exclusive) with one solver.

    `index` counts the phases before it on its own path; `solver` is None for explicit models; `keep` are the steps
    whose checkpoints stay, for branches to start from; `after` is the phase it goes on from, None for the first one.
    """

    name: str
    index: int
    start_step: int
    end_step: int
    solver: Mapping[str, Any] | None
    keep: tuple[int, ...] = ()
    after: str | None = None

    def identity(self) -> dict[str, Any]:
        """What the phase contributes to its job; `after` is an input of the job and no part of it."""
        fields = {
            "name": self.name,
            "index": self.index,
            "start_step": self.start_step,
            "end_step": self.end_step,
            "solver": None if self.solver is None else dict(self.solver),
        }
        return {**fields, "keep": list(self.keep)} if self.keep else fields


def build_phases(phases: Sequence[Mapping[str, Any]], total_steps: int, where: str) -> tuple[Phase, ...]:
    """Phases with their places on the global step axis, every one after the phase it goes on from.

    Raises: ConfigError for phases that leave steps out, overlap, or start where no checkpoint is kept.
    """
    entries = [fill_phase(phase, f"{where}.{phase.get('name')}") for phase in phases]
    names = [entry.name for entry in entries]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(f"{where}: two phases are called {repeated!r}; rename one")
    return _Curriculum(entries, total_steps, where).build()


def fill_phase(phase: Mapping[str, Any], at: str) -> PhaseEntry:
    """A phase with the settings of its solver as they are hashed: `tol: 1` and `tol: 1.0` are one identity.

    Raises: ConfigError that starts with `at`.
    """
    entry = fill(PhaseEntry, phase, at)
    if entry.solver is None:
        return entry
    check_keys(entry.solver, _TRAINING, f"{at}.solver")
    if "mode" not in entry.solver:
        raise ConfigError(f"{at}.solver: the key 'mode' is missing; add it, unrolled or fixed_point")
    solver = fill(SolverConfig, entry.solver, f"{at}.solver")
    return replace(entry, solver=as_given(solver, entry.solver))


class _Curriculum:
    """The phases of a file by name, and those already placed."""

    def __init__(self, entries: Sequence[PhaseEntry], total_steps: int, where: str) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._total_steps = total_steps
        self._where = where
        self._after = self._predecessors(list(self._entries))
        self._placed: dict[str, Phase] = {}

    def build(self) -> tuple[Phase, ...]:
        order = self._in_order()
        self._check_rests()
        for name in order:
            self._placed[name] = self._place(name)
        for phase in self._placed.values():
            self._check_start(phase)
        for phase in self._placed.values():
            self._check_end(phase)
        return tuple(self._placed.values())

    def _predecessors(self, names: list[str]) -> dict[str, str | None]:
        """The phase that each one goes on from: the one it names, or the one before it in the list."""
        after: dict[str, str | None] = {}
        for previous, name in zip([None, *names], names, strict=False):
            given = self._entries[name].after or previous
            if given is not None and given not in self._entries:
                raise self._error(name, "after", f"there is no phase {given!r}; {nearest(given, names)}")
            after[name] = given
        return after

    def _in_order(self) -> list[str]:
        """Every phase after the one it goes on from, otherwise as in the file. Raises: ConfigError for a cycle."""
        done: dict[str, None] = {}
        for name in self._entries:
            path: list[str] = []
            current: str | None = name
            while current is not None and current not in done:
                if current in path:
                    cycle = " after ".join([*path[path.index(current) :], current])
                    raise self._error(
                        name, "after", f"{cycle} goes in a circle; let one of them come first, without 'after'"
                    )
                path.append(current)
                current = self._after[current]
            done |= dict.fromkeys(reversed(path))
        return list(done)

    def _place(self, name: str) -> Phase:
        before = self._after[name]
        previous = self._placed[before] if before is not None else None
        start = self._start_step(name, previous)
        end = start + self._num_steps(name, start)
        if end > self._total_steps:
            raise self._error(
                name,
                "steps",
                f"the phase ends at step {end}, the task has total_steps {self._total_steps}; "
                "give it fewer steps, or 'rest'",
            )
        return Phase(
            name=name,
            index=previous.index + 1 if previous else 0,
            start_step=start,
            end_step=end,
            solver=self._entries[name].solver,
            keep=self._kept_steps(name, start, end),
            after=before,
        )

    def _start_step(self, name: str, previous: Phase | None) -> int:
        entry = self._entries[name]
        if previous is None:
            if entry.start_key is not None:
                raise self._error(name, entry.start_key, "the first phase starts at step 0; remove the key")
            return 0
        if entry.start is not None:
            return self._step(entry.start)
        if entry.start_of_phase is not None:
            length = previous.end_step - previous.start_step
            return previous.start_step + max(1, round(entry.start_of_phase * length))
        return previous.end_step

    def _num_steps(self, name: str, start: int) -> int:
        steps = self._entries[name].steps
        if steps == "all":
            return self._total_steps
        if not isinstance(steps, str):
            return self._step(steps)
        left = self._total_steps - start - self._following_steps(name)
        if left < 1:
            raise ConfigError(
                f"{self._where}: no step of the {self._total_steps} is left for phase {name!r}; "
                "shorten the other phases or raise total_steps"
            )
        return left

    def _following_steps(self, name: str) -> int:
        """Steps of the phases that go on from the end of this one, on the longest path."""
        lengths = [
            self._step(steps) + self._following_steps(other)
            for other in self._followers(name)
            if not isinstance(steps := self._entries[other].steps, str)
        ]
        return max(lengths, default=0)

    def _followers(self, name: str) -> list[str]:
        """Phases that go on from the end of this one."""
        return [
            other for other, before in self._after.items() if before == name and self._entries[other].start_key is None
        ]

    def _check_rests(self) -> None:
        """Two phases in a row cannot both take what the other leaves."""
        for name in self._entries:
            chain = [name]
            while (before := self._after[chain[-1]]) is not None and chain[-1] in self._followers(before):
                chain.append(before)
            open_names = [other for other in reversed(chain) if self._entries[other].steps == "rest"]
            if len(open_names) > 1:
                raise ConfigError(
                    f"{self._where}: phases {' and '.join(open_names)} both have steps 'rest'; "
                    "give all but one a number"
                )

    def _kept_steps(self, name: str, start: int, end: int) -> tuple[int, ...]:
        steps = sorted({self._step(value) for value in self._entries[name].keep})
        outside = next((step for step in steps if not start < step < end), None)
        if outside is not None:
            raise self._error(
                name,
                "keep",
                f"step {outside} is not between the phase's start {start} and end {end} (the end is kept anyway); "
                "remove it",
            )
        return tuple(steps)

    def _check_start(self, phase: Phase) -> None:
        if phase.after is None:
            return
        previous, start = self._placed[phase.after], phase.start_step
        if start in (previous.end_step, *previous.keep):
            return
        entry = self._entries[phase.name]
        key = entry.start_key or "start"
        if not previous.start_step < start < previous.end_step:
            raise self._error(
                phase.name,
                key,
                f"step {start} is outside of phase {previous.name!r}, steps {previous.start_step} to "
                f"{previous.end_step}; choose another start",
            )
        shown = entry.start if entry.start is not None else start
        raise self._error(
            phase.name,
            key,
            f"phase {previous.name!r} does not keep step {start}; add {shown} to the list `keep` of {previous.name!r}",
        )

    def _check_end(self, phase: Phase) -> None:
        ends_in_another = any(
            other.after == phase.name and other.start_step == phase.end_step for other in self._placed.values()
        )
        if phase.end_step == self._total_steps or ends_in_another:
            return
        raise ConfigError(
            f"{self._where}: the phases up to {phase.name!r} have {phase.end_step} steps, the task has total_steps "
            f"{self._total_steps}; make them equal or give one phase 'rest'"
        )

    def _step(self, value: int | float) -> int:
        """A number of steps; below 1 it is a share of total_steps."""
        return max(1, round(value * self._total_steps)) if value < 1 else int(value)

    def _error(self, phase: str, key: str, message: str) -> ConfigError:
        return ConfigError(f"{self._where}.{phase}.{key}: {message}")
