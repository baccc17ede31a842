"""Text for language models: a corpus, a tokenizer, and one stream of tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_workflow.node import Node

DEFAULT_SEED = 0
DEFAULT_END_OF_TEXT = "<|endoftext|>"
DEFAULT_TEST_FRACTION = 0.001  # the published test split of the deduplicated Pile
DEFAULT_TOKENIZER_BYTES = 100_000_000  # a vocabulary changes little beyond; training reads so much and no more


@dataclass(frozen=True)
class LanguageModel:
    """`corpus` and `tokenizer`: where they come from, as their jobs are told."""

    name: str
    kind: str
    corpus: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    num_shards: int
    vocab_size: int
    test_fraction: float
    seed: int
    train_length: int
    test_lengths: tuple[int, ...]

    @classmethod
    def build(cls, name: str, item: Mapping[str, Any], source: str) -> LanguageModel:
        """From validated values."""
        corpus = _corpus(item["corpus"])
        test_fraction = float(item.get("test_fraction", DEFAULT_TEST_FRACTION))
        seed = int(item.get("seed", DEFAULT_SEED))
        tokenizer = _tokenizer(item["tokenizer"], int(item["vocab_size"]))
        if tokenizer["source"] == "trained":  # on what is not in the test split, so it must know the split
            tokenizer |= {"corpus": corpus, "test_fraction": test_fraction, "seed": seed}
        return cls(
            name=name,
            kind=item["kind"],
            corpus=corpus,
            tokenizer=tokenizer,
            num_shards=int(item["num_shards"]),
            vocab_size=int(item["vocab_size"]),
            test_fraction=test_fraction,
            seed=seed,
            train_length=int(item["train"]["length"]),
            test_lengths=tuple(int(length) for length in item["test"]["lengths"]),
        )

    def nodes(self) -> Iterator[Node]:
        yield self.tokenizer_node()
        yield from self._shard_nodes()
        yield self.train_node()
        yield from self.test_nodes()

    def train_node(self) -> Node:
        return self._stream_node("train", self.train_length)

    def test_nodes(self) -> Iterator[Node]:
        """One stream for all lengths, which reading packs anew; the shortest length is only what its index says."""
        yield self._stream_node("test", min(self.test_lengths))

    def tokenizer_node(self) -> Node:
        return Node("data", f"{self.name}-tokenizer", {"kind": "tokenizer", **self.tokenizer})

    def _shard_nodes(self) -> Iterator[Node]:
        upstream = {"tokenizer": self.tokenizer_node().key}
        for shard in range(self.num_shards):
            config = {
                "kind": "token_shard",
                "corpus": self.corpus,
                "shard": shard,
                "num_shards": self.num_shards,
                "test_fraction": self.test_fraction,
                "seed": self.seed,
                "vocab_size": self.vocab_size,
            }
            yield Node("data", f"{self.name}-{_shard_role(shard)}", config, upstream)

    def _stream_node(self, split: str, length: int) -> Node:
        config = {"kind": "token_stream", "split": split, "length": length}
        return Node("data", f"{self.name}-{split}", config, _shard_keys(self.name, self.num_shards))


@functools.cache  # every job that reads text asks for its thousands of shards
def _shard_keys(data: str, num_shards: int) -> Mapping[str, str]:
    roles = map(_shard_role, range(num_shards))
    return {role: f"data/{data}-{role}" for role in roles}


def _shard_role(shard: int) -> str:
    return f"shard-{shard:05d}"


def _corpus(corpus: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    match corpus["source"]:
        case "files":
            given = {"files": list(corpus["files"]), "field": corpus.get("field", "text")}
        case "hub":
            given = {
                "dataset": corpus["dataset"],
                "revision": corpus.get("revision"),
                "split": corpus.get("split", "train"),
                "field": corpus.get("field", "text"),
            }
    if "max_document_bytes" in corpus:
        given["max_document_bytes"] = int(corpus["max_document_bytes"])
    return {"source": corpus["source"], **given}


def _tokenizer(tokenizer: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    given: dict[str, Any]
    match tokenizer["source"]:
        case "file":
            given = {"file": tokenizer["file"], "sha256": tokenizer.get("sha256")}
        case "hub":
            given = {"name": tokenizer["name"], "revision": tokenizer.get("revision")}
        case _:
            given = {"max_bytes": int(tokenizer.get("max_bytes", DEFAULT_TOKENIZER_BYTES))}
    end_of_text = tokenizer.get("end_of_text", DEFAULT_END_OF_TEXT)
    return {"source": tokenizer["source"], **given, "end_of_text": end_of_text, "vocab_size": vocab_size}
