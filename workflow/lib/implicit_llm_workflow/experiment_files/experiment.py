"""An experiment file with everything that it refers to, as frozen dataclasses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.config.values import SOME, Name, RunName, matching
from implicit_llm_contracts.plugins import Plugin, declare_plugin
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_report.config import ReportConfig
from implicit_llm_workflow.experiment_files.config_files import ConfigFiles, shown_path
from implicit_llm_workflow.experiment_files.data_sets import DataSet, build_data_set
from implicit_llm_workflow.experiment_files.evaluations import Evaluation, build_evaluation
from implicit_llm_workflow.experiment_files.excerpts import Excerpt, check_origins
from implicit_llm_workflow.experiment_files.grids import GridPoint, expand_grids
from implicit_llm_workflow.experiment_files.peers import Peer, build_peer, check_peers
from implicit_llm_workflow.experiment_files.runs import Override, Run, RunBuilder, RunEntry
from implicit_llm_workflow.experiment_files.values import check_keys, fill_entry
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml

_Entry = dict[str, Any]
_ExcerptName = Annotated[
    str,
    matching(r"(figure|table)_[a-z0-9_]+", "figure_ or table_ with lower-case letters, digits and underscores"),
]


@dataclass(frozen=True)
class ExperimentFile:
    """workflow/config/<name>.yaml. Every field belongs to the identity of some job; machine facts are in profiles/.

    `name` is also the folder under results/ and the MLflow experiment. `description` is for the reader alone.
    `data`: data sets, each with one training set and the sets that its models are evaluated on. `override`: changes to
    the models, tasks and curricula of all `runs`. `evaluations` are done for every run whose data fits the kind, after
    every phase that ends the training. `peers`: models that were trained elsewhere. `excerpts`: single figures and
    tables of the paper, each a target such as `snakemake figure_1_right` with only the jobs that it needs. `report`:
    title, headline_mode and minimum_layers of the report. `plugins`: Python files, relative to this one, that add to
    what it can name.
    """

    name: Name
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
    name: str
    source: str
    data: Mapping[str, DataSet]
    runs: Mapping[str, Run]
    evaluations: Mapping[str, Evaluation]
    report: Mapping[str, Any]
    peers: Mapping[str, Peer] = field(default_factory=dict)
    excerpts: Mapping[str, Excerpt] = field(default_factory=dict)
    plugins: Mapping[str, Plugin] = field(default_factory=dict)

    def evaluations_of(self, run: Run) -> list[Evaluation]:
        """Those that are done for a run; a sweep is for implicit ones, an explicit one has nothing to sweep."""
        mine = [item for item in self.evaluations.values() if item.applies_to(run.name, self.data[run.data])]
        return [item for item in mine if run.is_implicit or not item.sweep]

    def evaluations_of_peer(self, peer: Peer) -> list[Evaluation]:
        """Those that are done for a peer."""
        return [item for item in self.evaluations.values() if peer.has(item, self.data[peer.data])]

    @property
    def models(self) -> Iterator[tuple[str, bool | None, list[Evaluation]]]:
        """Name of each run and peer, whether it is implicit (None: not known), and the evaluations that are done."""
        yield from ((run.name, run.is_implicit, self.evaluations_of(run)) for run in self.runs.values())
        yield from ((peer.name, None, self.evaluations_of_peer(peer)) for peer in self.peers.values())


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file. Raises: ConfigError, one line that names file, key and fix."""
    return build_experiment(read_yaml(path), ConfigFiles(path))


