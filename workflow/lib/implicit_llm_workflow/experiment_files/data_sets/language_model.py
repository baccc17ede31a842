"""Text for language models: a corpus, a tokenizer, and one stream of tokens."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.text import (
    CorpusFiles,
    HubCorpus,
    HubTokenizer,
    LibraryCorpus,
    TokenizerFile,
    TrainedTokenizer,
)
from implicit_llm_contracts.config.values import DISTINCT, Length, Seed, Share, VocabSize
from implicit_llm_contracts.runs.errors import refuse_if
from implicit_llm_contracts.runs.fill import Only
from implicit_llm_workflow.experiment_files.values import as_config
from implicit_llm_workflow.node import Node


@dataclass(frozen=True)
class TrainLength:
    length: Length


@dataclass(frozen=True)
class TestLengths:
    """Lengths at which the test stream is cut into sequences."""

    lengths: Annotated[tuple[Length, ...], DISTINCT]


@dataclass(frozen=True)
class LanguageModel:
    """Text as one stream of tokens, documents divided by an end-of-text token.

    `num_shards`: jobs that the corpus is divided among, and so files of tokens; input files go to them in turn.
    `test_fraction`: share of the documents in the test split, chosen by a hash of their text and `seed`.
    """

    name: str
    kind: Literal["language_model"]
    corpus: LibraryCorpus | CorpusFiles | HubCorpus
    tokenizer: TokenizerFile | HubTokenizer | TrainedTokenizer
    num_shards: Annotated[int, Only(lambda value: 1 <= value <= 100_000, "an integer from 1 to 100000")]
    vocab_size: VocabSize
    train: TrainLength
    test: TestLengths
    test_fraction: Share = 0.001  # the published test split of the deduplicated Pile
    seed: Seed = 0

    def __post_init__(self) -> None:
        is_trained = isinstance(self.tokenizer, TrainedTokenizer)
        refuse_if(
            is_trained and self.vocab_size < 257,
            f"vocab_size: {self.vocab_size} is too small to train a tokenizer; bytes and end of text need 257",
        )

    def nodes(self) -> Iterator[Node]:
        yield self.tokenizer_node()
        yield from self._shard_nodes()
        yield self.train_node()
        yield from self.test_nodes()

    def train_node(self) -> Node:
        return self._stream_node("train", self.train.length)

    def test_nodes(self) -> Iterator[Node]:
        """One stream for all lengths, which reading packs anew; the shortest length is only what its index says."""
        yield self._stream_node("test", min(self.test.lengths))

    def tokenizer_node(self) -> Node:
        config = {"kind": "tokenizer", **as_config(self.tokenizer), "vocab_size": self.vocab_size}
        if isinstance(self.tokenizer, TrainedTokenizer):  # on what is not in the test split, so it must know the split
            config |= self._split_config()
        return Node("data", f"{self.name}-tokenizer", config)

    def _split_config(self) -> dict[str, Any]:
        corpus = as_config(self.corpus)
        for key in ("max_document_bytes", "split_by"):
            if corpus.get(key, "") is None:
                del corpus[key]
        return {"corpus": corpus, "test_fraction": self.test_fraction, "seed": self.seed}

    def _shard_nodes(self) -> Iterator[Node]:
        upstream = {"tokenizer": self.tokenizer_node().key}
        shards = {"kind": "token_shard", "num_shards": self.num_shards, "vocab_size": self.vocab_size}
        shards |= self._split_config()
        for shard in range(self.num_shards):
            yield Node("data", f"{self.name}-{_shard_role(shard)}", {**shards, "shard": shard}, upstream)

    def _stream_node(self, split: str, length: int) -> Node:
        config = {"kind": "token_stream", "split": split, "length": length}
        return Node("data", f"{self.name}-{split}", config, _shard_keys(self.name, self.num_shards))


@functools.cache  # every job that reads text asks for its thousands of shards
def _shard_keys(data: str, num_shards: int) -> Mapping[str, str]:
    roles = map(_shard_role, range(num_shards))
    return {role: f"data/{data}-{role}" for role in roles}


def _shard_role(shard: int) -> str:
    return f"shard-{shard:05d}"
