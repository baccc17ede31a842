"""The runs of an experiment: a model, a task and a curriculum, with the changes that apply to all runs and to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.places import local_folder
from implicit_llm_workflow.experiment_files.config_files import ConfigFiles
from implicit_llm_workflow.experiment_files.curricula import Phase, build_phases
from implicit_llm_workflow.experiment_files.data_sets import DataSet
from implicit_llm_workflow.experiment_files.library_configs import check_widths, model_fields, override_fields
from implicit_llm_workflow.experiment_files.recipes import Task, build_task
from implicit_llm_workflow.experiment_files.validation import check_keys, validate
from implicit_llm_workflow.file_digests import safe_digests

DEFAULT_SEEDS = (0,)


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

    def __init__(self, shared: Mapping[str, Any], data: Mapping[str, DataSet], files: ConfigFiles) -> None:
        self._shared = shared
        self._data = data
        self._files = files

    def check_shared(self, items: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Refuse changes for all runs that are no valid ones or meet no run. Raises: ConfigError."""
        source = self._files.source
        validate(self._shared.get("task", {}), "task", source, prefix="override.task", is_partial=True)
        for phase, changes in self._shared.get("curriculum", {}).items():
            validate(changes, "curriculum#phase", source, prefix=f"override.curriculum.{phase}", is_partial=True)
        curricula = [
            self._files.read("curricula", run["curriculum"], f"runs.{name}.curriculum")[0] for name, run in items
        ]
        names = dict.fromkeys(phase["name"] for curriculum in curricula for phase in curriculum["phases"])
        check_keys(self._shared.get("curriculum", {}), names, f"{source}: override.curriculum")

    def build(self, name: str, item: Mapping[str, Any]) -> Run:
        """A run from validated values. Raises: ConfigError, one line that names file, key and fix."""
        at = f"runs.{name}"
        where = f"{self._files.source}: {at}"
        if item["data"] not in self._data:
            raise ConfigError(
                f"{where}.data: no data set {item['data']!r} in this file; {nearest(item['data'], self._data)}"
            )
        data = self._data[item["data"]]
        task = self._task(item, at)
        if task.kind != data.kind:
            raise ConfigError(
                f"{where}.task: is for {task.kind} data, data set {item['data']!r} is {data.kind}; "
                "name another task or another data set"
            )
        model = self._model(item, at)
        if "pretrained" not in model:
            model["vocab_size"] = data.vocab_size
            check_widths(model, f"{where}.model")
        phases = self._phases(item, task, at)
        _check_solvers(model, phases, item, f"{where}.curriculum")
        return Run(
            name, item["data"], model, task, phases, tuple(int(seed) for seed in item.get("seeds", DEFAULT_SEEDS))
        )

    def _changes(self, item: Mapping[str, Any], part: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """What is changed for all runs, and for this one."""
        return self._shared.get(part, {}), item.get("override", {}).get(part, {})

    def _model(self, item: Mapping[str, Any], at: str) -> dict[str, Any]:
        values, source = self._files.read("models", item["model"], f"{at}.model")
        shared, own = self._changes(item, "model")
        if "pretrained" in values:
            if own or shared:
                key = f"{at}.override.model" if own else "override.model"
                raise ConfigError(
                    f"{self._files.source}: {key}: {source} is a pretrained model, whose fields are "
                    "fixed; remove the override"
                )
            return _pretrained(values, source)
        config = values["config"]
        fields = model_fields(config, f"{source}: config") if isinstance(config, str) else dict(config)
        if "package" in values:
            fields["package"] = values["package"]
        fields = override_fields(fields, values.get("override", {}), f"{source}: override")
        fields = override_fields(fields, shared, f"{self._files.source}: override.model")
        return override_fields(fields, own, f"{self._files.source}: {at}.override.model")

    def _task(self, item: Mapping[str, Any], at: str) -> Task:
        values, source = self._files.read("tasks", item["task"], f"{at}.task")
        shared, own = self._changes(item, "task")
        validate(own, "task", self._files.source, prefix=f"{at}.override.task", is_partial=True)
        merged = overlay(overlay(values, shared), own)
        return build_task(
            merged, f"{self._files.source}: {at}.override.task" if merged != values else f"{source}: task"
        )

    def _phases(self, item: Mapping[str, Any], task: Task, at: str) -> tuple[Phase, ...]:
        values, _ = self._files.read("curricula", item["curriculum"], f"{at}.curriculum")
        shared, own = self._changes(item, "curriculum")
        source = self._files.source
        check_keys(own, [phase["name"] for phase in values["phases"]], f"{source}: {at}.override.curriculum")
        phases = []
        for phase in values["phases"]:
            name = phase["name"]
            mine = own.get(name, {})
            validate(mine, "curriculum#phase", source, prefix=f"{at}.override.curriculum.{name}", is_partial=True)
            phases.append(_changed_phase(phase, overlay(shared.get(name, {}), mine)))
            validate(phases[-1], "curriculum#phase", source, prefix=f"{at}.curriculum.{name}")
        return build_phases(phases, task.total_steps, f"{source}: {at}.curriculum")


def _pretrained(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The folder, or the name on the hub and the commit. Raises: ConfigError, one line that names file, key and fix."""
    name, is_folder = values["pretrained"], local_folder(Path(values["pretrained"])) is not None
    if is_folder and "revision" in values:
        raise ConfigError(f"{source}: revision: {name} is a folder, which has none; remove it")
    if not is_folder and "revision" not in values:
        raise ConfigError(
            f"{source}: revision: is missing, and {name} is no folder; correct pretrained, or add the commit of a "
            f"model of the hub, which `git ls-remote https://huggingface.co/{name} HEAD` prints"
        )
    return {key: values[key] for key in ("pretrained", "revision") if key in values}


def _changed_phase(phase: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A solver of another mode replaces the old one: the settings of the modes differ."""
    solver, new = phase["solver"], changes.get("solver")
    if solver and new and new.get("mode", solver["mode"]) != solver["mode"]:
        return {**phase, **changes}
    return overlay(phase, changes)


def _check_solvers(model: Mapping[str, Any], phases: tuple[Phase, ...], item: Mapping[str, Any], where: str) -> None:
    is_implicit = model.get("is_implicit")
    wrong = [phase.name for phase in phases if is_implicit is not None and (phase.solver is not None) != is_implicit]
    if wrong:
        kind, needs = ("implicit", "a solver") if is_implicit else ("explicit", "solver: null")
        raise ConfigError(
            f"{where}: model {item['model']!r} is {kind}, so phase {wrong[0]!r} of {item['curriculum']!r} needs {needs}"
            "; name another model or another curriculum"
        )


def overlay(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`, mappings merged key by key; neither is mutated."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = overlay(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
