"""What a claim measures where neither one number of a test nor a pair of models says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

QuantityName = Literal[
    "record",
    "gain_by_iterations",
    "above_explicit",
    "layers_needed",
    "growth_of_layers",
    "growth_of_perplexity",
    "over_other_shares",
]

WORDS: dict[str, str] = {
    "gain_by_iterations": "{of} with the most iterations allowed at test time minus that with the fewest",
    "above_explicit": "{of} with the most iterations allowed at test time minus that of the explicit model",
    "layers_needed": "fewest layers that solve the length that takes most",
    "growth_of_layers": "fewest layers at the longest length minus those at the shortest",
    "growth_of_perplexity": "perplexity at {factor} times the training length over that at the training length",
    "over_other_shares": "perplexity with {share:.0%} of the steps bounded over the lowest with another share",
}
OF_KIND = {"word_problem": "accuracy on the last ten tokens", "lm_eval": "average accuracy on the downstream tasks"}
RECORD_WORDS = {
    "token_agreement": "share of tokens with the same most likely next token in both modes",
    "off_diagonal_share": "share of the Jacobian off its diagonal, of the Frobenius norm",
    "relative_difference": "relative difference of the paper's formula and autograd",
    "f_radius": "spectral radius of ∂f/∂z at the fixed point",
}


@dataclass(frozen=True)
class Quantity:
    """A number that each of several models has; the rules are in quantities.py.

    kind: of the evaluations it is made from. key, where: for "record", the value that is averaged and what its
    records must have. speaks: "best" lets the model that does best decide, "all" asks it of every model. share: of
    the bounded phase in all steps.
    """

    name: QuantityName
    kind: str
    speaks: Literal["best", "all"] = "all"
    key: str | None = None
    where: dict[str, Any] | None = None
    model: Literal["implicit", "explicit"] | None = None
    family: str | None = None
    length_factor: float = 1.0
    share: float = 0.8

    def __post_init__(self) -> None:
        if (self.name == "record") != (self.key is not None):
            raise ValueError("give a key for the quantity `record`, and for no other")
        if self.key is not None and self.key not in RECORD_WORDS:
            raise ValueError(f"key {self.key!r} has no words; use one of {', '.join(sorted(RECORD_WORDS))}")
        if self.name in ("gain_by_iterations", "above_explicit") and self.kind not in OF_KIND:
            raise ValueError(f"kind {self.kind!r} is not swept for claims; use one of {', '.join(sorted(OF_KIND))}")

    @property
    def metric(self) -> str:
        return self.key or self.name

    @property
    def words(self) -> str:
        if self.key is not None:
            return RECORD_WORDS[self.key]
        return WORDS[self.name].format(
            of=OF_KIND.get(self.kind, ""), factor=f"{self.length_factor:g}", share=self.share
        )
