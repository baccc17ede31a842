"""Checking the statements of claims.yaml against the measured numbers.

A claim names what to measure (measure.py) and a bound on it; one rule judges the numbers of all models that compete. A
claim that the best run decides holds when all numbers of that run keep the bound, so a sweep of settings, some of
them bad, does not refute what one of them shows; every other claim must be met by all, and the one that meets it least
is shown.

A number keeps its bound when every seed (or pair of seeds) does, and breaks it when none does; where they disagree the
verdict is "borderline". The share of a single seed is judged by its 95 % interval over the test sequences. A missing
number never helps: the claim is then "missing", unless another model refutes it.
"""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd

from implicit_llm_report.claims.measure import Found, Measure, find
from implicit_llm_report.config import FOLDER, read_yaml
from implicit_llm_report.inputs.frame import Spread
from implicit_llm_report.inputs.published import Mark

Verdict = Literal["holds", "borderline", "fails", "not run at this scale", "missing"]
HOLDS: Final = "holds"
BORDERLINE: Final = "borderline"
FAILS: Final = "fails"
NOT_RUN: Final = "not run at this scale"
MISSING: Final = "missing"
RANKS: dict[Verdict, int] = {MISSING: -1, FAILS: 0, BORDERLINE: 1, HOLDS: 2}
SIGNS = {">=": ("≥", operator.ge), "<=": ("≤", operator.le), ">": (">", operator.gt), "<": ("<", operator.lt)}


@dataclass(frozen=True)
class Claim:
    """A checkable statement. `origin`: the paper's own, or one of this project; `scales`: where it can be judged.

    holds_if: a bound on the number, ">= 0.95"; the bounds > and < are of every pair of seeds.
    """

    id: str
    statement: str
    origin: Literal["paper", "project"]
    where: str
    published: str | None
    mark: Mark | None
    scales: tuple[str, ...]
    measure: Measure
    holds_if: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[<>]=? -?[\d.]+(e-?\d+)?", self.holds_if):
            raise ValueError(f"holds_if: {self.holds_if!r} is no bound; give one such as '>= 0.95'")

    @property
    def speaks_for_best(self) -> bool:
        """Whether one run that does it is enough."""
        can_be_done = self.measure.against is None and self.holds_if.startswith(">=")
        return self.measure.speaks == "best" or (self.measure.speaks is None and can_be_done)

    @property
    def _bound(self) -> tuple[str, float]:
        sign, bound = self.holds_if.split()
        return sign, float(bound)

    @property
    def condition(self) -> str:
        """The bound in words."""
        sign, bound = self._bound
        return f"{SIGNS[sign][0]} {bound:g}"

    def margin(self, value: float) -> float:
        """By how much the bound is kept; negative where it is not."""
        sign, bound = self._bound
        return value - bound if ">" in sign else bound - value

    def verdict(self, values: Sequence[float]) -> Verdict:
        """Of the ends of an interval, or of the seeds; at least one."""
        sign, bound = self._bound
        kept = [SIGNS[sign][1](value, bound) for value in values]
        return HOLDS if all(kept) else BORDERLINE if any(kept) else FAILS


@dataclass(frozen=True)
class Judgement:
    """A claim with what was measured and what follows; without evidence there is no number."""

    claim: Claim
    verdict: Verdict
    evidence: Found = field(default_factory=Found)
    num_competing: int = 0  # runs, or pairs of runs, that the verdict chose among

    @property
    def spread(self) -> Spread:
        return self.evidence.spread

    def to_dict(self) -> dict[str, Any]:
        """The claim's entry in claims.json; numbers that do not exist are null."""
        stated = ("id", "statement", "origin", "where", "published", "mark", "condition")
        return {
            **{key: getattr(self.claim, key) for key in stated},
            "verdict": self.verdict,
            "measured": {part: getattr(self.spread, part) for part in ("mean", "low", "high")},
            "num_missing": self.spread.num_missing,
            "num_competing": self.num_competing,
            "metric": self.claim.measure.metric,
            **{key: getattr(self.evidence, key) for key in ("num_seeds", "interval", "run", "data", "modes")},
            "sources": self.evidence.roles,
        }


@dataclass(frozen=True)
class _Claims:
    claims: tuple[Claim, ...]


def load_claims(path: Path = FOLDER / "claims/claims.yaml") -> tuple[Claim, ...]:
    """Read the file. Raises: UserError naming file and key."""
    return read_yaml(path, _Claims).claims


def judge(claim: Claim, frame: pd.DataFrame, scale: str) -> Judgement:
    """The verdict on one claim at the scale of the experiment of that name, see the head of this file."""
    found = find(claim.measure, frame) if scale in claim.scales else []
    if not found:
        return Judgement(claim, NOT_RUN)

    def verdict_on(item: Found) -> Verdict:
        return MISSING if item.spread.mean is None else claim.verdict(item.interval or item.spread.values)

    def rank(item: Found) -> tuple[int, float]:
        return RANKS[verdict_on(item)], claim.margin(item.spread.mean or 0.0)

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
