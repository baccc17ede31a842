"""Judging claims about quantities: see quantities.py for what these are.

It is judged on the mean over seeds. A claim of which the best model speaks holds when that one meets it; one about all
models must be met by each of them, and the one that meets it least is shown.
"""

from __future__ import annotations

from implicit_llm.report.claims import FAILS, HOLDS, MISSING, NOT_RUN, Claim, Condition, Judgement
from implicit_llm.report.evidence import Evidence
from implicit_llm.report.quantities import Found, find
from implicit_llm.report.results import Spread, seeds_words
from implicit_llm.report.section import SectionInputs


def judge_quantity(claim: Claim, given: SectionInputs, scale: str) -> Judgement:
    """The verdict on a claim with `quantity`."""
    quantity, condition = claim.quantity, claim.holds_if
    if scale not in claim.scales or quantity is None or condition is None:
        return Judgement(claim, NOT_RUN, Spread(()))
    found = find(quantity, given)
    if not found:
        return Judgement(claim, NOT_RUN, Spread(()))
    known = [item for item in found if item.spread.mean is not None]
    lacking = [item for item in found if item.spread.mean is None or item.spread.num_missing]
    if not known:
        return Judgement(claim, MISSING, lacking[0].spread, _evidence(lacking[0]))
    choose = max if quantity.speaks == "best" else min
    deciding = choose(known, key=lambda item: _margin(item, condition))
    is_met = condition.is_met(deciding.spread.mean or 0.0)
    # What lacks a number cannot help a claim about all models; one that another model refutes is refuted all the same.
    if is_met and lacking and (quantity.speaks == "all" or deciding in lacking):
        return Judgement(claim, MISSING, deciding.spread, _evidence(lacking[0]))
    return Judgement(claim, HOLDS if is_met else FAILS, deciding.spread, _evidence(deciding))


def _margin(found: Found, condition: Condition) -> float:
    """By how much the condition is met; negative where it is not."""
    mean = found.spread.mean or 0.0
    return mean - condition.at_least if condition.at_least is not None else (condition.at_most or 0.0) - mean


def _evidence(found: Found) -> Evidence:
    return Evidence(
        text=f"{found.name}, {seeds_words(found.spread)}",
        run=found.run,
        data=found.data,
        modes=found.modes,
        num_seeds=len(found.spread.values),
        roles=tuple(dict.fromkeys(found.roles)),
    )
