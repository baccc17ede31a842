"""Judge the claims of claims.yaml by the measured numbers.

A claim names a bound and a measure (measure.py), which computes a number for each matching model or pair of models. The
best run decides some claims: they are reproduced if all numbers of one run meet the bound. A good setting of a sweep is
then enough, although other settings are bad. All models must meet the bound of any other claim, and the model with the
smallest margin is shown.

A number meets its bound if every seed (or pair of seeds) does, and misses it if none does. If the seeds disagree, the
verdict is "depends on the seed". The share of a single seed is judged by its 95 % interval over the test sequences,
which may leave it undecided. If any number lacks a seed, the claim is "missing", with two exceptions. If the best run
decides, one complete run that meets the bound is enough. Any other claim is not reproduced if its worst model is
complete and misses the bound. Controls are judged by the same bound, and are named beside the verdict.
"""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd

from implicit_llm_report.claims.measure import Found, Measure, find
from implicit_llm_report.config import FOLDER, read_yaml
from implicit_llm_report.inputs.frame import Spread
from implicit_llm_report.inputs.published import Mark

Verdict = Literal["reproduced", "depends on the seed", "undecided", "not reproduced", "not run", "missing"]
HOLDS: Final = "reproduced"
BY_SEED: Final = "depends on the seed"
UNDECIDED: Final = "undecided"
FAILS: Final = "not reproduced"
NOT_RUN: Final = "not run"
MISSING: Final = "missing"
RANKS: dict[Verdict, int] = {MISSING: -1, FAILS: 0, BY_SEED: 1, UNDECIDED: 1, HOLDS: 2}
# The columns of the frame by which a claim selects an evaluation mode.
MODE_COLUMNS = ("is_headline", "mode", "eval_mode", "eval_block_len", "eval_stop", "eval_tol", "eval_max_iter")
SIGNS = {">=": ("≥", operator.ge), "<=": ("≤", operator.le), ">": (">", operator.gt), "<": ("<", operator.lt)}


@dataclass(frozen=True)
class Control:
    """A model without the feature that the claim credits, or the deciding model in another evaluation mode.

    of: replaces the `of` of the claim's measure. mode: selects this mode of the deciding model, instead of `of`. An
    experiment that does not plan the mode has no such control. Raises: ValueError unless there is one of the two.
    """

    name: str
    of: Mapping[str, Any] | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        if (self.of is None) == (self.mode is None):
            raise ValueError(f"control {self.name!r}: give either `of` or `mode`")


@dataclass(frozen=True)
class Claim:
    """A statement that can be tested.

    origin: the paper or this project. scales: the experiments that can test the claim. holds_if: a bound on the number
    of every seed or pair of seeds, such as ">= 0.95". where: the place in the paper. how: remarks. short: the statement
    in the verdict table. is_headline: whether the claim is in the short table. full: the training tokens and parameters
    of the published result. Raises: ValueError for an invalid `holds_if` or key of `full`.
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
    how: str | None = None
    short: str | None = None
    is_headline: bool = False
    full: Mapping[str, float] = field(default_factory=dict)
    controls: tuple[Control, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[<>]=? -?[\d.]+(e-?\d+)?", self.holds_if):
            raise ValueError(f"holds_if: {self.holds_if!r} is no bound; give one such as '>= 0.95'")
        if unknown := self.full.keys() - {"train_tokens", "num_parameters"}:
            raise ValueError(f"full: {min(unknown)!r} is unknown; use train_tokens or num_parameters")

    @property
    def speaks_for_best(self) -> bool:
        """Whether one run that meets the bound is enough."""
        can_be_done = self.measure.against is None and self.holds_if.startswith(">=")
        return self.measure.speaks == "best" or (self.measure.speaks is None and can_be_done)

    @property
    def _bound(self) -> tuple[str, float]:
        sign, bound = self.holds_if.split()
        return sign, float(bound)

    @property
    def condition(self) -> str:
        """The bound as text, such as "≥ 0.95"."""
        sign, bound = self._bound
        return f"{SIGNS[sign][0]} {bound:g}"

    def verdict_on(self, found: Found) -> Verdict:
        """Return the verdict on the number of a model or pair: by the ends of its interval, if any, else by seed."""
        sign, bound = self._bound
        kept = [SIGNS[sign][1](value, bound) for value in found.interval or found.spread.values]
        disagreeing: Verdict = UNDECIDED if found.interval else BY_SEED
        return MISSING if not kept else HOLDS if all(kept) else disagreeing if any(kept) else FAILS

    def rank(self, found: Found) -> tuple[int, float, float]:
        """Return a sorting key, highest for the best: verdict, margin between mean and bound, training tokens."""
        margin = (found.spread.mean or 0.0) - self._bound[1]
        return RANKS[self.verdict_on(found)], -margin if self.is_most else margin, found.train_tokens or 0.0

    @property
    def is_most(self) -> bool:
        """Whether the bound is an upper bound, so that the highest number is the worst."""
        return "<" in self.holds_if


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim and its evidence.

    num_competing: the number of competing runs; one of them decides. Pairs with the same first run count once.
    others: the worst number of each run that does not decide.
    """

    claim: Claim
    verdict: Verdict
    evidence: Found = field(default_factory=Found)
    num_competing: int = 0
    is_asked: bool = True  # whether the experiment can test the claim
    others: tuple[Found, ...] = ()
    controls: tuple["Judgement", ...] = ()

    @property
    def spread(self) -> Spread:
        return self.evidence.spread

    def to_dict(self) -> dict[str, Any]:
        """Return the claim's entry in claims.json, in which missing numbers are null."""
        stated = ("id", "statement", "short", "origin", "where", "published", "mark", "condition", "is_headline")
        measured = ("num_seeds", "num_samples", "of_pair", "interval", "bounds", "run", "data", "modes")
        return {
            **{key: getattr(self.claim, key) for key in (*stated, "scales")},
            "verdict": self.verdict,
            "is_asked": self.is_asked,
            "form": self.claim.measure.form,
            "measured": _ends(self.spread),
            "worst": self.spread.high if self.claim.is_most else self.spread.low,
            "best": self.spread.low if self.claim.is_most else self.spread.high,
            "num_missing": self.spread.num_missing,
            "num_competing": self.num_competing,
            "is_best_of_them": self.claim.speaks_for_best,
            "others": {one.run: one.spread.mean for one in self.others if one.run is not None},
            "full": {key: [getattr(self.evidence, key), value] for key, value in self.claim.full.items()},
            "controls": [
                {"name": one.claim.statement, "verdict": one.verdict, **_ends(one.spread)} for one in self.controls
            ],
            "metric": self.claim.measure.metric,
            **{key: getattr(self.evidence, key) for key in measured},
            "sources": self.evidence.roles,
        }


