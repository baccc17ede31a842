"""Wanted against recorded results, without Snakemake."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from implicit_llm_workflow.planning.plan import Plan, UnknownTarget
from tests.unit.workflow.experiments import (
    ALL,
    EVALUATIONS,
    EXPLICIT,
    FREE,
    TEST_SETS,
    UNROLLED,
    ExperimentFile,
    keys,
)


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        ("tol: 0.1", "tol: 0.2", {*FREE, "report"}),
        ("batch_size: 8", "batch_size: 4", {*UNROLLED, *FREE, *EXPLICIT, "report"}),
        ("hidden_size: 16", "hidden_size: 32", {*UNROLLED, *FREE, "report"}),
        ("eval_block_len: 4", "eval_block_len: 8", {*EVALUATIONS, "report"}),
        ("num_samples: 32", "num_samples: 16", {*TEST_SETS, *EVALUATIONS, "report"}),
        ("num_samples: 64", "num_samples: 48", {"data/s3-train", *UNROLLED, *FREE, *EXPLICIT, "report"}),
        ("group: S3", "group: S3\n    seed: 1", ALL),
        ("name: tiny", "name: tiny\ndescription: new", set()),
        ("seeds: [0, 1]", "seeds: [1, 0]", set()),
        ("tol: 0.1", "tol: 1e-1", set()),
        ("{steps: 4}", "{steps: 0.4}", set()),
    ],
)
def test_a_changed_field_makes_stale_what_depends_on_it(
    finished: ExperimentFile, old: str, new: str, stale: set[str]
) -> None:
    assert keys(finished.edit(old, new).plan(), "stale") == stale
    assert keys(finished.edit(new, old).plan(), "fresh") == ALL


def test_a_renamed_run_keeps_the_results_whose_folders_were_moved(finished: ExperimentFile) -> None:
    root = finished.plan().root
    for stage in ("train", "evaluate"):
        (root / stage / "explicit-s0").rename(root / stage / "baseline-s0")
    plan = finished.edit("  explicit:\n    data", "  baseline:\n    data").plan()
    assert (keys(plan, "missing"), keys(plan, "stale")) == (set(), {"report"})


@pytest.mark.parametrize(
    ("codes", "stale"),
    [
        ({"data": "new"}, ALL),
        ({"train": "new"}, {*UNROLLED, *FREE, *EXPLICIT, "report"}),
        ({"evaluate": "new"}, {*EVALUATIONS, "report"}),
        ({"report": "new"}, {"report"}),
    ],
)
def test_changed_code_makes_its_stage_and_what_follows_stale(
    finished: ExperimentFile, codes: Mapping[str, str], stale: set[str]
) -> None:
    plan = finished.plan(dict(codes))
    assert keys(plan, "stale") == stale
    (stage,) = codes
    assert any(f"the code of stage {stage} changed" in plan.statuses[key].why for key in stale)


@pytest.mark.parametrize(
    ("change", "key", "why"),
    [
        (("tol: 0.1", "tol: 0.2"), "train/implicit-s0/free", "config: phase.solver.tol 0.1 -> 0.2"),
        (("tol: 0.1", "tol: 0.2"), "evaluate/implicit-s0/free/word-problem", "input changed: train/implicit-s0/free"),
        (("tol: 0.1}", "tol: 0.1, block_len: 4}"), "train/implicit-s0/free", "config: phase.solver.block_len - -> 4"),
        (
            ("lengths: [8, 16]", "lengths: [8]"),
            EXPLICIT_EVALUATION := "evaluate/explicit-s0/explicit/word-problem",
            "no longer used: s3-test-L16-h0.5",
        ),
        (("lengths: [8, 16]", "lengths: [8, 16, 32]"), EXPLICIT_EVALUATION, "new input: data/s3-test-L32-h0.5"),
        (("[0.5, 1]", "[0.5, 0.75]"), "data/s3-train", "config: hard_fraction.1 1.0 -> 0.75"),
    ],
)
def test_the_reason_names_what_changed(finished: ExperimentFile, change: tuple[str, str], key: str, why: str) -> None:
    assert why in finished.edit(*change).plan().statuses[key].why


def test_the_reason_of_a_report_leaves_out_settings_that_change_with_its_inputs(finished: ExperimentFile) -> None:
    why = finished.edit("tol: 0.1", "tol: 0.2").plan().statuses["report"].why
    assert why.startswith("input changed: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"identity": 1}', "null"])
def test_a_damaged_manifest_is_stale(finished: ExperimentFile, text: str) -> None:
    path = finished.plan().run_dir(finished.plan().nodes["report"]) / "manifest.json"
    path.write_text(text)
    assert keys(finished.plan(), "stale") == {"report"}
    assert str(path) in finished.plan().statuses["report"].why


def test_a_missing_result_makes_nothing_else_stale_and_becomes_a_target(finished: ExperimentFile) -> None:
    report, missing = (finished.plan().manifest(finished.plan().nodes[key]) for key in ("report", "data/s3-train"))
    assert finished.plan().target_manifests == [report]
    Path(missing).unlink()
    assert keys(finished.plan(), "missing") == {"data/s3-train"}
    assert not keys(finished.plan(), "stale")
    assert finished.plan().target_manifests == [missing, report]


@pytest.mark.parametrize(
    "target", ["data/s3-train", "{root}/data/s3-train", "{root}/data/s3-train/", "{root}/data/s3-train/manifest.json"]
)
def test_a_job_is_found_by_key_folder_and_manifest(plan: Plan, target: str) -> None:
    assert plan.find(target.format(root=plan.root.as_posix())).key == "data/s3-train"
    with pytest.raises(UnknownTarget, match=r"no such job; `implicit-llm status --jobs --config \S+` lists them$"):
        plan.find("q")


def test_jobs_of_equal_identity_and_different_name_have_identity_files_of_their_own(tiny: ExperimentFile) -> None:
    copied = "  twin:\n    data: s3\n    model: mamba2-explicit\n    task: word-problem\n    curriculum: explicit\n"
    plan = tiny.edit("evaluations:", f"{copied}evaluations:").plan()
    plan.write_job_files()
    for name in ("explicit-s0/explicit", "twin-s0/explicit"):
        identity = json.loads(plan.identity_file(plan.nodes[f"train/{name}"]).read_text())
        assert identity["name"] == name


def test_identity_files_are_written_once(plan: Plan) -> None:
    plan.write_job_files()
    path = plan.identity_file(plan.nodes["report"])
    whole = path.read_text()
    for found, then in (("untouched", "untouched"), ("", whole)):  # empty as a power loss leaves it
        path.write_text(found)
        plan.write_job_files()
        assert path.read_text() == then
    assert len(list(plan.root.rglob("*.json"))) == len(plan.nodes)


def test_what_is_made_from_a_result_is_found_with_it_and_nothing_else(plan: Plan) -> None:
    for first in plan.nodes.values():
        found = {node.key for node in plan.made_from([plan.manifest(first)])}
        assert found == {first.key} | {key for key, node in plan.nodes.items() if found & {*node.upstream.values()}}
        assert "report" in found
