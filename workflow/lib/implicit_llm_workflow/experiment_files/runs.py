"""Build the runs of an experiment, each from a model, a task and a curriculum, with the changes of the experiment file.

An entry with a grid describes one run at every point of its axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from implicit_llm_contracts.config.fill import below, fill
from implicit_llm_contracts.config.training import PhaseConfig, TaskConfig, TrainConfig
from implicit_llm_contracts.config.values import DISTINCT, Seed, Text, matching
from implicit_llm_contracts.errors import ConfigError, InvalidValue
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.plugins import Kinds
from implicit_llm_workflow.experiment_files.curricula import CurriculumFile, PhaseEntry, build_phases, fill_phase
from implicit_llm_workflow.experiment_files.data_sets import DataSet
from implicit_llm_workflow.experiment_files.evaluations import Evaluation
from implicit_llm_workflow.experiment_files.models import PretrainedModel, check_widths, fill_model, override_fields
from implicit_llm_workflow.experiment_files.yaml_files import ConfigFiles, check_keys, fill_entry, matches, selected

T = TypeVar("T")
AxisName = Annotated[str, matching(r"[a-z][a-z_]*", "lower-case letters, beginning with a letter")]
_RunName = Annotated[
    str, matching(r"[A-Za-z0-9._-]{1,200}", "a name of at most 200 letters, digits, dots, hyphens and underscores")
]


@dataclass(frozen=True)
class Axis:
    """An axis of a grid. `key`: the path of the setting to change: override.task.batch_size, model, task, data, ..."""

    key: Text
    values: Annotated[tuple[int | float | str, ...], DISTINCT]


def expand_grids(runs: Mapping[str, Any], source: str) -> dict[str, tuple[RunEntry, str]]:
    """Return all runs by name, in the order of the file; an entry with a grid becomes one run for each of its points.

    The text beside each run names its point for messages; it is empty for a run without a grid. Raises: ConfigError.
    """
    found: dict[str, tuple[RunEntry, str]] = {}
    for entry, item in runs.items():
        for name, run, at in _points(entry, item, source):
            if name in found:
                raise ConfigError(f"{source}: runs: two runs are called {name!r}; rename a run, a grid axis or a value")
            found[name] = fill_entry(RunEntry, name, run, f"{source}: runs.{name}"), at
    return found


def _points(name: str, item: Mapping[str, Any], source: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    axes = fill_entry(RunEntry, name, item, f"{source}: runs.{name}").grid
    base = {key: value for key, value in item.items() if key != "grid"}
    where = f"{source}: runs.{name}.grid"
    keys = [axis.key for axis in axes.values()]
    for axis, values in axes.items():
        if keys.count(values.key) > 1:
            raise ConfigError(f"{where}.{axis}.key: two axes change {values.key}; remove one")
    for combination in itertools.product(*(axis.values for axis in axes.values())):
        point, labels = base, {}
        for (axis, values), value in zip(axes.items(), combination, strict=True):
            point = _with_value(point, values.key.split("."), value, f"{where}.{axis}.key")
            labels[axis] = f"{value:g}" if isinstance(value, float) else str(value)
        at = ", ".join(f"{axis} = {label}" for axis, label in labels.items())
        chosen = [f"{axis}{label}" for axis, label in labels.items()]
        yield "-".join([name, *chosen]), point, f"runs.{name}.grid: {at}" if at else ""


def _with_value(item: Mapping[str, Any], path: list[str], value: Any, where: str) -> dict[str, Any]:
    """Return `item` with the value at the path; missing mappings on the path are created. Raises: ConfigError."""
    key, *rest = path
    if not rest:
        return {**item, key: value}
    below = item.get(key, {})
    if not isinstance(below, Mapping):
        raise ConfigError(f"{where}: {key!r} is {below!r} and has no keys below it; shorten the path")
    return {**item, key: _with_value(below, rest, value, where)}


@dataclass(frozen=True)
class Override:
    """Changes of the values in a run's files: fields of its model, fields of its task, and fields of phases by name."""

    model: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    curriculum: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunEntry:
    """An entry of `runs`, which names a data set of the experiment and files in models/, tasks/ and curricula/.

    `seeds`: they determine the initialisation and the order of the data; each trains one model. `override`: changes
    that take precedence over those for all runs. `grid`: axes by name; there is one run at each point,
    <name>-<axis><value>-<axis><value>.
    """

    name: _RunName
    data: str
    model: str
    task: str
    curriculum: str
    seeds: Annotated[tuple[Seed, ...], DISTINCT] = (0,)
    override: Override = field(default_factory=Override)
    grid: dict[AxisName, Axis] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A model that is trained on a data set, once for every seed.

    `phases`: the training jobs of the first seed by phase. `starts`: maps each phase that resumes to the phase from
    which it resumes, which comes earlier in `phases`. The fields of the model are those of its configuration without a
    solver, {"pretrained": folder}, or for a model of the hub {"pretrained": name, "revision": commit}.
    """

    name: str
    data: str
    phases: Mapping[str, TrainConfig]
    starts: Mapping[str, str]
    seeds: tuple[int, ...]

    @property
    def training(self) -> TrainConfig:
        """The training job of the first phase; all phases have the same model and recipe."""
        return next(iter(self.phases.values()))

    @property
    def is_implicit(self) -> bool:
        return any(job.phase.solver is not None for job in self.phases.values())

    @property
    def final_phases(self) -> tuple[PhaseConfig, ...]:
        """The phases that complete the training run: one, or one for every branch. These are evaluated."""
        return tuple(job.phase for job in self.phases.values() if job.phase.end_step == job.total_steps)

    def takes(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation that fits the data applies to the run; an explicit run has nothing to sweep."""
        return matches(self.name, evaluation.runs) and (self.is_implicit or evaluation.sweep is None)


