"""No number, verdict or order comes out of a name: what an input is stands in fields of the configuration."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_report import stage
from implicit_llm_report.config import ReportError
from tests.unit.report.sample_language_runs import family, make_language_runs
from tests.unit.report.sample_runs import SampleRun, make_context, make_runs

WORDS = (
    SampleRun("a5-implicit", "A5", True, 0.2, (0.2,), steps=100, lengths=(16, 64)),
    SampleRun("a5-explicit", "A5", False, 0.2, (0.2,), steps=100, lengths=(16, 64)),
)
TEXT = family("mamba2", "implicit_mamba2", seeds=(0,))[:2]
RENAMED = {
    "a5-explicit": "u-implicit (24+4)", "a5-implicit": "v-explicit-s1", "text-mamba2-explicit": "w-s2",
    "text-mamba2-implicit": "x-s7-y", "free-80": "(99+9)",
}  # fmt: skip


def made(folder: Path, roles: dict[str, Path], config: dict[str, Any]) -> Path:
    context = make_context(folder, roles, config)
    stage.run(context)
    return context.work / "declared"


def table(declared: Path, name: str) -> list[list[str]]:
    return list(csv.reader((declared / f"tables/{name}.csv").open()))


def named(cell: str | None, back: dict[str, str]) -> str | None:
    """A cell with the old names of the run and the phase in it."""
    for name in sorted(back, key=len, reverse=True):
        cell = cell and cell.replace(name, back[name])
    return cell


def claims(declared: Path) -> list[tuple]:
    entries = json.loads((declared / "claims.json").read_text())["claims"]
    return [(entry["id"], entry["verdict"], entry["measured"], entry["num_seeds"], entry["run"]) for entry in entries]


def test_hostile_names_of_runs_and_phases_change_no_number_no_verdict_and_no_order(tmp_path: Path) -> None:
    roles = make_runs(tmp_path / "words", WORDS) | make_language_runs(tmp_path / "text", TEXT)
    plain = make_context(tmp_path / "plain", roles, {"experiment": "miniature"})
    stage.run(plain)
    jobs = {
        role: job | {"run": RENAMED[job["run"]], "seed": 3, "phase": RENAMED.get(job["phase"], job["phase"])}
        for role, job in plain.config["jobs"].items()
    }
    hostile = made(tmp_path / "hostile", roles, {"experiment": "miniature", "jobs": jobs})
    back = {name: old for old, name in RENAMED.items()}
    expected = claims(plain.work / "declared")
    assert [(*entry, named(run, back)) for *entry, run in claims(hostile)] == expected
    assert sum(verdict == "holds" for _, verdict, *_ in expected) > 5
    for name in ("accuracy", "perplexity", "published"):
        wanted, found = (table(folder, name) for folder in (plain.work / "declared", hostile))
        assert [[named(cell, back) for cell in row] for row in found] == wanted


def test_an_input_of_which_nothing_is_said_is_refused(tmp_path: Path) -> None:
    roles = make_runs(tmp_path / "words", WORDS[1:])
    with pytest.raises(ReportError, match=r"evaluate:a5-explicit-s0/explicit/word-problem.*plan the workflow again"):
        made(tmp_path / "report", roles, {"experiment": "demo", "jobs": {}})
