"""An experiment file with everything that it refers to, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_llm_workflow.config_files import ConfigFiles
from implicit_llm_workflow.errors import ConfigError
from implicit_llm_workflow.groups import vocabulary_size
from implicit_llm_workflow.library_configs import model_fields, override_fields
from implicit_llm_workflow.overrides import overlay
from implicit_llm_workflow.recipes import Phase, Task, build_phases, build_task
from implicit_llm_workflow.validation import check_keys, nearest, validate

DEFAULT_SHARD_SAMPLES = 131_072
DEFAULT_SEEDS = (0,)


@dataclass(frozen=True)
class TrainSplit:
    """Several hard fractions are mixed in equal shares of the sequences."""

    length: int
    hard_fractions: tuple[float, ...]
    num_samples: int


@dataclass(frozen=True)
class TestSplit:
    """One test set for every pair of length and hard fraction."""

    lengths: tuple[int, ...]
    hard_fractions: tuple[float, ...]
    num_samples: int


@dataclass(frozen=True)
class DataSet:
    name: str
    kind: str
    group: str
    monoid: str
    seed: int
    shard_samples: int
    vocabulary_size: int
    train: TrainSplit
    test: TestSplit


@dataclass(frozen=True)
class Run:
    """A model trained on a data set, once for every seed. `model`: fields of its configuration, no solver."""

    name: str
    data: str
    model: Mapping[str, Any]
    task: Task
    phases: tuple[Phase, ...]
    seeds: tuple[int, ...]

    @property
    def is_implicit(self) -> bool:
        return any(phase.solver is not None for phase in self.phases)


@dataclass(frozen=True)
class Evaluation:
    name: str
    kind: str
    modes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Experiment:
    name: str
    source: str
    data: Mapping[str, DataSet]
    runs: Mapping[str, Run]
    evaluations: Mapping[str, Evaluation]
    report: Mapping[str, Any]


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file. Raises: ConfigError, one line that names file, key and fix."""
    files = ConfigFiles(path)
    return build_experiment(files.experiment(), files)


def build_experiment(values: Mapping[str, Any], files: ConfigFiles) -> Experiment:
    """An experiment from its values. Raises: ConfigError, one line that names file, key and fix."""
    validate(values, "experiment", files.source)
    data = {name: _data_set(name, item, files.source) for name, item in values["data"].items()}
    shared = values.get("override", {})
    _check_shared_values(shared, files.source)
    _check_shared_phases(shared, values["runs"], files)
    runs = {name: _run(name, item, shared, data, files) for name, item in values["runs"].items()}
    evaluations = {name: _evaluation(name, item, files.source) for name, item in values.get("evaluations", {}).items()}
    return Experiment(values["name"], files.source, data, runs, evaluations, values.get("report", {}))


def _data_set(name: str, item: Mapping[str, Any], source: str) -> DataSet:
    monoid = item.get("monoid", "none")
    hard = item["train"]["hard_fraction"]
    train = TrainSplit(
        length=int(item["train"]["length"]),
        hard_fractions=tuple(float(value) for value in (hard if isinstance(hard, list) else [hard])),
        num_samples=int(item["train"]["num_samples"]),
    )
    test = TestSplit(
        lengths=tuple(int(length) for length in item["test"]["lengths"]),
        hard_fractions=tuple(float(value) for value in item["test"]["hard_fractions"]),
        num_samples=int(item["test"]["num_samples"]),
    )
    return DataSet(
        name=name,
        kind=item["kind"],
        group=item["group"],
        monoid=monoid,
        seed=int(item.get("seed", 0)),
        shard_samples=int(item.get("shard_samples", DEFAULT_SHARD_SAMPLES)),
        vocabulary_size=vocabulary_size(item["group"], monoid, f"{source}: data.{name}.group"),
        train=train,
        test=test,
    )


def _run(
    name: str, item: Mapping[str, Any], shared: Mapping[str, Any], data: Mapping[str, DataSet], files: ConfigFiles
) -> Run:
    at = f"runs.{name}"
    if item["data"] not in data:
        raise ConfigError(
            f"{files.source}: {at}.data: no data set {item['data']!r} in this file; {nearest(item['data'], data)}"
        )
    own = item.get("override", {})
    task = _task(item["task"], shared.get("task", {}), own.get("task", {}), at, files)
    kind = data[item["data"]].kind
    if task.kind != kind:
        raise ConfigError(f"{files.source}: {at}.task: is for {task.kind} data, data set {item['data']!r} is {kind}")
    model = _model(item["model"], shared.get("model", {}), own.get("model", {}), at, files)
    model["vocab_size"] = data[item["data"]].vocabulary_size
    phases = _phases(item["curriculum"], shared.get("curriculum", {}), own.get("curriculum", {}), task, at, files)
    _check_solvers(model, phases, item, f"{files.source}: {at}.curriculum")
    return Run(name, item["data"], model, task, phases, tuple(int(seed) for seed in item.get("seeds", DEFAULT_SEEDS)))


