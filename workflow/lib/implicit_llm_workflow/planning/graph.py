"""Turn an experiment into its jobs: the nodes, the inputs of each node, and the contents of the report."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from implicit_llm_contracts.config.evaluation import SweepConfig, missing_length
from implicit_llm_contracts.config.fill import as_config
from implicit_llm_contracts.config.solver import EvalMode
from implicit_llm_contracts.config.tasks import WORD_PROBLEM
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.plugins import LITERAL, PLUGINS, Kinds, Plugin
from implicit_llm_contracts.runs.places import corpus_digest, downloads_folder, local_files, local_folder
from implicit_llm_report.config import VALIDATION, VALIDATION_KINDS
from implicit_llm_report.registry import Entry, figures_with, listed, registry
from implicit_llm_workflow.experiment_files.data_sets import LanguageModel, WordProblem
from implicit_llm_workflow.experiment_files.evaluations import CHECKPOINT, ONE_MODE_KINDS, Peer
from implicit_llm_workflow.experiment_files.experiment import Excerpt, Experiment
from implicit_llm_workflow.experiment_files.runs import Run
from implicit_llm_workflow.experiment_files.yaml_files import check_keys
from implicit_llm_workflow.file_digests import FileDigests, safe_digests
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.staleness import EXCERPT, PAGES


def build_graph(
    experiment: Experiment,
    digests: FileDigests | None = None,
    recorded: Callable[[Node], Mapping[str, Any]] = lambda node: {},
) -> dict[str, Node]:
    """Return all nodes by key, every node after its inputs. Without `digests`, the content of files does not count.

    recorded: returns the settings of a node's last result; its digests replace those of files that are gone.
    Raises: ConfigError for an excerpt with a figure or table that the report lacks, and for an unknown name in the
        `needs` of a plugin's figure.
    """
    _check_needs(experiment.kinds)
    files = _Files(digests, recorded)
    nodes = {node.key: files.added_to(node) for node in _all_nodes(experiment)}
    return {key: _with_plugins(node, nodes, experiment.kinds.plugins) for key, node in nodes.items()}


@dataclass
class _Files:
    """The digests of the user's files; they are added to the settings of jobs, so that changed files change identities.

    If the files are gone, for example to save disk space, results that were made from them remain valid: the digests
    are then those of the last result. Only a pretrained model must exist, or reading the experiment fails.
    """

    digests: FileDigests | None
    recorded: Callable[[Node], Mapping[str, Any]]
    corpora: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)

    def added_to(self, node: Node) -> Node:
        """Return the node with the sha256 of the files that its job reads; without such files, return it unchanged.

        The files are those of a word problem, a tokenizer, a corpus or a model. The sha256 of a pickle file is not
        added: the user must give it, or the pickle is not read.
        """
        config, kind, model = node.config, node.config.get("kind"), node.config.get("model", {})
        if kind == WORD_PROBLEM and "file" in config:
            path = Path(config["file"])
            found = self._digest((local_folder(path.parent) or path.parent) / path.name)
            return replace(node, config={**config, "sha256": found or self.recorded(node).get("sha256")})
        if kind == "tokenizer" and config["source"] == "file" and config["sha256"] is None:
            path = next((path for _, path in local_files(config["file"], downloads_folder())), Path(config["file"]))
            found = self._digest(path) or self.recorded(node).get("sha256")
            return replace(node, config={**config, "sha256": found})
        if kind in ("tokenizer", "token_shard") and config.get("corpus", {}).get("source") == "files":
            return replace(node, config={**config, **self._of_corpus(node)})
        if node.stage == CHECKPOINT and "path" in config:
            digests = safe_digests(Path(config["path"]), self._digest) or self.recorded(node).get("sha256", {})
            return replace(node, config={**config, "sha256": {**digests, **config["sha256"]}})
        if "pretrained" in model and "revision" not in model:
            digests = safe_digests(Path(model["pretrained"]), self._digest)
            return replace(node, config={**config, "model": {**model, "sha256": digests}})
        return node

    def _digest(self, path: Path) -> str | None:
        return None if self.digests is None else self.digests(path)

    def _of_corpus(self, node: Node) -> dict[str, Any]:
        """Return one digest of all files of the corpus and, for a shard, the digests of its own files by name."""
        patterns = tuple(node.config["corpus"]["files"])
        if patterns not in self.corpora:
            self.corpora[patterns] = self.digests.of_corpus(patterns) if self.digests else {}
        files = self.corpora[patterns]
        if not files:
            before = self.recorded(node) if self.digests else {}
            return {key: before[key] for key in ("corpus_sha256", "file_sha256") if key in before}
        found: dict[str, Any] = {"corpus_sha256": corpus_digest(files)}
        if "shard" in node.config:
            found["file_sha256"] = dict([*files.items()][node.config["shard"] :: node.config["num_shards"]])
        return found


def _with_plugins(node: Node, nodes: Mapping[str, Node], plugins: Mapping[str, Plugin]) -> Node:
    """Return the node with the plugins that its job imports in its settings.

    A report or excerpt imports the plugins with figures or evaluations. Another job imports each plugin that declares a
    name in the settings of the job or of its inputs.
    """
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


def _all_nodes(experiment: Experiment) -> Iterator[Node]:
    for data in experiment.data.values():
        yield from (*data.sources(), data.train_node(), *data.test_nodes(), *data.validation_nodes())
    shown: dict[str, Node] = {}
    jobs: dict[str, dict[str, Any]] = {}
    for model in experiment.models:
        for job, node in _run_nodes(experiment, model) if isinstance(model, Run) else _peer_nodes(experiment, model):
            role = f"{node.stage}:{node.name}"
            shown[role], jobs[role] = node, job
            yield node
    config = {"experiment": experiment.name, **experiment.report}
    config |= {"jobs": jobs, "data": dict(_data_parts(experiment))}
    if own := [name for name in report_figures(experiment) if name in experiment.kinds.figures]:
        config["own_figures"] = own
    report = Node("report", "report", config, {role: node.key for role, node in shown.items()})
    yield report
    nodes = {node.key: node for node in shown.values()}
    for excerpt in experiment.excerpts.values():
        at = f"{experiment.source}: excerpts.{excerpt.name}"
        check_keys(excerpt.figures, report_figures(experiment), f"{at}.figures")
        check_keys(excerpt.tables, report_tables(experiment), f"{at}.tables")
        yield _excerpt_node(excerpt, report, nodes)


def _excerpt_node(excerpt: Excerpt, report: Node, nodes: Mapping[str, Node]) -> Node:
    """Return the job of an excerpt: the report's job with fewer inputs and the excerpt's title, figures and tables."""
    jobs, behind = report.config["jobs"], set[str]()
    for role, key in report.upstream.items():
        if any(origin.has(jobs[role]["run"], jobs[role].get("evaluation")) for origin in excerpt.from_):
            behind.update(_with_models(key, nodes))
    upstream = {role: key for role, key in report.upstream.items() if key in behind}
    shown = {"title": excerpt.title, "figures": list(excerpt.figures), "tables": list(excerpt.tables)}
    config = {**report.config, **shown, "jobs": {role: job for role, job in jobs.items() if role in upstream}}
    return Node(EXCERPT, excerpt.name, config, upstream)


def _with_models(key: str, nodes: Mapping[str, Node]) -> Iterator[str]:
    """Yield the keys of a job, of the model that it evaluates or resumes from, and of all phases before that model."""
    yield key
    for role in ("model", "start"):
        if role in nodes[key].upstream:
            yield from _with_models(nodes[key].upstream[role], nodes)


def _data_parts(experiment: Experiment) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name of each data job that other stages read, with its data set and split, for the report."""
    for data in experiment.data.values():
        for node in (data.train_node(), *data.test_nodes()):
            yield node.name, {"data": data.name, "split": node.config["split"]}
        for node in data.validation_nodes():
            yield node.name, {"data": data.name, "split": VALIDATION}
        if isinstance(data, LanguageModel):
            yield data.tokenizer_node().name, {"data": data.name, "split": "tokenizer"}


