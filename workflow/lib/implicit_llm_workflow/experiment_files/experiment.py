"""Build an experiment from its file and all files that it names, as frozen dataclasses."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from implicit_llm_contracts.config.fill import Only, fill
from implicit_llm_contracts.config.values import DISTINCT, SOME, Name, RunName, Text, matching
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.plugins import BUILTIN, Kinds
from implicit_llm_report.config import VALIDATION, ReportConfig
from implicit_llm_report.registry import figures_with
from implicit_llm_workflow.experiment_files.data_sets import DataSet, build_data_set
from implicit_llm_workflow.experiment_files.evaluations import Evaluation, Peer, build_evaluation
from implicit_llm_workflow.experiment_files.runs import Override, Run, RunBuilder, expand_grids
from implicit_llm_workflow.experiment_files.yaml_files import (
    ConfigFiles,
    check_keys,
    check_patterns,
    experiment_path,
    fill_entry,
    matches,
    read_yaml,
)

RESERVED = ("benchmarks", "by-hand", "downloads", "reference")  # folders of results/ that are no experiments
_Entry = dict[str, Any]
_ExcerptName = Annotated[
    str,
    matching(r"(figure|table)_[a-z0-9_]+", "figure_ or table_ with lower-case letters, digits and underscores"),
]


_Shown = Annotated[tuple[Text, ...], DISTINCT]


@dataclass(frozen=True)
class Origin:
    """The source of an excerpt's numbers: these evaluations of these models, both given as patterns of names.

    If `evaluations` is empty, the source is the training of the runs.
    """

    evaluations: tuple[Text, ...]
    runs: Annotated[tuple[Text, ...], SOME] = ("*",)

    def has(self, run: str, evaluation: str | None) -> bool:
        """Return whether the origin has this evaluation of this model, or its training if `evaluation` is None."""
        is_mine = matches(evaluation, self.evaluations) if evaluation is not None else not self.evaluations
        return is_mine and matches(run, self.runs)


@dataclass(frozen=True)
class Excerpt:
    """A figure or table of the paper, on a page with `title`. `figures`, `tables`: those of the report that it shows.

    `from`: the sources of its numbers. All training phases of an evaluated model belong to its sources too.
    """

    name: str
    title: Text
    from_: Annotated[tuple[Origin, ...], SOME]
    figures: _Shown = ()
    tables: _Shown = ()


@dataclass(frozen=True)
class ExperimentFile:
    """A file workflow/config/<name>.yaml. All keys except `description` affect identities of jobs.

    `name`: also the folder below results/ and the MLflow experiment. `description`: a text for readers only. `data`:
    data sets, each with one training set and the sets on which its models are evaluated. `override`: changes of the
    models, tasks and curricula of all `runs`. `evaluations`: by default they apply to every run whose data fits the
    kind, after every phase that ends the training run. `peers`: external baselines, which are models that were trained
    elsewhere. `excerpts`: single figures and tables of the paper; each is a target such as `snakemake figure_1_right`
    that runs only the jobs it needs. `report`: title, note, names, front and minimum_layers of the report. `plugins`:
    Python files, relative to the folder of this file, that add families, solver methods, groups, tasks, evaluations or
    figures. Machine settings are in profiles/.
    """

    name: Annotated[Name, Only(lambda name: name not in RESERVED, f"another name than {', '.join(RESERVED)}")]
    data: Annotated[dict[Name, _Entry], SOME]
    runs: Annotated[dict[RunName, _Entry], SOME]
    description: str = ""
    override: Override = field(default_factory=Override)
    evaluations: dict[Name, _Entry] = field(default_factory=dict)
    peers: dict[RunName, _Entry] = field(default_factory=dict)
    excerpts: dict[_ExcerptName, _Entry] = field(default_factory=dict)
    report: _Entry = field(default_factory=dict)
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """An experiment; `read` stores the values of its YAML files, from which `planned_experiment` builds it again."""

    name: str
    source: str
    data: Mapping[str, DataSet]
    runs: Mapping[str, Run]
    evaluations: Mapping[str, Evaluation]
    report: Mapping[str, Any]
    peers: Mapping[str, Peer] = field(default_factory=dict)
    excerpts: Mapping[str, Excerpt] = field(default_factory=dict)
    kinds: Kinds = BUILTIN
    read: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def models(self) -> list[Run | Peer]:
        return [*self.runs.values(), *self.peers.values()]

    def evaluations_of(self, model: Run | Peer) -> list[Evaluation]:
        """Return the evaluations that apply to this model."""
        data = self.data[model.data].kind
        return [item for item in self.evaluations.values() if data in item.kind.data and model.takes(item)]


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file. Raises: UserError with one line that names file, key and fix."""
    return build_experiment(read_yaml(path), ConfigFiles(path))


