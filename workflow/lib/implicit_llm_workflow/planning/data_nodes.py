"""The jobs that make the data sets of an experiment: what each of them is and what it reads from."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from implicit_llm_workflow.experiment_files.data_sets import Catbabi, DataSet, LanguageModel, WordProblem
from implicit_llm_workflow.node import Node


def data_nodes(data: DataSet) -> Iterator[Node]:
    """All jobs of a data set, every one after those it reads from."""
    if isinstance(data, Catbabi):
        yield _text_node(data)
    elif isinstance(data, LanguageModel):
        yield tokenizer_node(data)
        yield from _shard_nodes(data)
    yield train_data_node(data)
    yield from nodes_of_test_data(data)


def train_data_node(data: DataSet) -> Node:
    """The training set of a data set."""
    if isinstance(data, Catbabi):
        return _catbabi_node(data, "train")
    if isinstance(data, LanguageModel):
        return _stream_node(data, "train", data.train_length)
    train = data.train
    config = _word_problem_config(data, "train", train.length, train.hard_fractions, train.num_samples)
    return Node("data", f"{data.name}-train", config)


def nodes_of_test_data(data: DataSet) -> Iterator[Node]:
    """The held-out sets of a data set: what its models are evaluated on.

    Of CatbAbI also the validation set: on it the report chooses among runs of equal tokens; it judges on the test set.
    """
    if isinstance(data, Catbabi):
        yield _catbabi_node(data, "valid")
        yield _catbabi_node(data, "test")
    elif isinstance(data, LanguageModel):
        # One stream for all lengths, which reading packs anew; the shortest length is only what its index says.
        yield _stream_node(data, "test", min(data.test_lengths))
    else:
        yield from _word_problem_tests(data)


def _word_problem_tests(data: WordProblem) -> Iterator[Node]:
    """One for every length and hard fraction."""
    for length in data.test.lengths:
        for hard_fraction in data.test.hard_fractions:
            name = f"{data.name}-test-L{length}-h{hard_fraction:g}"
            config = _word_problem_config(data, "test", length, (hard_fraction,), data.test.num_samples)
            yield Node("data", name, config)


def _word_problem_config(
    data: WordProblem, split: str, length: int, hard_fractions: tuple[float, ...], num_samples: int
) -> dict[str, Any]:
    return {
        "kind": data.kind,
        "group": data.group,
        "monoid": data.monoid,
        "hard_fraction": hard_fractions[0] if len(hard_fractions) == 1 else list(hard_fractions),
        "length": length,
        "num_samples": num_samples,
        "split": split,
        "seed": data.seed,
        "shard_samples": data.shard_samples,
    }


def _text_node(data: Catbabi) -> Node:
    return Node("data", f"{data.name}-text", {"kind": "babi_text", **data.text})


def _catbabi_node(data: Catbabi, split: str) -> Node:
    config = {
        "kind": data.kind,
        "collection": data.collection,
        "split": split,
        "mode": data.mode if split == "train" else "lm",  # an evaluation finds the questions by itself
        "length": data.length,
        "vocab_size": data.vocab_size,
        "seed": data.seed,
        "drop_last_story": data.drop_last_story,
    }
    return Node("data", f"{data.name}-{split}", config, {"text": _text_node(data).key})


def tokenizer_node(data: LanguageModel) -> Node:
    """The tokenizer of a language-model data set."""
    return Node("data", f"{data.name}-tokenizer", {"kind": "tokenizer", **data.tokenizer})


def _shard_nodes(data: LanguageModel) -> Iterator[Node]:
    upstream = {"tokenizer": tokenizer_node(data).key}
    for shard in range(data.num_shards):
        config = {
            "kind": "token_shard",
            "corpus": data.corpus,
            "shard": shard,
            "num_shards": data.num_shards,
            "test_fraction": data.test_fraction,
            "seed": data.seed,
            "vocab_size": data.vocab_size,
        }
        yield Node("data", f"{data.name}-{_shard_role(shard)}", config, upstream)


def _stream_node(data: LanguageModel, split: str, length: int) -> Node:
    config = {"kind": "token_stream", "split": split, "length": length}
    return Node("data", f"{data.name}-{split}", config, _shard_keys(data.name, data.num_shards))


@functools.cache  # every job that reads text asks for its thousands of shards
def _shard_keys(data: str, num_shards: int) -> Mapping[str, str]:
    roles = map(_shard_role, range(num_shards))
    return {role: f"data/{data}-{role}" for role in roles}


def _shard_role(shard: int) -> str:
    return f"shard-{shard:05d}"
