"""The file of numbers for a manuscript."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from implicit_llm_report.page.latex_numbers import latex_number
from tests.unit.report.sample_runs import Record, SampleRun, make_report, make_runs

RUNS = (SampleRun("a5-implicit", "A5", True, 0.2, (0.2,), steps=100, seeds=(0, 1), lengths=(16, 64)),)


def definitions(folder: Path, change=lambda record: record) -> dict[str, str]:
    made = make_report(folder, make_runs(folder / "results", RUNS, change), experiment="demo", figures=(), tables=())
    text = (made / "numbers.tex").read_text()
    assert "10^" not in re.sub(r"\\ensuremath\{.*?\}\}\}", "", text)
    return dict(re.findall(r"^\\resultdef\{([^{}]+)\}\{(.*)\}$", text, re.MULTILINE))


def test_each_number_has_a_key_of_record_mode_and_length_and_its_value(tmp_path: Path) -> None:
    found = definitions(tmp_path)
    key = "word_problem/a5-implicit/free/a5-test-L64-h0.2/sequential/64/accuracy_last10"
    metrics = next((tmp_path / "results/evaluate/a5-implicit-s0/free/word-problem/work").glob("*/metrics.json"))
    mine = [r for r in json.loads(metrics.read_text())["records"] if (r["mode"], r["length"]) == ("sequential", 64)]
    assert found[f"{key}.high"] == f"{mine[0]['accuracy_last10']:.4g}"
    assert float(found[f"{key}.low"]) < float(found[key]) < float(found[f"{key}.high"])
    assert found[f"{key}.seeds"] == "2"
    assert found["claim/implicit-solves-a5.verdict"] in ("holds", "fails")


def test_missing_numbers_are_marked_macros_and_not_zero(tmp_path: Path) -> None:
    def without(record: Record) -> Record:
        return record | {"accuracy_last10": None}

    found = definitions(tmp_path, without)
    mine = {key: value for key, value in found.items() if key.endswith("/accuracy_last10")}
    assert len(mine) == 8
    assert set(mine.values()) == {r"\resultmissing"}
    assert found["claim/implicit-solves-a5"] == r"\resultmissing"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.9984321, "0.9984"),
        (-0.3, r"\ensuremath{-0.3}"),
        (1.25e-7, r"\ensuremath{1.25\times10^{-7}}"),
        (None, r"\resultmissing"),
    ],
)
def test_numbers_as_latex(value: float | None, text: str) -> None:
    assert latex_number(value) == text
