"""What an evaluation of kind `jacobian` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class JacobianConfig:
    """Which tokens of the test rows to measure, and in which layer.

    `positions` count tokens from 1; empty: 16 of them, spread evenly from the second token to the last or the 256th.
    `num_sequences` are the first rows of the shortest test set: with the defaults there are at least 128 tokens where
    rows have 16 or more. At the last position of each row, `checked_rows` rows of the Jacobian are compared with
    autograd through the iteration, which costs a solve each.
    """

    kind: Literal["jacobian"]
    positions: tuple[int, ...] = ()
    num_sequences: int = 9
    layer: int = 0
    checked_rows: int = 4

    def __post_init__(self) -> None:
        if self.positions and min(self.positions) < 2:
            raise ValueError(
                f"positions: {list(self.positions)} must name tokens from the second on, which have a state before them"
            )
        for key in ("num_sequences", "checked_rows"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: {getattr(self, key)} is not a positive integer; use 1 or more")
        if self.layer < 0:
            raise ValueError(f"layer: {self.layer} is negative; layers count from 0")
