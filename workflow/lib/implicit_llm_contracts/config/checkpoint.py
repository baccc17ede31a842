"""The import of a model that was trained elsewhere."""

from dataclasses import dataclass, field
from typing import Annotated

from implicit_llm_contracts.config.fill import UNLESS_DEFAULT
from implicit_llm_contracts.config.values import Digest, Text
from implicit_llm_contracts.errors import refuse_if

_NOT_GIVEN = ""


@dataclass(frozen=True)
class CheckpointConfig:
    """`path`: a folder, below the downloads or the working directory, in the format of transformers, in the published
    layout, or of the original Mamba2 release. `hub` and `revision`: a model of the hub and its commit; null takes the
    newest, and the report says that it is not pinned. `sha256`: digests that files must have; a pickle is read only if
    it is named.
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
