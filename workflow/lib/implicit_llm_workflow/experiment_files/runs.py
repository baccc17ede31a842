"""The runs of an experiment: a model, a task and a curriculum, with the changes that apply to all runs and to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.tasks import TASKS
from implicit_llm_contracts.config.training import OptimizerConfig, ScheduleConfig
from implicit_llm_contracts.config.values import DISTINCT, Count, Seed
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_workflow.experiment_files.config_files import ConfigFiles
from implicit_llm_workflow.experiment_files.curricula import Phase, build_phases, check_curriculum, fill_phase
from implicit_llm_workflow.experiment_files.data_sets import DataSet
from implicit_llm_workflow.experiment_files.grids import Axis, AxisName
from implicit_llm_workflow.experiment_files.models import PretrainedModel, check_widths, fill_model, override_fields
from implicit_llm_workflow.experiment_files.values import check_keys
from implicit_llm_workflow.file_digests import safe_digests


@dataclass(frozen=True)
class Task:
    """workflow/config/tasks/<name>.yaml: a training recipe. The file shows every value but `reduction`.

    `labels`: aligned compares the logits of a token with its own label, next_token with the label after it.
    `total_steps`: optimizer steps of the whole curriculum. `batch_size` is in sequences, over all devices.
    """

    kind: str
    labels: Literal["aligned", "next_token"]
    total_steps: Count
    batch_size: Count
    precision: Literal["fp32", "bf16", "fp16"]
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    reduction: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        if self.kind not in TASKS:
            raise ValueError(f"kind: there is no {self.kind!r}; {nearest(self.kind, TASKS)}")
        if (labels := TASKS[self.kind].labels) not in (None, self.labels):
            raise ValueError(f"labels: kind {self.kind} has labels {labels!r}; give that")


@dataclass(frozen=True)
class Override:
    """Changes of the files that a run names: fields of the model and of the task, and of phases by their names."""

    model: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    curriculum: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunEntry:
    """An entry of `runs`: a data set of the experiment, and files of models/, tasks/ and curricula/ by name.

    `seeds`: of the initialisation and of the order of the data; one training each. `override` wins over the changes for
    all runs. `grid`: axes by name; the entry makes one run at each point, <name>-<axis><value>-<axis><value>.
    """

    data: str
    model: str
    task: str
    curriculum: str
    seeds: Annotated[tuple[Seed, ...], DISTINCT] = (0,)
    override: Override = field(default_factory=Override)
    grid: dict[AxisName, Axis] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A model trained on a data set, once for every seed.

    `model`: fields of its configuration without a solver, or {"pretrained": folder}, or of the hub {"pretrained": name,
    "revision": commit}.
    """

    name: str
    data: str
    model: Mapping[str, Any]
    task: Task
    phases: tuple[Phase, ...]
    seeds: tuple[int, ...]

    @property
    def is_implicit(self) -> bool:
        return any(phase.solver is not None for phase in self.phases)

    @property
    def final_phases(self) -> tuple[Phase, ...]:
        """The phases after which the training is complete: one, or one for every branch. These are evaluated."""
        return tuple(phase for phase in self.phases if phase.end_step == self.task.total_steps)

    def with_digests(self, digest: Callable[[Path], str | None]) -> Run:
        """The same; a pretrained model in a folder with its files' sha256: other content there is another model."""
        if "pretrained" not in self.model or "revision" in self.model:
            return self
        sha256 = safe_digests(Path(self.model["pretrained"]), digest)
        return replace(self, model={**self.model, "sha256": sha256})


