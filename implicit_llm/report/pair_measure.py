"""What a claim compares between two kinds of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PairMetric = Literal["perplexity", "babi_tasks"]


@dataclass(frozen=True)
class PairMeasure:
    """A comparison of models of one size, `first` against `second`; the rules are in pair_claims.py.

    metric: "perplexity" on held-out text, as the ratio first over second; "babi_tasks", the share of CatbAbI's tasks on
    which the first is more accurate. implicit is any implicit model; bounded and free are the phases of one run with
    the fewest and with more solver iterations. length_factor is test length over training length; equal says what the
    two models share beside their size: training tokens, or training FLOPs.
    """

    metric: PairMetric
    first: Literal["implicit", "free", "bounded"]
    second: Literal["explicit", "bounded"] = "explicit"
    family: str | None = None
    length_factor: float = 1.0
    equal: Literal["tokens", "flops"] = "tokens"
    num_layers: int | None = None

    @property
    def kind(self) -> str:
        return "ratio" if self.metric == "perplexity" else "value"

    @property
    def needs(self) -> str:
        return "< 1 for every pair of seeds" if self.metric == "perplexity" else "> 0.5 for every pair of seeds"

    @property
    def words(self) -> str:
        if self.metric == "babi_tasks":
            return f"share of the tasks on which the {self.first} model is more accurate"
        shared = "training FLOPs" if self.equal == "flops" else "training tokens"
        return f"perplexity of the {self.first} over that of the {self.second} model, at equal parameters and {shared}"