def known_experiment(name: str, file: str) -> Experiment:
    """Read the experiment that the user calls `name` from `file`, its path or a name that `experiment_path` knows.

    Raises: UserError with one line that names file, key and fix, also if the experiment was renamed since it ran.
    """
    experiment = load_experiment(experiment_path(file))
    if file != name and experiment.name != name:
        raise ConfigError(f"{name}: {file} is called {experiment.name} by now; name the file, or {experiment.name}")
    return experiment


def planned_experiment(read: Mapping[str, Any]) -> Experiment:
    """Return the experiment with these values of `Experiment.read`, whatever its YAML files contain by now.

    Its plugins, the library's configurations and the task files of lm-eval are read again.
    """
    return build_experiment(read["values"], ConfigFiles(Path(read["path"]), read["source"], read["known"]))


def build_experiment(values: Mapping[str, Any], files: ConfigFiles) -> Experiment:
    """Return an experiment from its values. Raises: UserError with one line that names file, key and fix."""
    source = files.source
    file = fill(ExperimentFile, values, source)
    folder = files.path.resolve().parent
    # Identities have these paths, so they do not depend on how the path of the experiment was typed.
    kinds = Kinds.read((Path(os.path.relpath(folder / name)) for name in file.plugins), f"{source}: plugins")
    data = {name: build_data_set(name, kinds.marked(item), source, kinds) for name, item in file.data.items()}
    runs = _runs(file, data, files, kinds)
    evaluations = {
        name: build_evaluation(name, kinds.marked(item), source, kinds) for name, item in file.evaluations.items()
    }
    peers = {name: fill_entry(Peer, name, item, f"{source}: peers.{name}") for name, item in file.peers.items()}
    excerpts = {
        name: fill_entry(Excerpt, name, item, f"{source}: excerpts.{name}") for name, item in file.excerpts.items()
    }
    report = _report(file, runs, kinds, source)
    read = {"values": values, "path": str(files.path), "source": source, "known": files.known}
    experiment = Experiment(file.name, source, data, runs, evaluations, report, peers, excerpts, kinds, read)
    for check in (_check_names, _check_peers, _check_evaluations, _check_splits, _check_repeated, _check_origins):
        check(experiment)
    return experiment


def _runs(file: ExperimentFile, data: Mapping[str, DataSet], files: ConfigFiles, kinds: Kinds) -> dict[str, Run]:
    builder, found = RunBuilder(file.override, data, files, kinds), {}
    entries = expand_grids(file.runs, files.source)
    builder.check_shared(entry for entry, _ in entries.values())
    for name, (entry, at) in entries.items():
        try:
            found[name] = builder.build(entry)
        except ConfigError as error:
            raise (ConfigError(f"{error} ({at})") if at else error) from error
    return found


def _report(file: ExperimentFile, runs: Mapping[str, Run], kinds: Kinds, source: str) -> dict[str, Any]:
    at = f"{source}: report"
    check_keys(file.report, ("title", "note", "names", "front", "minimum_layers"), at)
    config = fill(ReportConfig, {"experiment": file.name, **file.report}, at)
    check_keys(config.names, runs, f"{at}.names")
    check_keys(config.front.figures, figures_with(kinds), f"{at}.front.figures")
    return file.report


