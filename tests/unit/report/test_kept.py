"""Results kept in the repository, and the report made of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from implicit_llm_report import stage
from implicit_llm_report.kept import make_again
from tests.unit.report.sample_runs import SampleRun, finish, make_context, make_runs

RUNS = (SampleRun("a5-explicit", "A5", False, 0.2, (0.2,), steps=60, seeds=(0, 1), lengths=(16, 64)),)
KEPT = ("manifest.json", "metrics.json", "provenance.json", "journal.jsonl")


def test_the_report_of_kept_results_equals_the_report_that_was_made_first(tmp_path: Path) -> None:
    results = tmp_path / "results" / "demo"
    roles = make_runs(results, RUNS)
    context = make_context(results / "report", roles)
    stage.run(context)
    finish(results / "report", "report", "report", context.config, dict.fromkeys(roles, "0" * 64), {})
    for path in (path for path in results.rglob("*") if path.name in KEPT):
        (tmp_path / "kept" / path.relative_to(results)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "kept" / path.relative_to(results))
    first = results.rename(tmp_path / "first") / context.work.relative_to(results)
    make_again(tmp_path / "kept", tmp_path / "page")
    for path in (first / "declared").rglob("*.*"):
        assert (tmp_path / "page" / path.relative_to(first)).read_bytes() == path.read_bytes(), path.name
