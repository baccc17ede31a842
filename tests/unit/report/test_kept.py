"""Results kept in the repository, and the report made of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from implicit_llm_contracts.runs.journal import Point
from implicit_llm_report import stage
from implicit_llm_report.kept import MOST_POINTS, keep, make_again, thinned
from tests.unit.report.sample_runs import SampleRun, finish, make_context, make_runs

RUNS = (
    SampleRun("a5-implicit", "A5", True, 0.2, (0.2,), steps=60, seeds=(0, 1), lengths=(16, 64)),
    SampleRun("a5-explicit", "A5", False, 0.2, (0.2,), steps=60, lengths=(16, 64)),
)


def test_the_report_of_kept_results_has_the_numbers_of_the_report_that_was_kept(tmp_path: Path) -> None:
    results = tmp_path / "results" / "demo"
    roles = make_runs(results, RUNS)
    context = make_context(results / "report", roles)
    stage.run(context)
    shutil.copytree(context.work / "declared", results / "report", dirs_exist_ok=True)
    finish(results / "report", "report", "report", context.config, dict.fromkeys(roles, "0" * 64), {})
    keep(results, tmp_path / "kept")
    shutil.rmtree(results)
    make_again(tmp_path / "kept", tmp_path / "page")
    for name in ("claims.json", "tables/accuracy.csv", "numbers.tex"):
        again = (tmp_path / "page" / "declared" / name).read_text()
        assert again == (tmp_path / "kept" / "report" / name).read_text(), name


def test_what_is_measured_rarely_stays_whole_in_a_thinned_journal() -> None:
    points = [Point(step, "", {"loss": 1.0} | ({"radius": 0.5} if step % 1000 == 7 else {})) for step in range(10_000)]
    kept = list(thinned(points))
    assert len([point for point in kept if "radius" in point.values]) == 10
    assert MOST_POINTS <= len(kept) <= MOST_POINTS + 11
    assert kept[-1].step == 9_999
