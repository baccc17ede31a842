"""Peers: models that were trained elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from implicit_llm_contracts.config.evaluation_kinds import LM_EVAL, PERPLEXITY
from implicit_llm_contracts.config.tasks import CATBABI, WORD_PROBLEM
from implicit_llm_contracts.config.values import SOME, Digest, Text
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_workflow.experiment_files.evaluations import Evaluation
from implicit_llm_workflow.experiment_files.values import fill_entry, matches

STAGE = "checkpoint"  # also the phase of its evaluations
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

    is_implicit = None  # not known before its import

    def takes(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation for its kind of data is done for it."""
        if self.evaluations is None:
            return evaluation.config["kind"] in DEFAULT_KINDS and not evaluation.sweep
        return matches(evaluation.name, self.evaluations)


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
