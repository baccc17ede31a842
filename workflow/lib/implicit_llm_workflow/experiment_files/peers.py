"""Peers: models that were trained elsewhere, and the jobs that import and evaluate them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS, LM_EVAL, PERPLEXITY
from implicit_llm_contracts.config.tasks import CATBABI, WORD_PROBLEM
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.experiment_files.data_sets import DataSet
from implicit_llm_workflow.experiment_files.evaluations import Evaluation
from implicit_llm_workflow.file_digests import safe_digests
from implicit_llm_workflow.node import Node

STAGE = PHASE = "checkpoint"  # a peer is evaluated as the phase of that name of a run of the peer's name
# What says something of every model; the others compare modes or look into implicit layers, and are to be asked for.
DEFAULT_KINDS = (WORD_PROBLEM, CATBABI, PERPLEXITY, LM_EVAL)


@dataclass(frozen=True)
class Peer:
    """`data`: the data set that it is evaluated on. `evaluations`: patterns of their names; None: what is usual.

    `checkpoint`: {"path": ...} or {"hub": ..., "revision": ...}, perhaps with "sha256": digests by file.
    """

    name: str
    data: str
    checkpoint: Mapping[str, Any]
    evaluations: tuple[str, ...] | None

    def has(self, evaluation: Evaluation, data: DataSet) -> bool:
        """Whether the evaluation is done for it."""
        if data.kind not in EVALUATION_KINDS[evaluation.kind].data:
            return False
        if self.evaluations is None:
            return evaluation.kind in DEFAULT_KINDS and not evaluation.sweep
        return any(fnmatchcase(evaluation.name, pattern) for pattern in self.evaluations)

    def node(self, digest: Callable[[Path], str | None]) -> Node:
        """The job that imports it. `digest` gives the sha256 of a file, None where there is none."""
        checkpoint = dict(self.checkpoint)
        sha256 = checkpoint.pop("sha256", {})
        if "path" in checkpoint:
            # So that other content in the same folder is another model. A pickle has to be named by the user.
            sha256 = {**safe_digests(Path(checkpoint["path"]), digest), **sha256}
        return Node(STAGE, self.name, {**checkpoint, "sha256": sha256})


def build_peer(name: str, item: Mapping[str, Any], source: str) -> Peer:
    """A peer from validated values. Raises: ConfigError that starts with `source`, the file."""
    at, checkpoint = f"{source}: peers.{name}.checkpoint", dict(item["checkpoint"])
    if ("path" in checkpoint) == ("hub" in checkpoint):
        raise ConfigError(f"{at}: needs either path (a folder) or hub (a name on the hub)")
    if ("revision" in checkpoint) != ("hub" in checkpoint):
        raise ConfigError(
            f"{at}.revision: is missing; name the commit, or null for the newest, which is then not pinned"
            if "hub" in checkpoint
            else f"{at}.revision: a folder has none; remove it"
        )
    patterns = item.get("evaluations")
    return Peer(name, item["data"], checkpoint, None if patterns is None else tuple(patterns))


def check_peers(
    peers: Iterable[Peer],
    data: Mapping[str, DataSet],
    evaluations: Mapping[str, Evaluation],
    trained: Iterable[str],
    source: str,
) -> None:
    """Refuse what would come to nothing. `trained`: names of the trained models with seeds. Raises: ConfigError."""
    names = set(trained)
    for peer in peers:
        at = f"{source}: peers.{peer.name}"
        if peer.name in names:
            raise ConfigError(f"{at}: is also the name of a trained model; rename the peer")
        if peer.data not in data:
            raise ConfigError(f"{at}.data: no data set {peer.data!r} in this file; {nearest(peer.data, data)}")
        for pattern in peer.evaluations or ():
            if not any(fnmatchcase(name, pattern) for name in evaluations):
                raise ConfigError(
                    f"{at}.evaluations: no evaluation is called {pattern!r}; {nearest(pattern, evaluations)}"
                )
        if not any(peer.has(item, data[peer.data]) for item in evaluations.values()):
            raise ConfigError(
                f"{at}.evaluations: none fits its {data[peer.data].kind} data; add an evaluation or remove the peer"
            )
