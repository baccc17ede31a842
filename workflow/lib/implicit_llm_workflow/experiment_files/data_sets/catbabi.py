"""CatbAbI: the stories of the bAbI families, concatenated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.node import Node

DEFAULT_SEED = 0
DEFAULT_STORY_LENGTH = 10  # statements, about as many as in the original stories of most families


@dataclass(frozen=True)
class Catbabi:
    """`text`: where the stories come from, as its job is told.

    `mode` is that of the training set; validation and test sets are read for both modes.
    """

    name: str
    kind: str
    text: Mapping[str, Any]
    collection: str
    mode: str
    length: int
    vocab_size: int
    seed: int
    drop_last_story: bool

    @classmethod
    def build(cls, name: str, item: Mapping[str, Any], source: str) -> Catbabi:
        """From validated values. Raises: ConfigError."""
        is_simulated = item["text"]["source"] == "simulated"
        collections = ("simulated",) if is_simulated else ("en-valid-10k", "en-valid")
        collection = item.get("collection", collections[0])
        if collection not in collections:
            raise ConfigError(
                f"{source}: data.{name}.collection: a text that is {'simulated' if is_simulated else 'an archive'} "
                f"has no {collection!r}; give {' or '.join(collections)}, or leave the key out"
            )
        return cls(
            name=name,
            kind=item["kind"],
            text=_simulated_text(item["text"]) if is_simulated else _archive_text(item["text"]),
            collection=collection,
            mode=item.get("mode", "qa"),
            length=int(item["length"]),
            vocab_size=int(item["vocab_size"]),
            seed=int(item.get("seed", DEFAULT_SEED)),
            drop_last_story=item.get("drop_last_story", True),
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
        return Node("data", f"{self.name}-text", {"kind": "babi_text", **self.text})

    def _node(self, split: str) -> Node:
        config = {
            "kind": self.kind,
            "collection": self.collection,
            "split": split,
            "mode": self.mode if split == "train" else "lm",  # an evaluation finds the questions by itself
            "length": self.length,
            "vocab_size": self.vocab_size,
            "seed": self.seed,
            "drop_last_story": self.drop_last_story,
        }
        return Node("data", f"{self.name}-{split}", config, {"text": self._text_node().key})


def _simulated_text(text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "source": "simulated",
        "seed": int(text.get("seed", DEFAULT_SEED)),
        "families": sorted(int(family) for family in text["families"]),
        "stories": {split: int(text["stories"][split]) for split in ("train", "valid", "test")},
        "story_length": int(text.get("story_length", DEFAULT_STORY_LENGTH)),
    }


def _archive_text(text: Mapping[str, Any]) -> dict[str, Any]:
    return {"source": "archive", "missing_files": sorted(text.get("missing_files", []))}
