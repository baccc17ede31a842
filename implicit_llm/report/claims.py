"""Checking the statements of workflow/report/claims.yaml against the measured numbers.

A claim names what to measure (a number, or a difference or ratio between two modes), on which runs and test sets, and
what must be true of it. It is judged on the mean over seeds. A claim that something can be done (`at_least`) speaks of
the best matching run and must hold on all of that run's matching test sets; one that something cannot be done
(`at_most`) must hold for every run. So a sweep of settings, some of them bad, does not refute what one of them shows.

A claim that compares two kinds of models (`compare`) is judged by pair_claims.py, one about a number that is derived
from several tests (`quantity`) by quantity_claims.py, by rules that stand there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from implicit_llm.report.config import ReportError
from implicit_llm.report.evidence import Evidence
from implicit_llm.report.pair_measure import PairMeasure, iterations_of
from implicit_llm.report.published import Mark
from implicit_llm.report.quantity_measure import Quantity
from implicit_llm.report.results import Cell, Point, Results, Spread
from implicit_llm.report.yaml_file import read_yaml
from implicit_llm_contracts.runs.fill import fill

Verdict = Literal["holds", "fails", "not run at this scale", "missing"]
HOLDS: Final = "holds"
FAILS: Final = "fails"
NOT_RUN: Final = "not run at this scale"
MISSING: Final = "missing"
HEADLINE = "headline"


METRIC_WORDS = {
    "accuracy_last10": "accuracy on the last ten tokens",
    "accuracy_sequence": "share of sequences with every answer right",
    "accuracy_token": "accuracy over all tokens",
    "f_evaluations_per_token": "f-evaluations per token",
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
    solver was allowed no more of them in training.
    """

    metric: str
    kind: Literal["value", "difference", "ratio"] = "value"
    model: Literal["implicit", "explicit"] | None = None
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

    def __post_init__(self) -> None:
        if self.metric not in METRIC_WORDS:
            raise ValueError(f"metric {self.metric!r} is unknown; use one of {', '.join(sorted(METRIC_WORDS))}")
        if (self.kind == "value") == (self.modes is not None):
            raise ValueError(f"kind {self.kind!r} {'takes no' if self.modes else 'needs two'} modes")

    @property
    def words(self) -> str:
        """What the number is, for the reader."""
        compared = (" minus " if self.kind == "difference" else " over ").join(self.modes or ())
        kind = {"value": "", "difference": "difference of ", "ratio": "ratio of "}[self.kind]
        return kind + METRIC_WORDS[self.metric] + (f", {compared}" if compared else "")


@dataclass(frozen=True)
class Condition:
    """What must be true of the number: exactly one of the two."""

    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give exactly one of at_least and at_most")

    def is_met(self, value: float) -> bool:
        return value >= self.at_least if self.at_least is not None else value <= self.at_most  # type: ignore[operator]

    @property
    def text(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


@dataclass(frozen=True)
class Claim:
    """A checkable statement. `origin`: the paper's own, or one of this project; `scales`: where it can be judged.

    It has one of `measure` and `quantity`, with `holds_if`, or `compare` without.
    """

    id: str
    statement: str
    origin: Literal["paper", "project"]
    where: str
    published: str | None
    mark: Mark | None
    scales: tuple[str, ...]
    measure: Measure | None = None
    holds_if: Condition | None = None
    compare: PairMeasure | None = None
    quantity: Quantity | None = None

    def __post_init__(self) -> None:
        given = [item for item in (self.measure, self.quantity, self.compare) if item is not None]
        if len(given) != 1 or (self.compare is None) != (self.holds_if is not None):
            raise ValueError("give either measure or quantity, with holds_if, or compare without")

    @property
    def needs(self) -> str:
        """What must be true of the number."""
        return self.holds_if.text if self.holds_if is not None else self.compare.needs  # type: ignore[union-attr]

    @property
    def words(self) -> str:
        """What the number is, for the reader."""
        return self._measured.words

    @property
    def metric(self) -> str:
        return self._measured.metric

    @property
    def is_share(self) -> bool:
        """Whether the number is an accuracy, a share or a difference of two: shown with three decimals."""
        return self.quantity is None and self._measured.kind != "ratio"

    @property
    def _measured(self) -> Measure | PairMeasure | Quantity:
        return self.measure or self.quantity or self.compare  # type: ignore[return-value]


@dataclass(frozen=True)
class Judgement:
    """A claim with what was measured and what follows; without evidence there is no number."""

    claim: Claim
    verdict: Verdict
    spread: Spread
    evidence: Evidence | None = None

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
            "condition": self.claim.needs,
            "verdict": self.verdict,
            "measured": {"mean": self.spread.mean, "low": self.spread.low, "high": self.spread.high},
            "num_seeds": evidence.num_seeds if evidence else 0,
            "num_missing": self.spread.num_missing,
            "metric": self.claim.metric,
            "run": evidence.run if evidence else None,
            "data": evidence.data if evidence else None,
            "modes": list(evidence.modes) if evidence else [],
            "sources": list(evidence.roles) if evidence else [],
        }