def build_experiment(values: Mapping[str, Any], files: ConfigFiles) -> Experiment:
    """An experiment from its values. Raises: ConfigError, one line that names file, key and fix."""
    source = files.source
    file = fill(ExperimentFile, values, source)
    plugins = _plugins(file.plugins, files)
    data = {name: build_data_set(name, item, source) for name, item in file.data.items()}
    runs = _runs(file, data, files)
    evaluations = {name: build_evaluation(name, item, source) for name, item in file.evaluations.items()}
    peers = {name: build_peer(name, item, source) for name, item in file.peers.items()}
    excerpts = {
        name: fill_entry(Excerpt, name, item, f"{source}: excerpts.{name}") for name, item in file.excerpts.items()
    }
    report = _report(file, source)
    experiment = Experiment(file.name, source, data, runs, evaluations, report, peers, excerpts, plugins)
    trained = {f"{run.name}-s{seed}" for run in runs.values() for seed in run.seeds}
    check_peers(experiment.peers.values(), data, evaluations, trained, source)
    _check_evaluations(experiment)
    _check_repeated(experiment)
    evaluated = {name: [item.name for item in evaluations] for name, _, evaluations in experiment.models}
    check_origins(excerpts.values(), evaluated, source)
    return experiment


def _plugins(names: tuple[str, ...], files: ConfigFiles) -> dict[str, Plugin]:
    """The plugins by path, known from now on to what reads the rest of the experiment."""
    found: dict[str, Plugin] = {}
    for name in names:
        path = shown_path(files.path.parent / name)
        plugin = declare_plugin(path)
        for other, its in found.items():
            for twice in {*its.names, *its.figures} & {*plugin.names, *plugin.figures}:
                raise ConfigError(f"{files.source}: plugins: {other} and {path} both add {twice!r}; rename one")
        found[path.as_posix()] = plugin
    return found


def _runs(file: ExperimentFile, data: Mapping[str, DataSet], files: ConfigFiles) -> dict[str, Run]:
    for name, item in file.runs.items():
        fill(RunEntry, item, f"{files.source}: runs.{name}")
    points = expand_grids(file.runs, files.source)
    builder = RunBuilder(file.override, data, files)
    entries = {point.name: fill(RunEntry, point.item, f"{files.source}: runs.{point.name}") for point in points}
    builder.check_shared(entries.items())
    return {point.name: _run(point, entries[point.name], builder) for point in points}


def _report(file: ExperimentFile, source: str) -> dict[str, Any]:
    at = f"{source}: report"
    check_keys(file.report, ("title", "headline_mode", "minimum_layers"), at)
    fill(ReportConfig, {"experiment": file.name, **file.report}, at)
    return file.report


def _run(point: GridPoint, entry: RunEntry, builder: RunBuilder) -> Run:
    try:
        return builder.build(point.name, entry)
    except ConfigError as error:
        raise (ConfigError(f"{error} ({point.at})") if point.at else error) from error


def _check_evaluations(experiment: Experiment) -> None:
    """An evaluation that meets no run is a mistake, not an empty table."""
    done = {item.name for _, _, evaluations in experiment.models for item in evaluations}
    for name, item in experiment.evaluations.items():
        kinds = EVALUATION_KINDS[item.kind].data
        if name not in done and any(experiment.data[run.data].kind in kinds for run in experiment.runs.values()):
            run = "implicit run" if item.sweep else "run"
            raise ConfigError(
                f"{experiment.source}: evaluations.{name}.runs: {', '.join(item.runs)} matches no {run} with "
                f"{' or '.join(kinds)} data; runs are {', '.join(experiment.runs)}"
            )
        if name not in done:
            raise ConfigError(
                f"{experiment.source}: evaluations.{name}.kind: no run has {' or '.join(kinds)} data, which "
                f"{item.kind} is for; add a run or remove the evaluation"
            )


def _check_repeated(experiment: Experiment) -> None:
    """A number that two evaluations give would count in the report as that of another seed."""
    for model, is_implicit, evaluations in experiment.models:
        for first, second in combinations(evaluations, 2):
            if first.repeats(second, is_implicit=is_implicit):
                parts = EVALUATION_KINDS[first.kind].parts
                choose = f"peers.{model}.evaluations" if model in experiment.peers else "runs"
                raise ConfigError(
                    f"{experiment.source}: evaluations.{second.name}.{parts}: {first.name} gives the same numbers of "
                    f"{model}; let them have different {parts}, or choose one by `{choose}`"
                )
