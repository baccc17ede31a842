"""The picture of the lineage."""

from __future__ import annotations

import re
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from implicit_llm_report.config import MissingResult
from implicit_llm_report.inputs import load_inputs
from implicit_llm_report.lineage import WIDTH_PX, lineage_jobs, lineage_svg
from tests.unit.report.sample_runs import SampleRun, config_of, finish, make_context, make_runs

SVG = "{http://www.w3.org/2000/svg}"


def runs(number: int, seeds: int) -> tuple[SampleRun, ...]:
    return tuple(
        SampleRun(f"run{index}-implicit", "A5", True, 0.2, (0.2,), steps=20, seeds=range(seeds), lengths=(16,))
        for index in range(number)
    )


def picture(
    folder: Path, number: int, seeds: int, *, is_page: bool = False, missing: tuple[MissingResult, ...] = ()
) -> str:
    roles = make_runs(folder / "results", runs(number, seeds))
    context = make_context(
        folder / "report", roles, {"experiment": "demo", "missing": [asdict(item) for item in missing]}
    )
    inputs = load_inputs(context.inputs, config_of(context))
    return lineage_svg(lineage_jobs(inputs, config_of(context)), "0" * 8, is_page=is_page)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_each_of_a_few_jobs_has_a_line_with_fingerprint_and_mlflow_run(tmp_path: Path) -> None:
    svg = picture(tmp_path, 2, 2)
    lines = texts(svg)
    assert {"unrolled, seed 0", "free, seed 1", "word-problem (free), seed 1", "report", "data sets"} <= set(lines)
    assert lines.index("unrolled, seed 0") < lines.index("free, seed 0")
    ids = [line for line in lines if re.fullmatch(r"[0-9a-f]{8} · [0-9a-f]{8}", line)]
    assert len(ids) == len(set(ids)) == 2 * 2 * 3
    assert "MLflow run" in svg


def test_many_jobs_have_a_line_for_all_seeds_and_stay_readable(tmp_path: Path) -> None:
    svg = picture(tmp_path, 34, 5)
    assert "511 jobs" in svg
    root = ElementTree.fromstring(svg)
    height = float(root.get("height") or 0)
    assert 400 < height < 3000
    assert len([line for line in texts(svg) if line.endswith("+4")]) == 34 * 3
    for rect in root.iter(f"{SVG}rect"):
        assert rect.get("width") == "100%" or float(rect.get("x") or 0) + float(rect.get("width") or 0) <= WIDTH_PX
    tops = [
        (float(r.get("y") or 0), float(r.get("height") or 0)) for r in root.iter(f"{SVG}rect") if r.get("x") == "262"
    ]
    boxes = sorted(set(tops))
    assert all(first[0] + first[1] <= second[0] for first, second in pairwise(boxes))


def test_data_sets_beside_the_inputs_are_named_and_others_keep_their_fingerprint(tmp_path: Path) -> None:
    assert "data dddddddd" in texts(picture(tmp_path / "a", 1, 1))
    folder = tmp_path / "b" / "results"
    made = finish(folder / "data" / "a5-train", "data", "a5-train", {"kind": "word_problem"}, {}, {})
    config = {"task": "word_problem", "phase": {"name": "free", "start_step": 0, "end_step": 1, "solver": None}}
    trained = folder / "train" / "a5-s0" / "free"
    finish(trained, "train", "a5-s0/free", config, {"data": made}, {})
    parts = {"experiment": "demo", "data": {"a5-train": {"data": "a5", "split": "train"}}}
    context = make_context(tmp_path / "report", {"train:a5-s0/free": trained}, parts)
    inputs = load_inputs(context.inputs, config_of(context))
    lines = texts(lineage_svg(lineage_jobs(inputs, config_of(context)), "", is_page=False))
    assert {"a5", "train", f"{made[:8]} · {made[::2][:8]}"} <= set(lines)


def test_missing_jobs_are_shown_as_missing(tmp_path: Path) -> None:
    item = MissingResult(
        "evaluate/run0-implicit-s1/free/word-problem", "evaluate:run0-implicit-s1/free/word-problem", "failed", "", ""
    )
    lines = texts(picture(tmp_path, 1, 1, missing=(item,)))
    assert lines[lines.index("word-problem (free), seed 1") + 1] == "failed"


@pytest.mark.parametrize("is_page", [True, False])
def test_on_the_page_lines_lead_to_runs_in_its_colours_and_the_file_leads_nowhere(
    tmp_path: Path, is_page: bool
) -> None:
    svg = picture(tmp_path, 1, 1, is_page=is_page)
    assert ('href="#run-' in svg) == is_page
    assert ("var(--ink)" in svg) == is_page
    assert bool(re.search(r"#[0-9a-f]{6}\"", svg)) != is_page