def _run_nodes(experiment: Experiment, run: Run) -> Iterator[tuple[dict[str, Any], Node]]:
    """Yield a run's training jobs and the evaluations of its final phases, each as its description and its node."""
    for seed in run.seeds:
        trained: dict[str, tuple[dict[str, Any], Node]] = {}
        for phase, training in run.phases.items():
            upstream = {"data": experiment.data[run.data].train_node().key}
            if phase in run.starts:
                upstream["start"] = trained[run.starts[phase]][1].key
            config = as_config(replace(training, seed=seed))
            node = Node("train", f"{run.name}-s{seed}/{phase}", config, upstream, run.name, seed)
            job = {"run": run.name, "seed": seed, "phase": phase, "solver": config["phase"]["solver"]}
            trained[phase] = job, node
            yield job, node
        for last in run.final_phases:
            yield from _evaluate_nodes(experiment, run, *trained[last.name])


def _peer_nodes(experiment: Experiment, peer: Peer) -> Iterator[tuple[dict[str, Any], Node]]:
    """Yield the import job of an external baseline and its evaluations, each as its description and its node."""
    job, node = {"run": peer.name, "phase": CHECKPOINT}, Node(CHECKPOINT, peer.name, as_config(peer.checkpoint))
    yield job, node
    yield from _evaluate_nodes(experiment, peer, job, node)


