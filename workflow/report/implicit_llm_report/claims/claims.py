"""Checking the statements of claims.yaml against the measured numbers.

A claim names what to measure (measure.py) and a bound on it; one rule judges the numbers of all models that compete. A
claim that the best run decides holds when all numbers of that run keep the bound, so a sweep of settings, some of
them bad, does not refute what one of them shows; every other claim must be met by all, and the one that meets it least
is shown.

A number keeps its bound when every seed (or pair of seeds) does, and breaks it when none does; where they disagree the
verdict is "borderline". The share of a single seed is judged by its 95 % interval over the test sequences. A missing
number never helps: the claim is then "missing", unless another model refutes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from implicit_llm_contracts.runs.fill import fill
from implicit_llm_report.claims.measure import Found, Measure
from implicit_llm_report.config import ReportError, read_yaml
from implicit_llm_report.inputs.frame import Spread
from implicit_llm_report.inputs.published import Mark

Verdict = Literal["holds", "borderline", "fails", "not run at this scale", "missing"]
HOLDS: Final = "holds"
BORDERLINE: Final = "borderline"
FAILS: Final = "fails"
NOT_RUN: Final = "not run at this scale"
MISSING: Final = "missing"
RANKS: dict[Verdict, int] = {MISSING: -1, FAILS: 0, BORDERLINE: 1, HOLDS: 2}
Z_95 = 1.96  # standard deviations that leave 5 % outside


@dataclass(frozen=True)
class Condition:
    """What must be true of the number: exactly one bound; `above` and `below` are of every pair of seeds."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    def __post_init__(self) -> None:
        if sum(bound is not None for bound in (self.at_least, self.at_most, self.above, self.below)) != 1:
            raise ValueError("give exactly one of at_least, at_most, above and below")

    def margin(self, value: float) -> float:
        """By how much the bound is kept; negative where it is not."""
        if self.at_least is not None or self.above is not None:
            return value - (self.above if self.at_least is None else self.at_least)  # type: ignore[operator]
        return (self.below if self.at_most is None else self.at_most) - value  # type: ignore[operator]

    def keeps(self, value: float) -> bool:
        return self.margin(value) >= 0 if self.above is None and self.below is None else self.margin(value) > 0

    def verdict(self, values: Sequence[float]) -> Verdict:
        """Of the ends of an interval, or of the seeds; at least one."""
        kept = [self.keeps(value) for value in values]
        return HOLDS if all(kept) else BORDERLINE if any(kept) else FAILS

    @property
    def text(self) -> str:
        if self.at_least is not None or self.at_most is not None:
            return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"
        return (f"> {self.above:g}" if self.above is not None else f"< {self.below:g}") + " for every pair of seeds"


@dataclass(frozen=True)
class Claim:
    """A checkable statement. `origin`: the paper's own, or one of this project; `scales`: where it can be judged."""

    id: str
    statement: str
    origin: Literal["paper", "project"]
    where: str
    published: str | None
    mark: Mark | None
    scales: tuple[str, ...]
    measure: Measure
    holds_if: Condition

    @property
    def speaks_for_best(self) -> bool:
        """Whether one run that does it is enough."""
        can_be_done = self.measure.against is None and self.holds_if.at_least is not None
        return self.measure.speaks == "best" or (self.measure.speaks is None and can_be_done)


@dataclass(frozen=True)
class Judgement:
    """A claim with what was measured and what follows; without evidence there is no number."""

    claim: Claim
    verdict: Verdict
    evidence: Found | None = None
    num_competing: int = 0  # runs, or pairs of runs, that the verdict chose among

    @property
    def spread(self) -> Spread:
        return Spread(()) if self.evidence is None else self.evidence.spread

    @property
    def interval(self) -> tuple[float, float] | None:
        return interval(self.evidence) if self.evidence else None

    def to_dict(self) -> dict[str, Any]:
        """The claim's entry in claims.json; numbers that do not exist are null."""
        evidence = self.evidence
        return {
            "id": self.claim.id,
            "statement": self.claim.statement,
            "origin": self.claim.origin,
            "where": self.claim.where,
            "published": self.claim.published,
            "mark": self.claim.mark,
            "condition": self.claim.holds_if.text,
            "verdict": self.verdict,
            "measured": {"mean": self.spread.mean, "low": self.spread.low, "high": self.spread.high},
            "num_seeds": evidence.num_seeds if evidence else 0,
            "num_missing": self.spread.num_missing,
            "num_competing": self.num_competing,
            "interval": list(self.interval) if self.interval else None,
            "metric": self.claim.measure.metric,
            "run": evidence.run if evidence else None,
            "data": evidence.data if evidence else None,
            "modes": list(evidence.modes) if evidence else [],
            "sources": list(evidence.roles) if evidence else [],
        }


CLAIMS = Path(__file__).with_name("claims.yaml")


def load_claims(path: Path = CLAIMS) -> tuple[Claim, ...]:
    """Read the file. Raises: UserError naming file and key."""
    content = read_yaml(path)
    if not isinstance(content, dict) or not isinstance(content.get("claims"), list):
        raise ReportError(f"{path}: has no list `claims`; see its first lines for the form")
    claims = tuple(fill(Claim, entry, f"{path}: claims[{index}]") for index, entry in enumerate(content["claims"]))
    ids = [claim.id for claim in claims]
    for name in ids:
        if ids.count(name) > 1:
            raise ReportError(f"{path}: the claim id {name} is used twice; give every claim an id of its own")
    return claims


def judge(claim: Claim, found: Sequence[Found], scale: str) -> Judgement:
    """The verdict on one claim at the scale of the experiment of that name, see the head of this file."""
    if scale not in claim.scales or not found:
        return Judgement(claim, NOT_RUN)

    def verdict_on(item: Found) -> Verdict:
        return MISSING if item.spread.mean is None else claim.holds_if.verdict(interval(item) or item.spread.values)

    def rank(item: Found) -> tuple[int, float]:
        return RANKS[verdict_on(item)], claim.holds_if.margin(item.spread.mean or 0.0)

    lacking = [item for item in found if item.is_lacking]
    of_run = {item.run: [other for other in found if other.run == item.run] for item in found}
    if claim.speaks_for_best:
        deciding = max((min(items, key=rank) for items in of_run.values()), key=rank)
        lacking = [deciding] if deciding.is_lacking else []
    else:
        deciding = min([item for item in found if item.spread.mean is not None] or found, key=rank)
    if lacking and (deciding in lacking or verdict_on(deciding) != FAILS):
        return Judgement(claim, MISSING, deciding if deciding in lacking else lacking[0], len(of_run))
    return Judgement(claim, verdict_on(deciding), deciding, len(of_run))


def interval(found: Found) -> tuple[float, float] | None:
    """The 95 % interval of a single seed's share; None where seeds tell the spread, or it is no share."""
    if len(found.spread.values) != 1 or not found.num_samples:
        return None
    return wilson(found.spread.values[0], found.num_samples)


def wilson(share: float, num_samples: int) -> tuple[float, float]:
    """The 95 % interval of a share of `num_samples` independent trials (Wilson's score interval)."""
    scale = 1 + Z_95**2 / num_samples
    middle = (share + Z_95**2 / (2 * num_samples)) / scale
    half = Z_95 / scale * (share * (1 - share) / num_samples + (Z_95 / (2 * num_samples)) ** 2) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)
