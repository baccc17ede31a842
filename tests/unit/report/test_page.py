"""Parts of the page."""

from __future__ import annotations

from pathlib import Path

from implicit_llm_report.inputs.sources import load_inputs
from implicit_llm_report.page.page import hyperparameters
from tests.unit.report.sample_runs import SampleRun, config_of, make_context, make_runs


def test_settings_that_differ_between_runs_are_columns_and_the_others_are_said_once(tmp_path: Path) -> None:
    models = (
        SampleRun("a5-implicit", "A5", True, 0.2, (0.2,), steps=40, seeds=(0, 1), lengths=(16,)),
        SampleRun("a5-explicit", "A5", False, 0.2, (0.2,), steps=40, lengths=(16,)),
    )
    context = make_context(tmp_path / "report", make_runs(tmp_path / "results", models))
    settings = hyperparameters(load_inputs(context.inputs, config_of(context)))
    assert [(row["run"], row["seeds"]) for row in settings["rows"]] == [
        ("a5-explicit", [0]),
        ("a5-implicit", [0, 1]),
        ("a5-implicit", [0, 1]),
    ]
    assert "phase.solver.mode" in settings["differing"]
    assert not settings["shared"].keys() & set(settings["differing"])
    assert all(row["settings"][key] == value for row in settings["rows"] for key, value in settings["shared"].items())
