"""Word problems: prefix products in a finite group, at several lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.tasks import BUILTIN_GROUP, GROUP_ORDERS
from implicit_llm_workflow.experiment_files.values import DISTINCT, Count, Fraction, Length, Seed
from implicit_llm_workflow.node import Node

MONOID_ORDER = {"none": 1, "aperiodic": 4}
MAX_VOCABULARY = 1 << 16  # tokens are stored as uint16 at most


@dataclass(frozen=True)
class TrainSplit:
    """The training set. Several hard fractions are mixed in equal shares of the sequences."""

    length: Length
    hard_fraction: Fraction | Annotated[tuple[Fraction, ...], DISTINCT]
    num_samples: Count

    @property
    def hard_fractions(self) -> tuple[float, ...]:
        return self.hard_fraction if isinstance(self.hard_fraction, tuple) else (self.hard_fraction,)


@dataclass(frozen=True)
class TestSplit:
    """One test set for every pair of length and hard fraction."""

    lengths: Annotated[tuple[Length, ...], DISTINCT]
    hard_fractions: Annotated[tuple[Fraction, ...], DISTINCT]
    num_samples: Count


@dataclass(frozen=True)
class WordProblem:
    """`group`: S<n>, A<n> or Z<n>. `monoid`: the second factor of the product, "aperiodic" has four elements.

    A hard fraction is the share of the tokens that are drawn from the whole group; the others are the identity. The
    published suffix P090 is 0.1. Training and test draw from separate streams of `seed`. `shard_samples`: sequences of
    one file; a restarted job goes on after the last complete one.
    """

    name: str
    kind: Literal["word_problem"]
    group: str
    train: TrainSplit
    test: TestSplit
    monoid: Literal["none", "aperiodic"] = "none"
    seed: Seed = 0
    shard_samples: Count = 131_072

    def __post_init__(self) -> None:
        if self.vocab_size > MAX_VOCABULARY:
            raise ValueError(
                f"group: {self.group} with monoid {self.monoid!r} has {self.vocab_size} tokens, at most "
                f"{MAX_VOCABULARY} fit uint16; choose a smaller group"
            )

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens: elements of the product."""
        return group_order(self.group) * MONOID_ORDER[self.monoid]

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


def group_order(group: str) -> int:
    """Number of elements of "S5", "A5", "Z60", ... Raises: ValueError that names the valid forms."""
    match = BUILTIN_GROUP.fullmatch(group)
    if match is None:
        if group in GROUP_ORDERS:
            return GROUP_ORDERS[group]
        raise ValueError(f"group: unknown group {group!r}; use S<n>, A<n> or Z<n>, for example A5, or that of a plugin")
    family, degree = match[1], int(match[2])
    if family == "Z":
        return degree
    if degree > 20:  # far beyond any table; keeps the factorial small
        raise ValueError(f"group: {group} is too large; choose a smaller degree, for example {family}5")
    order = math.factorial(degree)
    return max(1, order // 2) if family == "A" else order
