"""Which documents are held out for testing: decided by each one's own text, whatever their order and files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True)
class DocumentSplit:
    """A share of `test_fraction`, in [0, 1), of the documents; equal documents are on one side.

    Raises: ValueError, naming the key.
    """

    test_fraction: float
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.test_fraction < 1:
            raise ValueError(f"test_fraction: {self.test_fraction} is out of range; use 0 to below 1")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed: {self.seed} is out of range; use a whole number from 0")

    def of(self, utf8: bytes) -> Split:
        """The split of the document with these bytes."""
        value = hashlib.blake2b(utf8, digest_size=8, salt=self.seed.to_bytes(16, "little")).digest()
        return "test" if int.from_bytes(value, "little") < int(self.test_fraction * (1 << 64)) else "train"
