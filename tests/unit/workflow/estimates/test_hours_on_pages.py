"""The hours that docs/paper.md gives for each figure and table are those that the estimate gives now."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from implicit_llm_workflow.commands.options import make_plan
from implicit_llm_workflow.planning.plan import Plan
from tests.pages import ROOT
from tests.unit.workflow.console_calls import output

PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \|.*\| ([^|]*\d[^|]*) \|$", re.MULTILINE)  # those that name hours
HOURS = re.compile(r"([\d,]+) (V100|MI300X)")


def hours_in(text: str) -> dict[str, int]:
    return {card.lower(): int(number.replace(",", "")) for number, card in HOURS.findall(text)}


def training_behind(plan: Plan, key: str) -> set[str]:
    return {key}.union(*(training_behind(plan, upstream) for upstream in plan.nodes[key].upstream.values()))


def test_hours_of_training_are_those_of_the_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = json.loads(output(capsys, "estimate", "--config", "paper", "--results", str(tmp_path), "--json"))
    jobs = {job["key"]: job for job in values["training"]}
    plan = make_plan("paper", tmp_path)

    def hours_of(keys: set[str]) -> dict[str, float]:
        hours: Counter[str] = Counter()
        for key in keys & jobs.keys():
            hours[jobs[key]["card"]] += jobs[key]["cost"]["hours"]
        return hours

    named = {name: hours_in(hours) for name, hours in ROW.findall(PAGE) if hours_in(hours)}
    assert len(named) > 10
    for name, hours in named.items():
        assert hours == pytest.approx(hours_of(training_behind(plan, f"excerpt/{name}")), rel=0.02), name
    (whole,) = re.findall(r"everything together takes ([^;]*?) of training", PAGE)
    assert hours_in(whole.replace("-hours", "")) == pytest.approx(hours_of(set(jobs)), rel=0.02)
