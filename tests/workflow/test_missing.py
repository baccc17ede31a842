"""Evaluations that fail, peers, and the report of what is left, through Snakemake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.workflow.tiny_project import Project

FAILING = "implicit-s0/free/word-problem"
PEER = """
peers:
  other:
    data: s3
    checkpoint: {path: models/other}
"""


def manifest(project: Project, key: str) -> Path:
    return project.results / key / "manifest.json"


def test_a_failing_evaluation_leaves_the_others_and_a_report_with_missing_results(project: Project) -> None:
    failing = replace(project, variables={"TINY_FAIL": FAILING})
    failing.edit(failing.config, "eval_block_len: 4", "eval_block_len: 2")
    failing.snakemake("--keep-going", code=1)
    fresh = json.loads(manifest(failing, "evaluate/explicit-s0/explicit/word-problem").read_text())
    assert fresh["identity"]["config"]["modes"][0]["eval_block_len"] == 2

    said = failing.command("implicit-llm", "report", "--config", "tiny.yaml", code=2)
    assert f"evaluate/{FAILING}" in said
    assert "RuntimeError: made to fail" in said
    assert "results/tiny/report/manifest.json" in said
    assert "explicit-s0" not in said

    failing.command("implicit-llm", "report", "--config", "tiny.yaml", "--missing")
    excerpt = (
        'title: "Figure 3", figures: [accuracy-by-length], from: [{runs: [implicit], evaluations: [word-problem]}]'
    )
    failing.config.write_text(f"{failing.config.read_text()}\nexcerpts:\n  figure_3: {{{excerpt}}}\n")
    failing.command("implicit-llm", "report", "--config", "tiny.yaml", "--only", "figure_3", "--missing")
    shown = json.loads(manifest(failing, "excerpt/figure_3-with-missing").read_text())["summary"]["missing"]
    assert [item["job"] for item in shown] == [f"evaluate/{FAILING}"]
    made = json.loads(manifest(failing, "report-with-missing").read_text())
    ((lacking,), num_inputs) = made["summary"]["missing"], made["summary"]["num_inputs"]
    assert (lacking["job"], lacking["state"]) == (f"evaluate/{FAILING}", "failed")
    assert lacking["config"]["kind"] == "word_problem"
    assert lacking["data"]["s3-test-L16-h0.5"]["length"] == 16
    assert num_inputs == 4  # three phases and the evaluation that went well

    project.snakemake()
    assert "the report is there" in project.command("implicit-llm", "report", "--config", "tiny.yaml")


def test_a_peer_is_imported_and_evaluated_and_other_content_is_another_peer(project: Project) -> None:
    folder = project.dir / "models" / "other"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"one")
    project.config.write_text(project.config.read_text() + PEER)
    mine = {"checkpoint/other", "evaluate/other/checkpoint/word-problem", "report"}
    assert project.planned() == mine
    project.snakemake()
    imported = json.loads(manifest(project, "checkpoint/other").read_text())
    assert imported["identity"]["config"]["path"] == "models/other"
    assert set(imported["identity"]["config"]["sha256"]) == {"config.json", "model.safetensors"}
    (folder / "model.safetensors").write_bytes(b"two")
    assert project.planned() == mine
