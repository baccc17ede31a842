"""Where a result of the finished experiment came from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from implicit_llm_workflow.planning.accepted import Acceptance
from implicit_llm_workflow.results.accept import save_acceptance
from implicit_llm_workflow.results.lineage import Lineage, NoLineage, trace
from implicit_llm_workflow.results.lineage_tree import as_json, tree_of
from implicit_llm_workflow.results.lineage_verify import verify_lineage
from implicit_llm_workflow.results.ro_crate import METADATA, PROFILES, CrateError, write_crate
from tests.unit.workflow.console_calls import run
from tests.workflow.tiny_project import Project

EXPLICIT, FREE = "train/explicit-s0/explicit", "train/implicit-s0/free"
EVALUATION = "evaluate/implicit-s0/free/word-problem"
BEHIND = {
    EVALUATION,
    FREE,
    "train/implicit-s0/unrolled",
    "data/s3-train",
    "data/s3-test-L8-h0.5",
    "data/s3-test-L16-h0.5",
}


def keys(lineage: Lineage) -> set[str]:
    return {item.key for item in lineage.runs.values()}


def text_of(lineage: Lineage) -> str:
    console = Console(width=400, highlight=False)
    with console.capture() as captured:
        console.print(tree_of(lineage))
    return captured.get()


def work_of(project: Project, job: str) -> Path:
    return next(path.parent for path in (project.results / job).glob("work/*/manifest.json"))


@pytest.mark.parametrize(
    "place", [".", "manifest.json", "work/[0-9a-f]*", "work/*/manifest.json", "work/*/metrics.json"]
)
def test_a_result_is_traced_back_to_the_data(built: Project, place: str) -> None:
    found = trace(next((built.results / EVALUATION).glob(place)) if place != "." else built.results / EVALUATION)
    assert keys(found) == BEHIND
    assert not list(found.missing())
    text = text_of(found)
    for item in found.runs.values():
        assert f"{item.key}  {item.fingerprint[:16]}" in text
    assert text.index(EVALUATION) < text.index(FREE) < text.index("train/implicit-s0/unrolled")
    assert ("metrics.json (sha256" in text.splitlines()[0]) == place.endswith("metrics.json")


def test_a_declared_copy_is_traced_like_the_file_it_is_a_copy_of(built: Project) -> None:
    work = work_of(built, "report") / "declared"
    original = next(path for path in work.rglob("*") if path.is_file())
    copy = built.results / "report" / original.relative_to(work)
    assert trace(copy).artifact == trace(original).artifact
    assert len(keys(trace(copy))) == 9


def test_a_result_of_former_settings_keeps_its_own_lineage(project: Project) -> None:
    work = work_of(project, FREE)
    before = set(trace(work / "model.json").runs)
    values = json.loads((work / "manifest.json").read_text())
    (project.results / FREE / "manifest.json").write_text(json.dumps({**values, "fingerprint": "0" * 64}))
    assert set(trace(work / "model.json").runs) == before
    assert verify_lineage(trace(work / "model.json"))[1] == []
    assert trace(project.results / EVALUATION).runs.keys() >= before


def test_verifying_reads_every_file_behind_a_result(project: Project) -> None:
    found = trace(project.results / EVALUATION)
    number, broken = verify_lineage(found)
    assert (broken, number) == ([], sum(len(item.files) for item in found.runs.values()))
    path = work_of(project, FREE) / "model.json"
    path.write_bytes(path.read_bytes()[::-1])
    assert [(item.job, item.path) for item in verify_lineage(found)[1]] == [(FREE, path)]


def test_an_input_that_is_gone_is_told_and_is_broken(project: Project) -> None:
    work = work_of(project, FREE)
    work.rename(project.dir / "elsewhere")
    found = trace(project.results / EVALUATION)
    assert "model: not found" in text_of(found)
    assert [entry["role"] for entry in as_json(found)["not_found"]] == ["model"]
    assert "found none" in verify_lineage(found)[1][0].why


def test_an_accepted_exception_is_part_of_the_lineage(project: Project) -> None:
    fingerprint = json.loads((project.results / FREE / "manifest.json").read_text())["fingerprint"]
    acceptance = Acceptance(fingerprint, "1" * 64, "2" * 64, "3" * 64, ("solver (solve)",), "2026-11-21", "no matter")
    save_acceptance(project.results / FREE, acceptance)
    found = trace(project.results / EVALUATION)
    assert "accepted 2026-11-21 with other code (222222222222 -> 333333333333; solver (solve)): no matter" in text_of(
        found
    )
    accepted = {job["job"]: job["accepted"] for job in as_json(found)["runs"] if job["accepted"]}
    assert {job: [item["why"] for item in items] for job, items in accepted.items()} == {FREE: ["no matter"]}


def test_what_nobody_vouches_for_has_no_lineage(project: Project) -> None:
    with pytest.raises(NoLineage, match="does not vouch for this file"):
        trace(project.results / FREE / "job.log")
    with pytest.raises(NoLineage, match="is in no run directory"):
        trace(project.config)
    (project.results / FREE / "manifest.json").write_text("{}")
    with pytest.raises(NoLineage, match="expected a manifest of format"):
        trace(project.results / FREE)


def graph_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Entities by id; every reference within the crate leads to one."""
    values = json.loads((folder / METADATA).read_text())
    assert values["@context"][0] == "https://w3id.org/ro/crate/1.1/context"
    entities = {entity["@id"]: entity for entity in values["@graph"]}
    assert len(entities) == len(values["@graph"])
    for entity in entities.values():
        assert {"@id", "@type"} <= set(entity)
        for reference in references(entity):
            assert reference.startswith("https://") or reference in entities, reference
    return entities


