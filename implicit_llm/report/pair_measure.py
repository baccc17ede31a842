"""What a claim compares between two kinds of models."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from implicit_llm.report.evidence import Evidence
from implicit_llm.report.results import Spread
from implicit_llm.report.training_runs import Solver

PairMetric = Literal["perplexity", "downstream", "babi_tasks"]


@dataclass(frozen=True)
class PairMeasure:
    """A comparison of models of one size, `first` against `second`; the rules are in pair_claims.py.

    metric: "perplexity" on held-out text, as the ratio first over second; "downstream", by how much the first does
    better in the `column` of a suite, or in its first average; "babi_tasks", the share of CatbAbI's tasks on which the
    first is more accurate. implicit is any implicit model; bounded and free are the phases of one run with the fewest
    and with more solver iterations. length_factor is test length over training length; equal says what the two models
    share beside their size: training tokens, or training FLOPs.
    """

    metric: PairMetric
    first: Literal["implicit", "free", "bounded"]
    second: Literal["explicit", "bounded"] = "explicit"
    family: str | None = None
    length_factor: float = 1.0
    equal: Literal["tokens", "flops"] = "tokens"
    num_layers: int | None = None
    column: str | None = None

    @property
    def kind(self) -> str:
        return "ratio" if self.metric == "perplexity" else "value"

    @property
    def threshold(self) -> float:
        """What a share or a difference must lie above."""
        return 0.5 if self.metric == "babi_tasks" else 0.0

    @property
    def needs(self) -> str:
        words = "< 1" if self.metric == "perplexity" else f"> {self.threshold:g}"
        return f"{words} for every pair of seeds"

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


@dataclass(frozen=True)
class Pair:
    """The number for every pair of seeds of the two runs that speak for a group, and what it comes from."""

    spread: Spread
    evidence: Evidence


def phase_kinds(solver: Solver | None, solvers_of_run: Set[Solver | None]) -> set[str]:
    """implicit, and bounded or free where the run has phases of both."""
    iterations = {iterations_of(other) for other in solvers_of_run}
    if len(iterations) < 2:
        return {"implicit"}
    return {"implicit", "bounded" if iterations_of(solver) == min(iterations) else "free"}


def iterations_of(solver: Solver | None) -> int:
    """The most solver iterations of a phase, 0 where it has none or they are not known."""
    return 0 if solver is None else solver.iterations


def seeds_text(spreads: list[Spread]) -> str:
    """ "2 and 3 seeds, 1 missing"."""
    counts = [len(spread.values) for spread in spreads]
    words = f"{counts[0]} and {counts[1]} seeds"
    missing = sum(spread.num_missing for spread in spreads)
    return words + (f", {missing} missing" if missing else "") + (", no spread" if max(counts) <= 1 else "")
