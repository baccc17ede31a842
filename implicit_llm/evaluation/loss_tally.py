"""Mean loss over tokens, gathered batch by batch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class LossTally:
    """Sum of losses over tokens, in fp64: a mean over all tokens alike, however they were cut into batches."""

    total: float = 0.0
    num_tokens: int = 0

    def add(self, total: float, num_tokens: int) -> None:
        self.total += total
        self.num_tokens += num_tokens

    @property
    def loss(self) -> float | None:
        """Mean loss in nats a token; None without tokens, or when a token's loss was not finite."""
        return self.total / self.num_tokens if self.num_tokens and math.isfinite(self.total) else None

    @property
    def perplexity(self) -> float | None:
        loss = self.loss
        return None if loss is None or loss > math.log(1e300) else math.exp(loss)
