"""Peers: models that were trained elsewhere, and the jobs that import and evaluate them."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS, LM_EVAL, PERPLEXITY
from implicit_llm_contracts.config.tasks import CATBABI, WORD_PROBLEM
from implicit_llm_contracts.config.values import SOME, Digest, Text
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_workflow.experiment_files.data_sets import DataSet
from implicit_llm_workflow.experiment_files.evaluations import Evaluation
from implicit_llm_workflow.experiment_files.values import as_config, check_patterns, fill_entry
from implicit_llm_workflow.file_digests import safe_digests
from implicit_llm_workflow.node import Node

STAGE = PHASE = "checkpoint"  # a peer is evaluated as the phase of that name of a run of the peer's name
# What says something of every model; the others compare modes or look into implicit layers, and are to be asked for.
DEFAULT_KINDS = (WORD_PROBLEM, CATBABI, PERPLEXITY, LM_EVAL)


@dataclass(frozen=True)
class FolderCheckpoint:
    """A folder, below the downloads or the working directory, in the format of transformers, in the published layout,
    or of the original Mamba2 release. `sha256`: digests that files must have; a pickle is read only if it is named.
    """

    path: Text
    sha256: dict[str, Digest] = field(default_factory=dict)


@dataclass(frozen=True)
class HubCheckpoint:
    """A model of the hub. `revision`: a commit; null takes the newest, and the report says that it is not pinned."""

    hub: Text
    revision: str | None
    sha256: dict[str, Digest] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """`data`: the data set that it is evaluated on; the model must have been trained with its tokens.

    `evaluations`: patterns of their names, by default those of DEFAULT_KINDS that fit its data and have no sweep.
    """

    name: str
    data: str
    checkpoint: FolderCheckpoint | HubCheckpoint
    evaluations: Annotated[tuple[Text, ...], SOME] | None = None

    def has(self, evaluation: Evaluation, data: DataSet) -> bool:
        """Whether the evaluation is done for it."""
        if data.kind not in EVALUATION_KINDS[evaluation.kind].data:
            return False
        if self.evaluations is None:
            return evaluation.kind in DEFAULT_KINDS and not evaluation.sweep
        return any(fnmatchcase(evaluation.name, pattern) for pattern in self.evaluations)

    def node(self, digest: Callable[[Path], str | None]) -> Node:
        """The job that imports it. `digest` gives the sha256 of a file, None where there is none."""
        config = as_config(self.checkpoint)
        if isinstance(self.checkpoint, FolderCheckpoint):
            # So that other content in the same folder is another model. A pickle has to be named by the user.
            config["sha256"] = {**safe_digests(Path(self.checkpoint.path), digest), **self.checkpoint.sha256}
        return Node(STAGE, self.name, config)


def build_peer(name: str, item: Mapping[str, Any], source: str) -> Peer:
    """A peer from its values. Raises: ConfigError that starts with `source`, the file."""
    at, checkpoint = f"{source}: peers.{name}", item.get("checkpoint", {})
    if not isinstance(checkpoint, Mapping) or ("path" in checkpoint) == ("hub" in checkpoint):
        raise ConfigError(f"{at}.checkpoint: needs either path (a folder) or hub (a name on the hub)")
    if "hub" in checkpoint and "revision" not in checkpoint:
        raise ConfigError(
            f"{at}.checkpoint.revision: is missing; name the commit, or null for the newest, which is then not pinned"
        )
    cls = HubCheckpoint if "hub" in checkpoint else FolderCheckpoint
    return fill_entry(Peer, name, {**item, "checkpoint": fill(cls, checkpoint, f"{at}.checkpoint")}, at)


def check_peers(
    peers: Iterable[Peer],
    data: Mapping[str, DataSet],
    evaluations: Mapping[str, Evaluation],
    trained: Collection[str],
    source: str,
) -> None:
    """Refuse what would come to nothing. `trained`: names of the trained models with seeds. Raises: ConfigError."""
    for peer in peers:
        at = f"{source}: peers.{peer.name}"
        if peer.name in trained:
            raise ConfigError(f"{at}: is also the name of a trained model; rename the peer")
        if peer.data not in data:
            raise ConfigError(f"{at}.data: no data set {peer.data!r} in this file; {nearest(peer.data, data)}")
        check_patterns(peer.evaluations or (), evaluations, f"{at}.evaluations: no evaluation is called")
        if not any(peer.has(item, data[peer.data]) for item in evaluations.values()):
            raise ConfigError(
                f"{at}.evaluations: none fits its {data[peer.data].kind} data; add an evaluation or remove the peer"
            )
