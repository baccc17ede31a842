"""What a claim can measure: a number of word problems, a comparison of two kinds of models, or a derived number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

METRIC_WORDS = {
    "accuracy_last10": "accuracy on the last ten tokens",
    "accuracy_sequence": "share of sequences with every answer right",
    "accuracy_token": "accuracy over all tokens",
    "f_evaluations_per_token": "f-evaluations per token",
    "serial_steps": "evaluations of the layer stack that wait for one another, for each token",
    "unconverged_share": "share of unconverged tokens",
    "token_match_sequential": "share of tokens predicted as in sequential mode",
    "above_chance": "last-ten accuracy above the best constant answer",
}


@dataclass(frozen=True)
class Measure:
    """What is measured, on which points; a field that is None does not restrict.

    `modes` are two modes to compare (first minus or divided by second) for the kinds difference and ratio; `mode` is
    one mode, "headline" for the one that speaks for its run. `length_factor` is test length over training length;
    `is_harder` asks for tests with more, or no more, hard tokens than training had; `most_iterations` for models whose
    solver was allowed no more of them in training. `speaks`: whether the best run decides or all must agree; None lets
    the best one show that something can be done (`at_least`), and asks all that it cannot be (`at_most`).
    """

    metric: str
    kind: Literal["value", "difference", "ratio"] = "value"
    model: Literal["implicit", "explicit"] | None = None
    family: str | None = None
    group: str | None = None
    monoid: str | None = None
    num_layers: int | None = None
    train_length: int | None = None
    train_hard_fraction: float | None = None
    most_iterations: int | None = None
    length_factor: float | None = None
    is_harder: bool | None = None
    mode: str | None = None
    modes: tuple[str, str] | None = None
    speaks: Literal["best", "all"] | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRIC_WORDS:
            raise ValueError(f"metric {self.metric!r} is unknown; use one of {', '.join(sorted(METRIC_WORDS))}")
        if (self.kind == "value") == (self.modes is not None):
            raise ValueError(f"kind {self.kind!r} {'takes no' if self.modes else 'needs two'} modes")

    @property
    def is_share(self) -> bool:
        return self.kind != "ratio" and self.metric != "serial_steps"

    @property
    def words(self) -> str:
        """What the number is, for the reader."""
        compared = (" minus " if self.kind == "difference" else " over ").join(self.modes or ())
        kind = {"value": "", "difference": "difference of ", "ratio": "ratio of "}[self.kind]
        return kind + METRIC_WORDS[self.metric] + (f", {compared}" if compared else "")


@dataclass(frozen=True)
class PairMeasure:
    """A comparison of models of one size, `first` against `second`; the rules are in pairs.py.

    metric: "perplexity" on held-out text, as the ratio first over second; "downstream", by how much the first does
    better in the `column` of a suite, or in its first average; "babi_tasks", the share of CatbAbI's tasks on which the
    first is more accurate. implicit is any implicit model; bounded and free are the phases of one run with the fewest
    and with more solver iterations. length_factor is test length over training length; equal says what the two models
    share beside their size: training tokens, or training FLOPs.
    """

    metric: Literal["perplexity", "downstream", "babi_tasks"]
    first: Literal["implicit", "free", "bounded"]
    second: Literal["explicit", "bounded"] = "explicit"
    family: str | None = None
    length_factor: float = 1.0
    equal: Literal["tokens", "flops"] = "tokens"
    num_layers: int | None = None
    column: str | None = None

    @property
    def is_share(self) -> bool:
        return self.metric != "perplexity"

    @property
    def words(self) -> str:
        if self.metric == "babi_tasks":
            return f"share of the tasks on which the {self.first} model is more accurate"
        shared = "training FLOPs" if self.equal == "flops" else "training tokens"
        equal = f"at equal parameters and {shared}"
        if self.metric == "perplexity":
            return f"perplexity of the {self.first} over that of the {self.second} model, {equal}"
        of = self.column or "average accuracy"
        return f"by how much the {self.first} model is better than the {self.second} one, {of}, {equal}"


QuantityName = Literal[
    "record",
    "gain_by_iterations",
    "above_explicit",
    "layers_needed",
    "growth_of_layers",
    "growth_of_perplexity",
    "over_other_shares",
    "over_larger",
    "settled_early",
]

WORDS: dict[str, str] = {
    "gain_by_iterations": "{of} with the most iterations allowed at test time minus that with the fewest",
    "above_explicit": "{of} with the most iterations allowed at test time minus that of the explicit model",
    "layers_needed": "fewest layers that solve the length that takes most",
    "growth_of_layers": "fewest layers at the longest length minus those at the shortest",
    "growth_of_perplexity": "perplexity at {factor} times the training length over that at the training length",
    "over_other_shares": "perplexity with {share:.0%} of the steps bounded over the lowest with another share",
    "over_larger": "perplexity over that of an explicit model of 1.5 to 2.5 times its size, at equal tokens",
    "settled_early": "share of the predictions that are final after a quarter of the iterations",
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
    """A number that each of several models has; the rules are in findings.py.

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
    def is_share(self) -> bool:
        return False

    @property
    def words(self) -> str:
        if self.key is not None:
            return RECORD_WORDS[self.key]
        return WORDS[self.name].format(
            of=OF_KIND.get(self.kind, ""), factor=f"{self.length_factor:g}", share=self.share
        )