_Layers = Sequence[tuple[Override, str]]  # changes, each with the file and key for error messages; later ones win


@dataclass(frozen=True)
class RunBuilder:
    """A builder of the runs of one experiment file; `shared` contains the changes for all of them."""

    shared: Override
    data: Mapping[str, DataSet]
    files: ConfigFiles
    kinds: Kinds

    def check_shared(self, runs: Iterable[RunEntry]) -> None:
        """Raise ConfigError if `shared` changes a phase that no run has."""
        names = {name for run in runs for name, _, _ in self._curriculum(run, f"{self.files.source}: runs.{run.name}")}
        check_keys(self.shared.curriculum, names, f"{self.files.source}: override.curriculum")

    def build(self, item: RunEntry) -> Run:
        """Return a run from its entry. Raises: ConfigError with one line that names file, key and fix."""
        where = f"{self.files.source}: runs.{item.name}"
        if item.data not in self.data:
            raise ConfigError(f"{where}.data: no data set {item.data!r} in this file; {nearest(item.data, self.data)}")
        data = self.data[item.data]
        layers = [(self.shared, f"{self.files.source}: override"), (item.override, f"{where}.override")]
        task = self._task(item, where, layers)
        if task.task != data.kind:
            raise ConfigError(
                f"{where}.task: is for {task.task} data, data set {item.data!r} is {data.kind}; "
                "name another task or another data set"
            )
        known = data.num_train_sequences
        if known is not None and known < task.batch_size:
            raise ConfigError(
                f"{where}.data: {item.data!r} has {known} training sequences, fewer than batch_size, "
                f"{task.batch_size}, so a batch would repeat some; give more, or a smaller batch_size in override.task"
            )
        model = self._model(item, where, layers)
        if "pretrained" not in model:
            model["vocab_size"] = data.vocab_size
            check_widths(model, f"{where}.model")
        phases, starts = build_phases(self._phases(item, where, layers), task.total_steps, f"{where}.curriculum")
        _check_solvers(model, phases.values(), item, f"{where}.curriculum")
        try:
            jobs = {
                name: TrainConfig(**vars(task), model=model, phase=phase, seed=item.seeds[0])
                for name, phase in phases.items()
            }
        except InvalidValue as error:
            raise ConfigError(f"{where}: {error}") from error
        return Run(item.name, item.data, jobs, starts, item.seeds)

    def _model(self, item: RunEntry, where: str, layers: _Layers) -> dict[str, Any]:
        values, path = self.files.read("models", item.model, f"{where}.model")
        model = fill_model(values, path)
        overrides = [key for changes, key in layers if changes.model]
        if isinstance(model, PretrainedModel) and overrides:
            raise ConfigError(
                f"{overrides[-1]}.model: {path} is a pretrained model, whose fields are fixed; remove the override"
            )
        fields = model.fields(path)
        for changes, key in layers:
            fields = override_fields(fields, changes.model, f"{key}.model")
        return fields

    def _task(self, item: RunEntry, where: str, layers: _Layers) -> TaskConfig:
        first = self.files.read("tasks", item.task, f"{where}.task")
        return _with_changes(first, [(changes.task, f"{key}.task") for changes, key in layers], self._fill_task)

    def _fill_task(self, values: Mapping[str, Any], at: str) -> TaskConfig:
        found = fill(TaskConfig, values, at)
        labels = selected(self.kinds.tasks, "task", values, at).labels
        if labels not in (None, found.labels):
            raise ConfigError(f"{below(at, 'labels')}: task {found.task} has labels {labels!r}; give that")
        return found

    def _phases(self, item: RunEntry, where: str, layers: _Layers) -> list[PhaseEntry]:
        """Return the phases of the curriculum's file with the changes for all runs and for this run."""
        phases, found = self._curriculum(item, where), []
        check_keys(item.override.curriculum, [name for name, _, _ in phases], f"{where}.override.curriculum")
        for name, phase, at in phases:
            changes = [(of_all.curriculum.get(name, {}), f"{key}.curriculum.{name}") for of_all, key in layers]
            found.append(_with_changes((phase, at), changes, self._fill_phase))
        return found

    def _fill_phase(self, values: Mapping[str, Any], at: str) -> PhaseEntry:
        return fill_phase(self.kinds.marked(values), at)

    def _curriculum(self, item: RunEntry, where: str) -> list[tuple[str, dict[str, Any], str]]:
        """Return name, unchanged values and place of each phase in the curriculum's file."""
        values, path = self.files.read("curricula", item.curriculum, f"{where}.curriculum")
        phases = fill(CurriculumFile, values, path).phases
        found = [(phase, f"{path}: phases[{index}]") for index, phase in enumerate(phases)]
        for phase, at in found:
            if "name" not in phase:
                raise ConfigError(f"{at}: the key 'name' is missing; add it")
        return [(str(phase["name"]), phase, at) for phase, at in found]