def _check_solvers(model: Mapping[str, Any], phases: tuple[Phase, ...], item: Mapping[str, Any], where: str) -> None:
    is_implicit = model.get("is_implicit")
    wrong = [phase.name for phase in phases if is_implicit is not None and (phase.solver is not None) != is_implicit]
    if wrong:
        kind, needs = ("implicit", "a solver") if is_implicit else ("explicit", "solver: null")
        raise ConfigError(
            f"{where}: model {item['model']!r} is {kind}, so phase {wrong[0]!r} of {item['curriculum']!r} needs {needs}"
        )


def _model(name: str, shared: Mapping[str, Any], own: Mapping[str, Any], at: str, files: ConfigFiles) -> dict[str, Any]:
    values, source = files.read("models", name, f"{at}.model")
    fields = model_fields(values["config"], f"{source}: config")
    fields = override_fields(fields, values.get("override", {}), f"{source}: override")
    fields = override_fields(fields, shared, f"{files.source}: override.model")
    return override_fields(fields, own, f"{files.source}: {at}.override.model")


def _task(name: str, shared: Mapping[str, Any], own: Mapping[str, Any], at: str, files: ConfigFiles) -> Task:
    values, source = files.read("tasks", name, f"{at}.task")
    validate(own, "task", files.source, prefix=f"{at}.override.task", is_partial=True)
    merged = overlay(overlay(values, shared), own)
    return build_task(merged, f"{files.source}: {at}.override.task" if merged != values else f"{source}: ".rstrip())


def _phases(
    name: str, shared: Mapping[str, Any], own: Mapping[str, Any], task: Task, at: str, files: ConfigFiles
) -> tuple[Phase, ...]:
    values, _ = files.read("curricula", name, f"{at}.curriculum")
    names = [phase["name"] for phase in values["phases"]]
    check_keys(own, names, f"{files.source}: {at}.override.curriculum")
    phases = []
    for phase in values["phases"]:
        mine = own.get(phase["name"], {})
        validate(
            mine, "curriculum#phase", files.source, prefix=f"{at}.override.curriculum.{phase['name']}", is_partial=True
        )
        phases.append(_changed_phase(phase, overlay(shared.get(phase["name"], {}), mine)))
        validate(phases[-1], "curriculum#phase", files.source, prefix=f"{at}.curriculum.{phase['name']}")
    return build_phases(phases, task.total_steps, f"{files.source}: {at}.curriculum")


def _changed_phase(phase: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A solver of another mode replaces the old one: the settings of the modes differ."""
    solver, new = phase["solver"], changes.get("solver")
    if solver and new and new.get("mode", solver["mode"]) != solver["mode"]:
        return {**phase, **changes}
    return overlay(phase, changes)


def _check_shared_values(shared: Mapping[str, Any], source: str) -> None:
    validate(shared.get("task", {}), "task", source, prefix="override.task", is_partial=True)
    for phase, changes in shared.get("curriculum", {}).items():
        validate(changes, "curriculum#phase", source, prefix=f"override.curriculum.{phase}", is_partial=True)


def _check_shared_phases(shared: Mapping[str, Any], runs: Mapping[str, Any], files: ConfigFiles) -> None:
    """A phase that is overridden for all runs must exist in at least one of them."""
    curricula = [files.read("curricula", run["curriculum"], f"runs.{name}.curriculum")[0] for name, run in runs.items()]
    names = dict.fromkeys(phase["name"] for curriculum in curricula for phase in curriculum["phases"])
    check_keys(shared.get("curriculum", {}), names, f"{files.source}: override.curriculum")


def _evaluation(name: str, item: Mapping[str, Any], source: str) -> Evaluation:
    names = [mode["name"] for mode in item["modes"]]
    repeated = next((mode for mode in names if names.count(mode) > 1), None)
    if repeated is not None:
        raise ConfigError(f"{source}: evaluations.{name}.modes: two modes are called {repeated!r}; rename one")
    modes = tuple(
        {key: float(value) if key == "eval_tol" else value for key, value in mode.items()} for mode in item["modes"]
    )
    return Evaluation(name, item["kind"], modes)
