"""From an experiment to the jobs that it takes: nodes, what each reads from, and what the report shows."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.plugins import KEY as PLUGINS
from implicit_llm_contracts.plugins import Plugin
from implicit_llm_report.registry import Entry, registry
from implicit_llm_workflow.experiment_files.curricula import Phase
from implicit_llm_workflow.experiment_files.data_sets import DataSet, LanguageModel, WordProblem
from implicit_llm_workflow.experiment_files.evaluations import Evaluation
from implicit_llm_workflow.experiment_files.excerpts import check_shown
from implicit_llm_workflow.experiment_files.experiment import Experiment
from implicit_llm_workflow.experiment_files.peers import PHASE, Peer
from implicit_llm_workflow.experiment_files.runs import Run
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.staleness import PAGES


def build_graph(experiment: Experiment, digest: Callable[[Path], str | None] = lambda path: None) -> dict[str, Node]:
    """All nodes by key, every node after those it reads from. `digest`: sha256 of a file, None if unknown."""
    nodes: dict[str, Node] = {}
    for node in _all_nodes(experiment, digest):
        nodes[node.key] = node
    return {key: _with_plugins(node, nodes, experiment.plugins) for key, node in nodes.items()}


def _with_plugins(node: Node, nodes: Mapping[str, Node], plugins: Mapping[str, Plugin]) -> Node:
    """The job with the plugins that it imports: those of which it, or what it reads, has a name in its settings."""
    if not plugins:
        return node
    if node.stage in PAGES:
        used = [path for path, plugin in plugins.items() if plugin.figures or plugin.evaluations]
    else:
        texts = {text for key in (node.key, *node.upstream.values()) for text in _texts(nodes[key].config)}
        used = [path for path, plugin in plugins.items() if not texts.isdisjoint(plugin.names)]
    return replace(node, config={**node.config, PLUGINS: used}) if used else node


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _all_nodes(experiment: Experiment, digest: Callable[[Path], str | None]) -> Iterator[Node]:
    for data in experiment.data.values():
        yield from data.nodes()
    shown: dict[str, Node] = {}
    jobs: dict[str, dict[str, Any]] = {}
    for job, node in _model_nodes(experiment, digest):
        role = f"{node.stage}:{node.name}"
        shown[role], jobs[role] = node, job
        yield node
    config = {"experiment": experiment.name, **experiment.report}
    config |= {"jobs": jobs, "data": dict(_data_parts(experiment))}
    report = Node("report", "report", config, {role: node.key for role, node in shown.items()})
    yield report
    excerpts = experiment.excerpts.values()
    check_shown(excerpts, report_figures(experiment), report_tables(experiment), experiment.source)
    nodes = {node.key: node for node in shown.values()}
    for excerpt in excerpts:
        yield excerpt.node(report, nodes)


def _data_parts(experiment: Experiment) -> Iterator[tuple[str, dict[str, str]]]:
    """What the report must know of the data sets that models read: by name the set and its split."""
    for data in experiment.data.values():
        for node in (data.train_node(), *data.test_nodes()):
            yield node.name, {"data": data.name, "split": node.config["split"]}
        if isinstance(data, LanguageModel):
            yield data.tokenizer_node().name, {"data": data.name, "split": "tokenizer"}


def _model_nodes(experiment: Experiment, digest: Callable[[Path], str | None]) -> Iterator[tuple[dict[str, Any], Node]]:
    """What the report shows, all models with their training and their evaluations: what each job is, and the job."""
    for run in experiment.runs.values():
        identified = run.with_digests(digest)
        for seed in run.seeds:
            yield from _run_nodes(experiment, identified, seed)
    for peer in experiment.peers.values():
        yield from _peer_nodes(experiment, peer, digest)


def _run_nodes(experiment: Experiment, run: Run, seed: int) -> Iterator[tuple[dict[str, Any], Node]]:
    data = experiment.data[run.data]
    trained: dict[str, tuple[dict[str, Any], Node]] = {}
    for phase in run.phases:
        previous = trained[phase.after][1] if phase.after is not None else None
        job = {"run": run.name, "seed": seed, "phase": phase.name, "solver": phase.identity()["solver"]}
        trained[phase.name] = (job, _train_node(run, seed, phase, previous, data))
        yield trained[phase.name]
    for phase in run.final_phases:
        job, node = trained[phase.name]
        for evaluation in experiment.evaluations_of(run):
            yield job | {"evaluation": evaluation.name}, _evaluate_node(node, node.name, evaluation, data)


def _peer_nodes(
    experiment: Experiment, peer: Peer, digest: Callable[[Path], str | None]
) -> Iterator[tuple[dict[str, Any], Node]]:
    job, imported = {"run": peer.name, "phase": PHASE}, peer.node(digest)
    yield job, imported
    for evaluation in experiment.evaluations_of_peer(peer):
        node = _evaluate_node(imported, f"{peer.name}/{PHASE}", evaluation, experiment.data[peer.data])
        yield job | {"evaluation": evaluation.name}, node


def _train_node(run: Run, seed: int, phase: Phase, previous: Node | None, data: DataSet) -> Node:
    task = run.task
    schedule = {key: value for key, value in asdict(task.schedule).items() if value is not None}
    config = {
        "task": task.kind,
        "labels": task.labels,
        "model": dict(run.model),
        "phase": phase.identity(),
        "total_steps": task.total_steps,
        "schedule": schedule,
        "optimizer": asdict(task.optimizer),
        "batch_size": task.batch_size,
        "precision": task.precision,
        "reduction": task.reduction,
        "seed": seed,
    }
    upstream = {"data": data.train_node().key}
    if previous is not None:
        upstream["start"] = previous.key
    return Node("train", f"{run.name}-s{seed}/{phase.name}", config, upstream, run.name, seed)


def _evaluate_node(model: Node, name: str, evaluation: Evaluation, data: DataSet) -> Node:
    """`name`: of the model, with its phase."""
    config: dict[str, Any] = {"kind": evaluation.kind, **evaluation.modes_config}
    kind = EVALUATION_KINDS[evaluation.kind]
    if isinstance(data, LanguageModel) and kind.lengths is not None:
        config["lengths"] = list(data.test.lengths) if kind.lengths == "all" else [min(data.test.lengths)]
    config |= evaluation.settings
    if "tokenizer" in kind.reads and isinstance(data, LanguageModel):
        read = {"tokenizer": data.tokenizer_node().key}
    else:
        read = {node.name: node.key for node in data.test_nodes()}
    upstream = {"model": model.key, **read}
    return Node("evaluate", f"{name}/{evaluation.name}", config, upstream, model.run, model.seed)


def report_figures(experiment: Experiment) -> list[str]:
    """Names of the figures that the report of an experiment has."""
    own = {name: it for plugin in experiment.plugins.values() for name, it in plugin.figures.items()}
    return _met({**registry().figures} | {name: Entry(it.needs, it.caption) for name, it in own.items()}, experiment)


def report_tables(experiment: Experiment) -> list[str]:
    """Names of the tables, each of which is written as .csv and .tex."""
    return _met(registry().tables, experiment)


def _met(entries: Mapping[str, Entry], experiment: Experiment) -> list[str]:
    planned = list(_planned_results(experiment))
    return [name for name, entry in entries.items() if entry.is_met(planned)]


def _planned_results(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """One for each run, evaluation of a run or peer, and the report, with the fields that registry.yaml names."""
    yield {"kind": "report", "settings": tuple(experiment.report), "is_peer": False}
    for run in experiment.runs.values():
        about = _about(run, experiment)
        yield {"kind": "train", **about}
        yield from ({**about, **_about_evaluation(item)} for item in experiment.evaluations_of(run))
    for peer in experiment.peers.values():
        yield from ({"is_peer": True, **_about_evaluation(item)} for item in experiment.evaluations_of_peer(peer))


def _about(run: Run, experiment: Experiment) -> dict[str, Any]:
    data = experiment.data[run.data]
    about = {
        "is_peer": False,
        "is_implicit": run.is_implicit,
        "data": data.kind,
        "data_set": run.data,
        "model_type": run.model.get("model_type"),
        "size": tuple(run.model.get(key) for key in ("hidden_size", "num_hidden_layers")),
        "has_branches": len({phase.start_step for phase in run.final_phases if phase.after is not None}) > 1,
    }
    if isinstance(data, WordProblem):
        about["test"] = (data.group, data.monoid, data.train.length, data.test)
        about["hard_fractions"] = data.train.hard_fractions
    return about


def _about_evaluation(item: Evaluation) -> dict[str, Any]:
    modes = tuple(mode["eval_mode"] for mode in item.modes)
    return {"kind": item.kind, "swept": tuple(item.sweep), "eval_mode": modes}