def references(entity: dict[str, Any]) -> list[str]:
    values = [item for value in entity.values() for item in (value if isinstance(value, list) else [value])]
    return [item["@id"] for item in values if isinstance(item, dict)]


def test_the_crate_has_what_its_profiles_require(project: Project, tmp_path: Path) -> None:
    found = trace(project.results / EVALUATION)
    number = write_crate(found, tmp_path / "crate")
    entities = graph_of(tmp_path / "crate")
    assert entities[METADATA]["about"] == {"@id": "./"}
    root = entities["./"]
    assert {"name", "description", "datePublished", "license", "mainEntity"} <= set(root)
    assert {item["@id"] for item in root["conformsTo"]} == set(PROFILES)
    workflow = entities[root["mainEntity"]["@id"]]
    assert workflow["@type"] == ["File", "SoftwareSourceCode", "ComputationalWorkflow"]
    assert entities[workflow["programmingLanguage"]["@id"]]["@type"] == "ComputerLanguage"
    actions = [item for item in entities.values() if item["@type"] == "CreateAction"]
    assert {item["name"] for item in actions} >= BEHIND
    assert len(actions) == len(BEHIND) + 1
    for action in actions:
        assert {"instrument", "object", "result", "startTime", "endTime"} <= set(action)
        assert {"@id": action["@id"]} in root["mentions"]
    files = [item for item in entities.values() if "File" in item["@type"]]
    assert {item["@id"] for item in files} == {item["@id"] for item in root["hasPart"]}
    for file in files:
        content = (tmp_path / "crate" / file["@id"]).read_bytes()
        assert (file["sha256"], file["contentSize"]) == (hashlib.sha256(content).hexdigest(), str(len(content)))
    assert number == len([path for path in (tmp_path / "crate").rglob("*") if path.is_file()])
    assert any(file["name"] == "metrics.json" for file in files)
    assert not any(file["name"] == "model.json" for file in files)
    with pytest.raises(CrateError, match="is not empty"):
        write_crate(found, tmp_path / "crate")


def test_a_changed_file_is_not_put_into_a_crate(project: Project, tmp_path: Path) -> None:
    (work_of(project, EVALUATION) / "metrics.json").write_text("{ }\n")
    with pytest.raises(CrateError, match="not what its manifest says"):
        write_crate(trace(project.results / EVALUATION), tmp_path / "crate")
    assert not (tmp_path / "crate" / METADATA).exists()


def test_the_command_takes_a_job_or_a_path(
    project: Project, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ("--config", str(project.config), "--results", str(project.results.parent))
    code, out, _ = run(
        capsys, "lineage", EVALUATION, *where, "--json", "--verify", "--ro-crate", str(tmp_path / "crate")
    )
    assert (code, {item["job"] for item in json.loads(out)["runs"]}) == (0, BEHIND)
    path = work_of(project, EVALUATION) / "metrics.json"
    path.write_text("")
    code, out, _ = run(capsys, "lineage", str(path), "--verify")
    assert (code, f"broken {path}" in out) == (1, True)
    code, _, err = run(capsys, "lineage", "train/implicit-s0/fre", *where)
    assert (code, "did you mean" in err) == (2, True)
