"""`implicit-llm estimate`: what it prints, of the shipped experiments too, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.workflow.console_calls import run, where
from tests.unit.workflow.experiments import ExperimentFile


def test_the_command_prints_a_table_and_the_same_as_json(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile
) -> None:
    code, out, err = run(capsys, "estimate", *where(tiny))
    assert code == 0, err
    assert "≤36.0" in out
    assert "GPU-hours" in out
    code, out, _ = run(capsys, "estimate", *where(tiny), "--json", "--hardware", "h200")
    values = json.loads(out)
    plan = tiny.plan()
    assert [job["key"] for job in values["training"]] == [k for k, node in plan.nodes.items() if node.stage == "train"]
    assert {job["card"] for job in values["training"]} == {"h200"}
    assert values["totals"]["flops"] == pytest.approx(sum(job["work"]["flops"] for job in values["training"]))


@pytest.mark.parametrize("config", ["paper", "pretrain-130m", "h200", "miniature", "demo"])
def test_every_job_of_the_shipped_experiments_is_counted_and_fits_its_card(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: str
) -> None:
    code, out, err = run(capsys, "estimate", "--config", config, "--results", str(tmp_path), "--json")
    assert code == 0, err
    values = json.loads(out)
    assert values["training"]
    for job in values["training"]:
        assert job["work"]["flops"] > 0
        assert job["step"] is not None
        assert job["cost"]["hours"] is not None or config != "paper"