def _ends(spread: Spread) -> dict[str, float | None]:
    return {part: getattr(spread, part) for part in ("mean", "low", "high")}


@dataclass(frozen=True)
class _Claims:
    claims: tuple[Claim, ...]


def load_claims(path: Path = FOLDER / "claims/claims.yaml") -> tuple[Claim, ...]:
    """Read the claims of a file. Raises: UserError, which names file and key."""
    return read_yaml(path, _Claims).claims


def judge(claim: Claim, frame: pd.DataFrame, scale: str) -> Judgement:
    """Return the verdict on one claim in the experiment called `scale`, by the rules at the head of this file."""
    found = find(claim.measure, frame) if scale in claim.scales else []
    if not found:
        return Judgement(claim, NOT_RUN, is_asked=scale in claim.scales)
    lacking = [item for item in found if item.is_lacking]
    of_run = {item.run: [other for other in found if other.run == item.run] for item in found}
    worst_of_run = [min(items, key=claim.rank) for items in of_run.values()]
    if claim.speaks_for_best:
        whole = [worst for worst in worst_of_run if not any(item.is_lacking for item in of_run[worst.run])]
        held = [worst for worst in whole if claim.verdict_on(worst) == HOLDS]
        deciding = max(held or worst_of_run, key=claim.rank)
        lacking = [] if held else lacking
    else:
        deciding = min([item for item in found if item.spread.mean is not None] or found, key=claim.rank)
    verdict = claim.verdict_on(deciding)
    if lacking and (claim.speaks_for_best or deciding in lacking or verdict != FAILS):
        verdict, deciding = MISSING, deciding if deciding in lacking else lacking[0]
    others = tuple(item for item in worst_of_run if item.run != deciding.run)
    controls = ((one, _judge_control(claim, one, deciding, frame, scale)) for one in claim.controls)
    planned = tuple(control for one, control in controls if one.mode is None or control.verdict != NOT_RUN)
    return Judgement(claim, verdict, deciding, len(of_run), others=others, controls=planned)


def _judge_control(claim: Claim, control: Control, deciding: Found, frame: pd.DataFrame, scale: str) -> Judgement:
    """Judge a control by the bound of its claim; `deciding` is the model that decides the claim."""
    of = control.of
    if of is None:
        frame = frame[frame.name == deciding.run]
        of = {key: value for key, value in claim.measure.of.items() if key not in MODE_COLUMNS} | {"mode": control.mode}
    measure = replace(claim.measure, of=of)
    return judge(replace(claim, statement=control.name, measure=measure, controls=()), frame, scale)
