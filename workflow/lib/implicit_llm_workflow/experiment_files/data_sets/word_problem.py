"""Word problems: prefix products in a finite group, at several lengths."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.tasks import product_order
from implicit_llm_contracts.config.values import DISTINCT, Count, Fraction, Length, Seed
from implicit_llm_workflow.node import Node


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
        product_order(self.group, self.monoid)  # for its errors

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens: elements of the product."""
        return product_order(self.group, self.monoid)

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
