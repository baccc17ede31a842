"""CatbAbI: the stories of the bAbI families, concatenated."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.values import DISTINCT, Count, Length, Seed, VocabSize, matching
from implicit_llm_contracts.runs.fill import Only
from implicit_llm_workflow.experiment_files.values import as_config
from implicit_llm_workflow.node import Node

_Family = Annotated[int, Only(lambda value: 1 <= value <= 20, "a number of a bAbI task, 1 to 20")]
_BabiFile = Annotated[
    str,
    matching(
        r"en-valid(-10k)?/qa([1-9]|1[0-9]|20)_(train|valid|test)[.]txt", "a name such as en-valid-10k/qa3_train.txt"
    ),
]


@dataclass(frozen=True)
class Stories:
    """Stories of each family."""

    train: Count
    valid: Count
    test: Count


@dataclass(frozen=True)
class SimulatedText:
    """Stories made up here, in the format of bAbI. `story_length`: statements of a story, about."""

    source: Literal["simulated"]
    families: Annotated[tuple[_Family, ...], DISTINCT]
    stories: Stories
    seed: Seed = 0
    story_length: Count = 10  # about as many as in the original stories of most families

    collections = ("simulated",)

    def config(self) -> dict[str, Any]:
        return {**as_config(self), "families": sorted(self.families)}


@dataclass(frozen=True)
class ArchiveText:
    """bAbI v1.2 from the folder of downloads.

    `missing_files` are known to be missing from the archive; any other missing file is an error.
    """

    source: Literal["archive"]
    missing_files: tuple[_BabiFile, ...] = ()

    collections = ("en-valid-10k", "en-valid")

    def config(self) -> dict[str, Any]:
        return {"source": self.source, "missing_files": sorted(self.missing_files)}


@dataclass(frozen=True)
class Catbabi:
    """`text`: where the stories come from; `collection`: which of them, by default the first that the text has.

    `mode` says what training learns, the answers to questions (qa) or every word (lm); validation and test sets are
    read for both. `seed` is that of the order of the stories. `drop_last_story` leaves out the last story of each file,
    as the published preparation does.
    """

    name: str
    kind: Literal["catbabi"]
    text: SimulatedText | ArchiveText
    length: Length
    vocab_size: VocabSize
    collection: str | None = None
    mode: Literal["qa", "lm"] = "qa"
    seed: Seed = 0
    drop_last_story: bool = True

    def __post_init__(self) -> None:
        if self.collection not in (None, *self.text.collections):
            raise ValueError(
                f"collection: a text of source {self.text.source} has no {self.collection!r}; give "
                f"{' or '.join(self.text.collections)}, or leave the key out"
            )

    def nodes(self) -> Iterator[Node]:
        yield self._text_node()
        yield self.train_node()
        yield from self.test_nodes()

    def train_node(self) -> Node:
        return self._node("train")

    def test_nodes(self) -> Iterator[Node]:
        """Also the validation set: on it the report chooses among runs of equal tokens; it judges on the test set."""
        yield self._node("valid")
        yield self._node("test")

    def _text_node(self) -> Node:
        return Node("data", f"{self.name}-text", {"kind": "babi_text", **self.text.config()})

    def _node(self, split: str) -> Node:
        config = {
            "kind": self.kind,
            "collection": self.collection or self.text.collections[0],
            "split": split,
            "mode": self.mode if split == "train" else "lm",  # an evaluation finds the questions by itself
            "length": self.length,
            "vocab_size": self.vocab_size,
            "seed": self.seed,
            "drop_last_story": self.drop_last_story,
        }
        return Node("data", f"{self.name}-{split}", config, {"text": self._text_node().key})
