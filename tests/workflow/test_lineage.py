"""Where a result of the finished experiment came from."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from implicit_llm_contracts.runs.manifest import ManifestError
from implicit_llm_workflow.planning.staleness import Acceptance
from implicit_llm_workflow.results.accept import save_acceptance
from implicit_llm_workflow.results.lineage import Lineage, NoLineage, as_json, trace, tree_of
from implicit_llm_workflow.results.verify import Broken, check_files
from tests.unit.workflow.console_calls import output, refusal
from tests.unit.workflow.experiments import TEST_SETS
from tests.workflow.tiny_project import Project

EXPLICIT, FREE = "train/explicit-s0/explicit", "train/implicit-s0/free"
EVALUATION = "evaluate/implicit-s0/free/word-problem"
BEHIND = {EVALUATION, FREE, "train/implicit-s0/unrolled", "data/s3-train", *TEST_SETS}


def text_of(lineage: Lineage) -> str:
    console = Console(width=400, highlight=False)
    with console.capture() as captured:
        console.print(tree_of(lineage))
    return captured.get()


def verify(lineage: Lineage) -> tuple[int, list[Broken]]:
    """Number of files, and what is broken."""
    files, damaged = lineage.files()
    return len(files), [*damaged, *check_files(files)]


def work_of(project: Project, job: str) -> Path:
    return next((project.results / job).glob("work/[0-9a-f]*"))


@pytest.mark.parametrize(
    "place", [".", "manifest.json", "work/[0-9a-f]*", "work/*/manifest.json", "work/*/metrics.json"]
)
def test_a_result_is_traced_back_to_the_data(built: Project, place: str) -> None:
    found = trace(next((built.results / EVALUATION).glob(place)) if place != "." else built.results / EVALUATION)
    assert ({item.key for item in found.runs.values()}, list(found.missing())) == (BEHIND, [])
    text = text_of(found)
    for item in found.runs.values():
        assert f"{item.key}  {item.fingerprint[:16]}" in text
    assert text.index(EVALUATION) < text.index(FREE) < text.index("train/implicit-s0/unrolled")
    assert ("metrics.json (sha256" in text.splitlines()[0]) == place.endswith("metrics.json")
    copy = next((built.results / "report" / "figures").iterdir())  # of a file below work/
    assert trace(copy).artifact == f"work/{trace(copy).top.fingerprint[:16]}/declared/figures/{copy.name}"


def test_a_result_of_former_settings_keeps_its_own_lineage(project: Project) -> None:
    work = work_of(project, FREE)
    before = set(trace(work / "model.json").runs)
    other = {**project.manifest(FREE), "fingerprint": "0" * 64}
    (project.results / FREE / "manifest.json").write_text(json.dumps(other))
    assert set(trace(work / "model.json").runs) == before
    assert verify(trace(work / "model.json"))[1] == []
    assert trace(project.results / EVALUATION).runs.keys() >= before


def test_verifying_reads_every_file_behind_a_result(project: Project) -> None:
    found = trace(project.results / EVALUATION)
    assert verify(found) == (sum(len(item.manifest.files) for item in found.runs.values()), [])
    path = work_of(project, FREE) / "model.json"
    path.write_bytes(path.read_bytes()[::-1])
    assert [(item.job, item.path) for item in verify(found)[1]] == [(FREE, path)]


def test_an_input_that_is_gone_is_told_and_is_broken(project: Project) -> None:
    work_of(project, FREE).rename(project.dir / "elsewhere")
    found = trace(project.results / EVALUATION)
    assert "model: not found" in text_of(found)
    assert [entry["role"] for entry in as_json(found)["not_found"]] == ["model"]
    assert "found none" in verify(found)[1][0].why


def test_an_accepted_exception_is_part_of_the_lineage(project: Project) -> None:
    fingerprint = project.manifest(FREE)["fingerprint"]
    acceptance = Acceptance(fingerprint, "1" * 64, "2" * 64, "3" * 64, ("solver (solve)",), "2026-11-21", "no matter")
    save_acceptance(project.results / FREE, acceptance)
    found = trace(project.results / EVALUATION)
    said = "accepted 2026-11-21 with other code (222222222222 -> 333333333333; solver (solve)): no matter"
    assert said in text_of(found)
    accepted = [(job["job"], item["why"]) for job in as_json(found)["runs"] for item in job["accepted"]]
    assert accepted == [(FREE, "no matter")]


def test_what_no_job_recorded_has_no_lineage(project: Project) -> None:
    with pytest.raises(NoLineage, match="did not record this file"):
        trace(project.results / FREE / "job.log")
    with pytest.raises(NoLineage, match="is in no run directory"):
        trace(project.config)
    (project.results / FREE / "manifest.json").write_text("{}")
    with pytest.raises(ManifestError, match="expected a manifest of format"):
        trace(project.results / FREE)


def test_the_command_takes_a_job_or_a_path(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--config", str(project.config), "--results", str(project.results.parent))
    found = json.loads(output(capsys, "lineage", EVALUATION, *where, "--json", "--verify"))
    assert {item["job"] for item in found["runs"]} == BEHIND
    path = work_of(project, EVALUATION) / "metrics.json"
    path.write_text("")
    assert f"broken {path}" in output(capsys, "lineage", str(path), "--verify", code=1)
    assert "did you mean" in refusal(capsys, "lineage", "train/implicit-s0/fre", *where)