_Placed = tuple[Mapping[str, Any], str]  # values, or changes of values, with their place for messages


def _with_changes(first: _Placed, changes: Iterable[_Placed], fill_one: Callable[[Mapping[str, Any], str], T]) -> T:
    """Merge all changes into the values `first` and return what `fill_one` makes of them.

    Raises: ConfigError; its place is that of the first values or changes that are wrong.
    """
    steps = [first]
    for changed, at in changes:
        steps.append((_changed(steps[-1][0], changed), at))
    try:
        return fill_one(*steps[-1])
    except ConfigError:
        for values, at in steps:
            fill_one(values, at)
        raise


def _changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge changes into values; a solver of another mode replaces the old one, because the modes' settings differ."""
    old, new = values.get("solver"), changes.get("solver")
    if isinstance(old, Mapping) and isinstance(new, Mapping) and new.get("mode", old.get("mode")) != old.get("mode"):
        return {**values, **changes}
    return overlay(values, changes)


def _check_solvers(model: Mapping[str, Any], phases: Iterable[PhaseConfig], item: RunEntry, where: str) -> None:
    is_implicit = model.get("is_implicit")
    wrong = [phase.name for phase in phases if is_implicit is not None and (phase.solver is not None) != is_implicit]
    if wrong:
        kind, needs = ("implicit", "a solver") if is_implicit else ("explicit", "solver: null")
        raise ConfigError(
            f"{where}: model {item.model!r} is {kind}, so phase {wrong[0]!r} of {item.curriculum!r} needs {needs}"
            "; name another model or another curriculum"
        )


def overlay(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `changes`; mappings are merged key by key, and neither argument is mutated."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = overlay(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
