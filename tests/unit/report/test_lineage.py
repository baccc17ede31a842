"""The list of the jobs from data to report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from implicit_llm_report.config import MissingResult
from implicit_llm_report.inputs.sources import load_inputs
from implicit_llm_report.page.lineage import DataJobs, lineage
from tests.unit.report.sample_runs import SampleRun, config_of, finish, make_context, make_runs

RUN = SampleRun("a5-implicit", "A5", True, 0.2, (0.2,), steps=20, seeds=(0, 1), lengths=(16,))


def test_jobs_stand_by_data_run_and_seed_phases_before_evaluations_and_missing_ones_too(tmp_path: Path) -> None:
    roles = make_runs(tmp_path / "results", (RUN,))
    lost = "evaluate:a5-implicit-s1/free/jacobian"
    hole = asdict(MissingResult("evaluate/a5-implicit-s1/free/jacobian", lost, "failed", "", ""))
    context = make_context(tmp_path / "report", roles, {"experiment": "demo", "missing": [hole]})
    (found,) = lineage(load_inputs(context.inputs, config_of(context)), config_of(context))
    zero, one = (
        [f"train:a5-implicit-s{seed}/{phase}" for phase in ("unrolled", "free")]
        + [f"evaluate:a5-implicit-s{seed}/free/word-problem"]
        for seed in (0, 1)
    )
    assert found.jobs == {"a5-implicit": {0: zero, 1: [*one[:2], lost, one[2]]}}


def test_data_sets_have_their_name_and_their_parts_with_fingerprints(tmp_path: Path) -> None:
    folder = tmp_path / "results/demo"
    made = finish(folder / "data/a5-train", "data", "a5-train", {"kind": "word_problem"}, {}, {})
    config = {"task": "word_problem", "phase": {"name": "free", "start_step": 0, "end_step": 1, "solver": None}}
    trained = folder / "train/a5-s0/free"
    finish(trained, "train", "a5-s0/free", config, {"data": made}, {})
    parts = {"experiment": "demo", "data": {"a5-train": {"data": "a5", "split": "train"}}}
    context = make_context(tmp_path / "report", {"train:a5-s0/free": trained}, parts)
    inputs = load_inputs(context.inputs, config_of(context))
    jobs = {"a5": {0: ["train:a5-s0/free"]}}
    assert lineage(inputs, config_of(context)) == [DataJobs("a5", {"a5-train": made}, jobs)]