def _check_names(experiment: Experiment) -> None:
    """Refuse one name for two models of a data set, which the report would average like seeds of one model."""
    names, owners = experiment.report.get("names", {}), dict[tuple[str, str], str]()
    for model in experiment.models:
        shown = names.get(model.name, model.name)
        other = owners.setdefault((model.data, shown), model.name)
        if other != model.name:
            raise ConfigError(
                f"{experiment.source}: report.names: {other} and {model.name} would both be shown as {shown!r}, and "
                "the report would average them like seeds; give them different names"
            )


def _check_peers(experiment: Experiment) -> None:
    trained = {f"{run.name}-s{seed}" for run in experiment.runs.values() for seed in run.seeds}
    data = experiment.data
    for peer in experiment.peers.values():
        at = f"{experiment.source}: peers.{peer.name}"
        if peer.name in trained:
            raise ConfigError(f"{at}: is also the name of a trained model; rename the peer")
        if peer.data not in data:
            raise ConfigError(f"{at}.data: no data set {peer.data!r} in this file; {nearest(peer.data, data)}")
        check_patterns(peer.evaluations or (), experiment.evaluations, f"{at}.evaluations: no evaluation is called")
        if not experiment.evaluations_of(peer):
            raise ConfigError(
                f"{at}.evaluations: none fits its {data[peer.data].kind} data; add an evaluation or remove the peer"
            )


def _check_evaluations(experiment: Experiment) -> None:
    """Refuse an evaluation that applies to no model, which would be an empty table in the report."""
    done = {item.name for model in experiment.models for item in experiment.evaluations_of(model)}
    for name, item in experiment.evaluations.items():
        if name not in done:
            run = "implicit run" if item.sweep else "run"
            raise ConfigError(
                f"{experiment.source}: evaluations.{name}: no {run} called {' or '.join(item.runs)} has "
                f"{' or '.join(item.kind.data)} data, which kind {item.settings.kind} is for; correct `runs`, or "
                f"remove the evaluation; runs are {', '.join(experiment.runs)}"
            )


def _check_splits(experiment: Experiment) -> None:
    for model in experiment.models:
        for item in experiment.evaluations_of(model):
            if item.split == VALIDATION and not any(experiment.data[model.data].validation_nodes()):
                raise ConfigError(
                    f"{experiment.source}: evaluations.{item.name}.split: data.{model.data}, which {model.name} was "
                    f"trained on, has no {VALIDATION} sets; add its key {VALIDATION}, or leave the run out by `runs`"
                )


def _check_repeated(experiment: Experiment) -> None:
    """Refuse two evaluations that compute the same number of a model, because the report needs one number per seed."""
    for model in experiment.models:
        for first, second in combinations(experiment.evaluations_of(model), 2):
            if first.repeats(second, is_implicit=model.is_implicit):
                parts = first.kind.parts
                choose = f"peers.{model.name}.evaluations" if model.name in experiment.peers else "runs"
                raise ConfigError(
                    f"{experiment.source}: evaluations.{second.name}.{parts}: {first.name} gives the same numbers of "
                    f"{model.name}; let them have different {parts}, or choose one by `{choose}`"
                )


def _check_origins(experiment: Experiment) -> None:
    """Raise ConfigError for a pattern of an excerpt that matches nothing."""
    evaluated = {model.name: [item.name for item in experiment.evaluations_of(model)] for model in experiment.models}
    for excerpt in experiment.excerpts.values():
        for index, origin in enumerate(excerpt.from_):
            at = f"{experiment.source}: excerpts.{excerpt.name}.from[{index}]"
            check_patterns(origin.runs, evaluated, f"{at}.runs: no run or peer is called")
            done = {name for run, names in evaluated.items() if matches(run, origin.runs) for name in names}
            check_patterns(origin.evaluations, done, f"{at}.evaluations: none of these runs has one called")
