"""Word problems: prefix products in a finite group, at several lengths."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.node import Node

DEFAULT_SEED = 0
DEFAULT_SHARD_SAMPLES = 131_072
MONOID_ORDER = {"none": 1, "aperiodic": 4}
MAX_VOCABULARY = 1 << 16  # tokens are stored as uint16 at most


@dataclass(frozen=True)
class TrainSplit:
    """Several hard fractions are mixed in equal shares of the sequences."""

    length: int
    hard_fractions: tuple[float, ...]
    num_samples: int


@dataclass(frozen=True)
class TestSplit:
    """One test set for every pair of length and hard fraction."""

    lengths: tuple[int, ...]
    hard_fractions: tuple[float, ...]
    num_samples: int


@dataclass(frozen=True)
class WordProblem:
    name: str
    kind: str
    group: str
    monoid: str
    seed: int
    shard_samples: int
    vocab_size: int
    train: TrainSplit
    test: TestSplit

    @classmethod
    def build(cls, name: str, item: Mapping[str, Any], source: str) -> WordProblem:
        """From validated values. Raises: ConfigError."""
        monoid = item.get("monoid", "none")
        hard = item["train"]["hard_fraction"]
        train = TrainSplit(
            length=int(item["train"]["length"]),
            hard_fractions=tuple(float(value) for value in (hard if isinstance(hard, list) else [hard])),
            num_samples=int(item["train"]["num_samples"]),
        )
        test = TestSplit(
            lengths=tuple(int(length) for length in item["test"]["lengths"]),
            hard_fractions=tuple(float(value) for value in item["test"]["hard_fractions"]),
            num_samples=int(item["test"]["num_samples"]),
        )
        return cls(
            name=name,
            kind=item["kind"],
            group=item["group"],
            monoid=monoid,
            seed=int(item.get("seed", DEFAULT_SEED)),
            shard_samples=int(item.get("shard_samples", DEFAULT_SHARD_SAMPLES)),
            vocab_size=vocabulary_size(item["group"], monoid, f"{source}: data.{name}.group"),
            train=train,
            test=test,
        )

    def nodes(self) -> Iterator[Node]:
        yield self.train_node()
        yield from self.test_nodes()

    def train_node(self) -> Node:
        train = self.train
        config = self._config("train", train.length, train.hard_fractions, train.num_samples)
        return Node("data", f"{self.name}-train", config)

    def test_nodes(self) -> Iterator[Node]:
        """One for every length and hard fraction."""
        for length in self.test.lengths:
            for hard_fraction in self.test.hard_fractions:
                config = self._config("test", length, (hard_fraction,), self.test.num_samples)
                yield Node("data", f"{self.name}-test-L{length}-h{hard_fraction:g}", config)

    def _config(self, split: str, length: int, hard_fractions: tuple[float, ...], num_samples: int) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "group": self.group,
            "monoid": self.monoid,
            "hard_fraction": hard_fractions[0] if len(hard_fractions) == 1 else list(hard_fractions),
            "length": length,
            "num_samples": num_samples,
            "split": split,
            "seed": self.seed,
            "shard_samples": self.shard_samples,
        }


def group_order(group: str, where: str) -> int:
    """Number of elements of "S5", "A5", "Z60", ... Raises: ConfigError that names the valid forms, after `where`."""
    match = re.fullmatch(r"([SAZ])([1-9][0-9]*)", group)
    if match is None:
        raise ConfigError(f"{where}: unknown group {group!r}; use S<n>, A<n> or Z<n>, for example A5")
    family, degree = match[1], int(match[2])
    if family == "Z":
        return degree
    if degree > 20:  # far beyond any table; keeps the factorial small
        raise ConfigError(f"{where}: group {group} is too large; choose a smaller degree, for example {family}5")
    order = math.factorial(degree)
    return max(1, order // 2) if family == "A" else order


def vocabulary_size(group: str, monoid: str, where: str) -> int:
    """Number of tokens of a word problem. Raises: ConfigError when the tokens do not fit their storage type."""
    size = group_order(group, where) * MONOID_ORDER[monoid]
    if size > MAX_VOCABULARY:
        raise ConfigError(
            f"{where}: {group} with monoid {monoid!r} has {size} tokens, at most {MAX_VOCABULARY} fit uint16; "
            "choose a smaller group"
        )
    return size
