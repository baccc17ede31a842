"""What an evaluation of kind `duality` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from implicit_llm_contracts.config.evaluation import ModeConfig, SweepConfig


@dataclass(frozen=True)
class DualityConfig:
    """Whether all modes give the same answers to the same tokens, and how fast the simultaneous iteration converges.

    lengths: tokens of a row; None takes the rows as the data set has them, the only choice for word problems and
    CatbAbI. max_tokens: the first rows only, at least one a length; the paper compares 3 million. A mode's max_samples
    holds for all modes, which are compared on the same rows. trace_tokens: of these, how many the convergence is
    followed on. precision: as for perplexity.
    """

    kind: Literal["duality"]
    modes: tuple[ModeConfig, ...]
    lengths: tuple[int, ...] | None = None
    max_tokens: int | None = None
    trace_tokens: int = 16384
    precision: Literal["fp32", "bf16"] = "fp32"
    sweep: SweepConfig | None = None

    def __post_init__(self) -> None:
        if self.lengths is not None and (not self.lengths or min(self.lengths) < 1):
            raise ValueError(
                f"lengths: {list(self.lengths)} must name at least one length of 1 or more, or be left out"
            )
        for key in ("max_tokens", "trace_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}: {value} is not a positive integer; use 1 or more, or leave it out")
