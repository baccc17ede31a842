"""Define the settings of the import of a model that was trained elsewhere."""

from dataclasses import dataclass, field
from typing import Annotated

from implicit_llm_contracts.config.fill import UNLESS_DEFAULT
from implicit_llm_contracts.config.values import Digest, Text
from implicit_llm_contracts.errors import refuse_if

_NOT_GIVEN = ""


@dataclass(frozen=True)
class CheckpointConfig:
    """A model that was trained elsewhere.

    `path`: a folder in the downloads folder or working directory, in the format of transformers, of the published
    implicit models, or of the original Mamba2 release. `hub`, `revision`: a model on the hub and its commit; null means
    the newest commit, which the report shows as not pinned, like a branch or tag. `sha256`: the digests that files must
    have, by file name; a pickle is read only if its digest is given here.
    """

    path: Annotated[Text | None, UNLESS_DEFAULT] = None
    hub: Annotated[Text | None, UNLESS_DEFAULT] = None
    revision: Annotated[str | None, UNLESS_DEFAULT] = _NOT_GIVEN
    sha256: dict[str, Digest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_of_hub = self.hub is not None
        refuse_if(
            is_of_hub == (self.path is not None) or is_of_hub == (self.revision == _NOT_GIVEN),
            "needs either path (a folder), or hub (a name on the hub) and revision (a commit, or null for the newest, "
            "which is then not pinned), not both",
        )