def load_claims(path: Path) -> tuple[Claim, ...]:
    """Read the file. Raises: UserError naming file and key."""
    content = read_yaml(path)
    if not isinstance(content, dict) or not isinstance(content.get("claims"), list):
        raise ReportError(f"{path}: has no list `claims`; see its first lines for the form")
    claims = tuple(fill(Claim, entry, f"{path}: claims[{index}]") for index, entry in enumerate(content["claims"]))
    ids = [claim.id for claim in claims]
    for name in ids:
        if ids.count(name) > 1:
            raise ReportError(f"{path}: the claim id {name} stands twice; give every claim an id of its own")
    return claims


def judge(claim: Claim, results: Results, scale: str) -> Judgement:
    """The verdict on one claim at the scale of the experiment of that name.

    "missing" means that there are such runs and they gave no number; without such runs it was not run at this scale.
    """
    if scale not in claim.scales or claim.measure is None or claim.holds_if is None:
        return Judgement(claim, NOT_RUN, Spread(()))
    by_run: dict[str, list[tuple[Spread, tuple[Cell, ...]]]] = {}
    for cells in _candidates(claim.measure, results):
        by_run.setdefault(cells[0].first.run, []).append((_measured(claim.measure, cells), cells))
    if not by_run:
        return Judgement(claim, NOT_RUN, Spread(()))
    spread, cells = _deciding(by_run.values(), claim.holds_if)
    evidence = Evidence.of_cells(cells, spread)
    # A seed without a number (it diverged, or was not run) is no evidence for a claim that something can be done.
    if spread.mean is None or (spread.num_missing and claim.holds_if.at_least is not None):
        return Judgement(claim, MISSING, spread, evidence)
    return Judgement(claim, HOLDS if claim.holds_if.is_met(spread.mean) else FAILS, spread, evidence)


def _deciding(
    runs: Iterable[list[tuple[Spread, tuple[Cell, ...]]]], condition: Condition
) -> tuple[Spread, tuple[Cell, ...]]:
    """The measurement that decides: see the head of this file."""

    def height(item: tuple[Spread, tuple[Cell, ...]]) -> float:
        return item[0].mean if item[0].mean is not None else float("-inf")

    if condition.at_least is not None:
        return max((min(measured, key=height) for measured in runs), key=height)
    return max((item for measured in runs for item in measured), key=height)


def _candidates(measure: Measure, results: Results) -> list[tuple[Cell, ...]]:
    """The cells (pairs of cells for a difference or ratio) that the claim speaks of."""
    cells = [cell for cell in results.cells if _is_meant(measure, cell.first)]
    if measure.modes is None:
        return [(cell,) for cell in cells if _is_mode(measure.mode, cell, results)]
    pairs: list[tuple[Cell, ...]] = []
    first, second = measure.modes
    for cell in cells:
        if _is_mode(first, cell, results):
            same = (c for c in cells if (c.first.run, c.first.data) == (cell.first.run, cell.first.data))
            pairs += [(cell, other) for other in same if _is_mode(second, other, results) and other is not cell]
    return pairs


def _is_mode(mode: str | None, cell: Cell, results: Results) -> bool:
    wanted = results.headline_of(cell.first.run) if mode == HEADLINE else mode
    return wanted is None or cell.first.mode == wanted


def _is_meant(measure: Measure, point: Point) -> bool:
    for key in ("group", "monoid", "num_layers", "train_length", "train_hard_fraction", "is_harder"):
        wanted = getattr(measure, key)
        if wanted is not None and getattr(point, key) != wanted:
            return False
    if measure.model is not None and point.is_implicit != (measure.model == "implicit"):
        return False
    if measure.most_iterations is not None and not 0 < iterations_of(point.solver) <= measure.most_iterations:
        return False
    return measure.length_factor is None or _factor(point) == measure.length_factor


def _factor(point: Point) -> float | None:
    return point.length / point.train_length if point.train_length else None


def _measured(measure: Measure, cells: tuple[Cell, ...]) -> Spread:
    def read(point: Point) -> float | None:
        if measure.metric == "above_chance":
            return _difference(point.accuracy_last10, point.chance_last10)
        return getattr(point, measure.metric)

    if measure.kind == "value":
        return cells[0].spread(read)
    second = {point.seed: read(point) for point in cells[1].points}
    combine = _difference if measure.kind == "difference" else _ratio
    return Spread.of(combine(read(point), second.get(point.seed)) for point in cells[0].points)


def _difference(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


def _ratio(first: float | None, second: float | None) -> float | None:
    return None if first is None or not second else first / second
