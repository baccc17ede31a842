"""What the jobs of an experiment read from outside of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.runs.fetched_files import HubFiles
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml
from implicit_llm_workflow.file_digests import PICKLE_FILE
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.project_dirs import CONFIG_DIR

EVALUATION_DATA_FILE = CONFIG_DIR / "prefetch" / "evaluation-data.yaml"


@dataclass(frozen=True)
class BabiArchive:
    """The bAbI archive, without the files that the experiment does without."""

    missing_files: tuple[str, ...]


@dataclass(frozen=True)
class HubCheckpoint:
    """A peer of the hub. `is_vouched`: the experiment names the sha256 of its pickle."""

    peer: str
    files: HubFiles
    is_vouched: bool


@dataclass(frozen=True)
class LocalFile:
    """A file that only the user can supply, by a name relative to the downloads folder or the working directory."""

    name: str
    key: str


@dataclass(frozen=True)
class EvaluationData:
    """A data set of lm-eval, which goes to the cache of `datasets`."""

    dataset: str
    config: str | None = None
    revision: str | None = None


Need = BabiArchive | HubFiles | HubCheckpoint | LocalFile | EvaluationData


def needs_of(plan: Plan) -> list[Need]:
    """Each once, in the order of the jobs."""
    peers = [_peer(node) for node in plan.nodes.values() if node.stage == "checkpoint" and "hub" in node.config]
    needs = [need for node in plan.nodes.values() for need in _needs(node.stage, node.config)]
    return list(dict.fromkeys([*needs, *peers]))


def _peer(node: Node) -> HubCheckpoint:
    files = HubFiles("model", node.config["hub"], node.config["revision"])
    return HubCheckpoint(node.name, files, PICKLE_FILE in node.config["sha256"])


def _needs(stage: str, config: Mapping[str, Any]) -> Iterator[Need]:
    kind = config.get("kind")
    if stage == "data" and kind == "babi_text" and config["source"] == "archive":
        yield BabiArchive(tuple(config.get("missing_files") or ()))
    elif stage == "data" and kind == "tokenizer":
        yield from _tokenizer_needs(config)
    elif stage == "data" and kind == "token_shard":
        yield from _corpus_needs(config["corpus"])
    elif stage == "train" and "revision" in config["model"]:
        yield HubFiles("model", config["model"]["pretrained"], config["model"]["revision"])
    elif stage == "evaluate":
        yield from _evaluation_needs(config)


def _tokenizer_needs(config: Mapping[str, Any]) -> Iterator[Need]:
    if config["source"] == "file":
        yield LocalFile(config["file"], "tokenizer.file")
    elif config["source"] == "hub":
        yield HubFiles("tokenizer", config["name"], config.get("revision"))
    elif config.get("corpus"):
        yield from _corpus_needs(config["corpus"])


def _corpus_needs(corpus: Mapping[str, Any]) -> Iterator[Need]:
    if corpus["source"] == "files":
        yield from (LocalFile(name, "corpus.files") for name in corpus["files"])
    elif corpus["source"] == "hub":
        yield HubFiles("dataset", corpus["dataset"], corpus.get("revision"), corpus.get("split") or "train")


@dataclass(frozen=True)
class EvaluationDataFile:
    """workflow/config/prefetch/evaluation-data.yaml: the kinds of evaluation that read data sets, and these by task."""

    kinds: tuple[str, ...]
    tasks: Mapping[str, EvaluationData]


def _evaluation_needs(config: Mapping[str, Any]) -> Iterator[Need]:
    """The data of the tasks that an evaluation names, of all tasks if it names none."""
    values = fill(EvaluationDataFile, read_yaml(EVALUATION_DATA_FILE), str(EVALUATION_DATA_FILE))
    if config.get("kind") not in values.kinds:
        return
    for task in config.get("tasks") or values.tasks:
        if task in values.tasks:
            yield values.tasks[task]