class RunBuilder:
    """Makes the runs of one experiment file; `shared` are the changes for all of them."""

    def __init__(self, shared: Override, data: Mapping[str, DataSet], files: ConfigFiles) -> None:
        self._shared = shared
        self._data = data
        self._files = files

    def check_shared(self, items: Iterable[tuple[str, RunEntry]]) -> None:
        """Refuse changes for all runs that meet no phase of any run. Raises: ConfigError."""
        names = [phase["name"] for name, run in items for phase in self._read_phases(run, f"runs.{name}")]
        check_keys(self._shared.curriculum, dict.fromkeys(names), f"{self._files.source}: override.curriculum")

    def build(self, name: str, item: RunEntry) -> Run:
        """A run from its entry. Raises: ConfigError, one line that names file, key and fix."""
        at = f"runs.{name}"
        where = f"{self._files.source}: {at}"
        if item.data not in self._data:
            raise ConfigError(f"{where}.data: no data set {item.data!r} in this file; {nearest(item.data, self._data)}")
        data = self._data[item.data]
        task = self._task(item, at)
        if task.kind != data.kind:
            raise ConfigError(
                f"{where}.task: is for {task.kind} data, data set {item.data!r} is {data.kind}; "
                "name another task or another data set"
            )
        model = self._model(item, at)
        if "pretrained" not in model:
            model["vocab_size"] = data.vocab_size
            check_widths(model, f"{where}.model")
        phases = self._phases(item, task, at)
        _check_solvers(model, phases, item, f"{where}.curriculum")
        return Run(name, item.data, model, task, phases, item.seeds)

    def _model(self, item: RunEntry, at: str) -> dict[str, Any]:
        values, path = self._files.read("models", item.model, f"{at}.model", fill_model)
        shared, own = self._shared.model, item.override.model
        model = fill_model(values, path)
        if isinstance(model, PretrainedModel) and (own or shared):
            key = f"{at}.override.model" if own else "override.model"
            raise ConfigError(
                f"{self._files.source}: {key}: {path} is a pretrained model, whose fields are fixed; remove the "
                "override"
            )
        fields = override_fields(model.fields(path), shared, f"{self._files.source}: override.model")
        return override_fields(fields, own, f"{self._files.source}: {at}.override.model")

    def _task(self, item: RunEntry, at: str) -> Task:
        values, path = self._files.read("tasks", item.task, f"{at}.task", partial(fill, Task))
        task = fill(Task, values, path)
        for changes, key in ((self._shared.task, "override.task"), (item.override.task, f"{at}.override.task")):
            if changes:
                values = overlay(values, changes)
                task = fill(Task, values, f"{self._files.source}: {key}")
        return task

    def _read_phases(self, item: RunEntry, at: str) -> list[Mapping[str, Any]]:
        return self._files.read("curricula", item.curriculum, f"{at}.curriculum", check_curriculum)[0]["phases"]

    def _phases(self, item: RunEntry, task: Task, at: str) -> tuple[Phase, ...]:
        source = self._files.source
        phases = self._read_phases(item, at)
        own = item.override.curriculum
        check_keys(own, [phase["name"] for phase in phases], f"{source}: {at}.override.curriculum")
        for changes, key in ((self._shared.curriculum, "override"), (own, f"{at}.override")):
            phases = [_changed_phase(phase, changes, f"{source}: {key}.curriculum") for phase in phases]
        return build_phases(phases, task.total_steps, f"{source}: {at}.curriculum")


def _changed_phase(phase: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A solver of another mode replaces the old one: the settings of the modes differ. Raises: ConfigError."""
    mine = changes.get(phase["name"])
    if mine is None:
        return phase
    old, new = phase["solver"], mine.get("solver")
    is_replaced = old and isinstance(new, Mapping) and new.get("mode", old["mode"]) != old["mode"]
    changed = {**phase, **mine} if is_replaced else overlay(phase, mine)
    fill_phase(changed, f"{where}.{phase['name']}")
    return changed


def _check_solvers(model: Mapping[str, Any], phases: tuple[Phase, ...], item: RunEntry, where: str) -> None:
    is_implicit = model.get("is_implicit")
    wrong = [phase.name for phase in phases if is_implicit is not None and (phase.solver is not None) != is_implicit]
    if wrong:
        kind, needs = ("implicit", "a solver") if is_implicit else ("explicit", "solver: null")
        raise ConfigError(
            f"{where}: model {item.model!r} is {kind}, so phase {wrong[0]!r} of {item.curriculum!r} needs {needs}"
            "; name another model or another curriculum"
        )


def overlay(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`, mappings merged key by key; neither is mutated."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = overlay(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