def _evaluate_nodes(
    experiment: Experiment, model: Run | Peer, job: dict[str, Any], source: Node
) -> Iterator[tuple[dict[str, Any], Node]]:
    """Yield the description and node of each evaluation of the model that `source` makes; `job` describes `source`."""
    data = experiment.data[model.data]
    name = source.name if source.stage == "train" else f"{source.name}/{CHECKPOINT}"
    for evaluation in experiment.evaluations_of(model):
        config, kind = as_config(evaluation.settings), evaluation.kind
        if isinstance(data, LanguageModel) and kind.lengths is not None:
            lengths = data.lengths(evaluation.split)
            config = {"lengths": list(lengths if kind.lengths == "all" else (min(lengths),)), **config}
        if isinstance(data, LanguageModel) and "tokenizer" in kind.reads:
            read = {"tokenizer": data.tokenizer_node().key}
        else:
            nodes = list(data.validation_nodes() if evaluation.split == VALIDATION else data.test_nodes())
            if isinstance(data, WordProblem):
                nodes = _of_lengths(nodes, getattr(evaluation.settings, "lengths", None), experiment, evaluation.name)
            read = {node.name: node.key for node in nodes}
        if model.is_implicit is False and evaluation.settings.kind in ONE_MODE_KINDS:
            # An explicit model has one mode, so a change of `modes` must not make the model's result stale.
            config = {**config, "modes": []}
        upstream = {"model": source.key, **read}
        node = Node("evaluate", f"{name}/{evaluation.name}", config, upstream, source.run, source.seed)
        yield job | {"evaluation": evaluation.name}, node


def _of_lengths(nodes: list[Node], lengths: Sequence[int] | None, experiment: Experiment, name: str) -> list[Node]:
    """Return the test sets of these lengths, or all for None. Raises: ConfigError for a length that no test set has."""
    if lengths is None:
        return nodes
    present = sorted({node.config["length"] for node in nodes})
    if error := missing_length(lengths, present):
        raise ConfigError(f"{experiment.source}: evaluations.{name}.lengths: {error}")
    return [node for node in nodes if node.config["length"] in lengths]


def report_figures(experiment: Experiment) -> list[str]:
    """Return the names of the figures in the report of an experiment."""
    return _met(figures_with(experiment.kinds), experiment)


def report_tables(experiment: Experiment) -> list[str]:
    """Return the names of the tables in the report; each is written as .csv and .tex."""
    return _met(registry().tables, experiment)


def _met(entries: Mapping[str, Entry], experiment: Experiment) -> list[str]:
    planned = list(_planned_results(experiment))
    return [name for name, entry in entries.items() if entry.is_met(planned)]


# The keys of a planned result; registry.yaml explains them.
PLANNED = (
    *("kind", "settings", "is_peer", "is_implicit", "data", "data_set", "model_type", "size", "has_branches"),
    *("test", "hard_fractions", "swept", "eval_mode"),
)


def _check_needs(kinds: Kinds) -> None:
    """Raise ConfigError for a key or name in the `needs` of a plugin's figure that no planned result can have."""
    names: dict[str, Iterable[str]] = {
        "kind": ("report", "train", *kinds.evaluations, *VALIDATION_KINDS.values()),
        "data": kinds.tasks,
        "eval_mode": get_args(EvalMode),
        "swept": [item.name for item in fields(SweepConfig)],
        "differ": PLANNED,
        "among": PLANNED,
    }
    for figure, own in kinds.figures.items():
        at = f"{kinds.owner('report', figure)}: {LITERAL}.figures.{figure}.needs"
        check_keys(own.needs, (*PLANNED, "differ", "among"), at)
        for key in names.keys() & own.needs.keys():
            for name in listed(own.needs[key]):
                if name not in [*names[key]]:
                    raise ConfigError(f"{at}.{key}: there is no {name!r}; {nearest(str(name), names[key])}")


def _planned_results(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Yield the report, each run, and each evaluation of each model, as mappings with the fields of registry.yaml."""
    yield {"kind": "report", "settings": tuple(experiment.report), "is_peer": False}
    for model in experiment.models:
        about: dict[str, Any] = {"is_peer": True}
        if isinstance(model, Run):
            about = _about(model, experiment)
            yield {"kind": "train", **about}
        for item in experiment.evaluations_of(model):
            modes = tuple(mode.eval_mode for mode in item.modes)
            kind = VALIDATION_KINDS[item.settings.kind] if item.split == VALIDATION else item.settings.kind
            swept = () if item.sweep is None else item.sweep.given
            yield about | {"kind": kind, "swept": swept, "eval_mode": modes}


def _about(run: Run, experiment: Experiment) -> dict[str, Any]:
    data, model = experiment.data[run.data], run.training.model
    about = {
        "is_peer": False,
        "is_implicit": run.is_implicit,
        "data": data.kind,
        "data_set": run.data,
        "model_type": model.get("model_type"),
        "size": tuple(model.get(key) for key in ("hidden_size", "num_hidden_layers")),
        "has_branches": len({phase.start_step for phase in run.final_phases if phase.name in run.starts}) > 1,
    }
    if isinstance(data, WordProblem):
        about["test"] = (data.group, data.monoid, data.train.length, data.test)
        about["hard_fractions"] = data.train.hard_fractions
    return about
