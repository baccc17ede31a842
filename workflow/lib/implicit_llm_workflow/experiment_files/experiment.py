"""An experiment file with everything that it refers to, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.experiment_files.config_files import ConfigFiles
from implicit_llm_workflow.experiment_files.data_sets import DataSet, build_data_set
from implicit_llm_workflow.experiment_files.evaluations import Evaluation, build_evaluation
from implicit_llm_workflow.experiment_files.excerpts import Excerpt, build_excerpt, check_origins
from implicit_llm_workflow.experiment_files.grids import GridPoint, expand_grids
from implicit_llm_workflow.experiment_files.peers import Peer, build_peer, check_peers
from implicit_llm_workflow.experiment_files.runs import Run, RunBuilder
from implicit_llm_workflow.experiment_files.validation import validate


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

    def evaluations_of(self, run: Run) -> list[Evaluation]:
        """Those that are done for a run; a sweep is for implicit ones, an explicit one has nothing to sweep."""
        mine = [item for item in self.evaluations.values() if item.applies_to(run.name, self.data[run.data])]
        return [item for item in mine if run.is_implicit or not item.sweep]

    def evaluations_of_peer(self, peer: Peer) -> list[Evaluation]:
        """Those that are done for a peer."""
        return [item for item in self.evaluations.values() if peer.has(item, self.data[peer.data])]

    @property
    def evaluated(self) -> dict[str, list[str]]:
        """Names of the evaluations that are done, by run and peer."""
        runs = {run.name: [item.name for item in self.evaluations_of(run)] for run in self.runs.values()}
        peers = {peer.name: [item.name for item in self.evaluations_of_peer(peer)] for peer in self.peers.values()}
        return runs | peers


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file. Raises: ConfigError, one line that names file, key and fix."""
    files = ConfigFiles(path)
    return build_experiment(files.experiment(), files)


def build_experiment(values: Mapping[str, Any], files: ConfigFiles) -> Experiment:
    """An experiment from its values. Raises: ConfigError, one line that names file, key and fix."""
    source = files.source
    validate(values, "experiment", source)
    data = {name: build_data_set(name, item, source) for name, item in values["data"].items()}
    points = expand_grids(values["runs"], source)
    builder = RunBuilder(values.get("override", {}), data, files)
    builder.check_shared((point.name, point.item) for point in points)
    runs = {point.name: _run(point, builder) for point in points}
    evaluations = {name: build_evaluation(name, item, source) for name, item in values.get("evaluations", {}).items()}
    peers = {name: build_peer(name, item, source) for name, item in values.get("peers", {}).items()}
    excerpts = {name: build_excerpt(name, item) for name, item in values.get("excerpts", {}).items()}
    report = values.get("report", {})
    experiment = Experiment(values["name"], source, data, runs, evaluations, report, peers, excerpts)
    _check_evaluations(experiment)
    check_peers(experiment.peers.values(), data, evaluations, _trained(runs), source)
    _check_repeated(experiment)
    check_origins(excerpts.values(), experiment.evaluated, source)
    return experiment


def _trained(runs: Mapping[str, Run]) -> list[str]:
    return [f"{run.name}-s{seed}" for run in runs.values() for seed in run.seeds]


def _run(point: GridPoint, builder: RunBuilder) -> Run:
    try:
        return builder.build(point.name, point.item)
    except ConfigError as error:
        raise (ConfigError(f"{error} ({point.at})") if point.at else error) from error


def _check_evaluations(experiment: Experiment) -> None:
    """An evaluation that meets no run is a mistake, not an empty table."""
    for name, item in experiment.evaluations.items():
        if any(item in experiment.evaluations_of(run) for run in experiment.runs.values()):
            continue
        if any(peer.has(item, experiment.data[peer.data]) for peer in experiment.peers.values()):
            continue
        kinds = EVALUATION_KINDS[item.kind].data
        if any(experiment.data[run.data].kind in kinds for run in experiment.runs.values()):
            run = "implicit run" if item.sweep else "run"
            raise ConfigError(
                f"{experiment.source}: evaluations.{name}.runs: {', '.join(item.runs)} matches no {run} with "
                f"{' or '.join(kinds)} data; runs are {', '.join(experiment.runs)}"
            )
        raise ConfigError(
            f"{experiment.source}: evaluations.{name}.kind: no run has {' or '.join(kinds)} data, which "
            f"{item.kind} is for; add a run or remove the evaluation"
        )


def _check_repeated(experiment: Experiment) -> None:
    """A number that two evaluations give would count in the report as that of another seed."""
    for run in experiment.runs.values():
        evaluations = experiment.evaluations_of(run)
        _refuse_repeated(experiment.source, run.name, evaluations, is_implicit=run.is_implicit, choose="`runs`")
    for peer in experiment.peers.values():
        choose = f"`peers.{peer.name}.evaluations`"
        evaluations = experiment.evaluations_of_peer(peer)
        _refuse_repeated(experiment.source, peer.name, evaluations, is_implicit=None, choose=choose)


def _refuse_repeated(
    source: str, model: str, evaluations: list[Evaluation], *, is_implicit: bool | None, choose: str
) -> None:
    for first, second in combinations(evaluations, 2):
        if first.repeats(second, is_implicit=is_implicit):
            parts = EVALUATION_KINDS[first.kind].parts
            raise ConfigError(
                f"{source}: evaluations.{second.name}.{parts}: {first.name} gives the same numbers of {model}; "
                f"let them have different {parts}, or choose one by {choose}"
            )
