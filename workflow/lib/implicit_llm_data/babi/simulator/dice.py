"""Random choices that are the same in every version of numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_WORDS_AT_ONCE = 64


class Dice:
    """Uniform choices from the stream of random bits that `key`, a tuple of integers of at least 0, names.

    Only `random_raw` of the bit generator is used: numpy promises that it never changes, unlike Generator's methods.
    """

    def __init__(self, *key: int) -> None:
        self._generator = np.random.PCG64(np.random.SeedSequence(key[0], spawn_key=key[1:]))
        self._words: list[int] = []

    def below(self, count: int) -> int:
        """One of 0..count - 1."""
        accepted = (1 << 64) // count * count  # above it some numbers would be more likely than others
        while (word := self._word()) >= accepted:
            pass
        return word % count

    def chance(self, percent: int) -> bool:
        """True with a probability of `percent` / 100."""
        return self.below(100) < percent

    def pick(self, items: Sequence[T]) -> T:
        """One of `items`."""
        return items[self.below(len(items))]

    def draw(self, items: Sequence[T], count: int) -> list[T]:
        """`count` of `items` in random order, none twice."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def _word(self) -> int:
        if not self._words:
            self._words = self._generator.random_raw(_WORDS_AT_ONCE).tolist()
        return self._words.pop()
