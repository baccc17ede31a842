"""Results side by side: what differs, and the numbers."""

import json
import re
import shutil
from typing import Any

import pytest

from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS
from implicit_llm_workflow.estimates import Cost
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.compare import (
    ComparedColumn,
    differences,
    find_columns,
    find_model,
    number_rows,
)
from implicit_llm_workflow.text import number_text, share_text, spread_text, time_text
from tests.unit.workflow.experiments import (
    ExperimentFile,
    event,
    finish_with,
    held,
    metrics,
    output,
    real_plan,
    run,
    where,
    work_of,
    write_journal,
)

EXPLICIT, FREE, UNROLLED = "train/explicit-s0/explicit", "train/implicit-s0/free", "train/implicit-s0/unrolled"
OTHER = "train/implicit-s1/free"
EVALUATION = "evaluate/implicit-s0/free/word-problem"


def finish_all(plan: Plan) -> None:
    """Every job done, the two seeds with losses of their own, each phase with a journal."""
    for key, node in plan.nodes.items():
        summary: dict[str, Any] = {"data": {"seed": 7}}
        if node.stage == "train":
            loss = 1.0 + (node.config["seed"] or 0)
            start, end = node.config["phase"]["start_step"], node.config["phase"]["end_step"]
            summary |= {"global_step": end, "metrics": {"loss": loss}}
            points = [
                metrics(step, step, loss=loss + 1 / step, residual=0.5**step) for step in range(start + 1, end + 1)
            ]
            write_journal(plan, key, event("stage_started"), *points, event("stage_finished"))
        if node.stage == "evaluate":
            implicit = {"blockwise": 0.75, "blockwise@eval_tol=0.2": 0.5}
            mode = implicit if "implicit" in key else {"parallel": 0.25}
            summary = {"accuracy_last10": {"s3-test-L16-h0.5": mode, "s3-test-L8-h0.5": mode}}
        finish_with(plan, key, summary)


@pytest.fixture
def finished(tiny: ExperimentFile) -> ExperimentFile:
    finish_all(real_plan(tiny))
    return tiny


def compared(experiment: ExperimentFile, *names: str) -> list[ComparedColumn]:
    return find_columns(names, real_plan(experiment))


def shown(columns: list[ComparedColumn]) -> dict[str, tuple[str, ...]]:
    return {row.shown: row.values for row in differences(columns)}


def numbers(columns: list[ComparedColumn], section: str) -> dict[str, list[str]]:
    rows = [row for row in number_rows(columns) if row.section.startswith(section)]
    return {row.name: [spread_text(values, number_text) for values in row.values] for row in rows}


def test_a_seed_is_all_that_differs_between_two_seeds_and_is_said_once(finished: ExperimentFile) -> None:
    found = compared(finished, "implicit-s0", "implicit-s1")
    assert shown(found) == {"seed (and of start)": ("0", "1")}
    assert numbers(found, "at the end")["loss"] == ["1", "2"]


def test_of_an_input_only_what_differs_in_it_is_shown(finished: ExperimentFile) -> None:
    plan = real_plan(finished)
    shutil.copytree(plan.root, finished.path.parent / "before")
    finished.edit("num_samples: 64", "num_samples: 48")
    shutil.copytree(plan.root / "train" / "implicit-s0", plan.root / "kept" / "implicit-s0")
    shutil.rmtree(plan.root / "train")
    finish_all(real_plan(finished))
    old = finished.path.parent / "before" / FREE
    found = find_columns([str(old), str(plan.root / FREE)], None)
    assert shown(found) == {"data: num_samples": ("64", "48")}
    assert [column.label for column in found] == [str(old), str(plan.root / FREE)]


def test_two_attempts_of_one_job_are_told_apart_by_their_fingerprints(
    capsys: pytest.CaptureFixture[str], finished: ExperimentFile
) -> None:
    works = [work_of(real_plan(finished), FREE)]
    finished.edit("tol: 0.1", "tol: 0.2")
    finish_all(real_plan(finished))
    works.append(work_of(real_plan(finished), FREE))
    other = finished.path.parent / "elsewhere" / FREE
    shutil.copytree(works[0].parents[1], other)
    values = json.loads(output(capsys, "compare", *map(str, [*works, other]), "--json"))
    assert list(values["columns"]) == [*(f"implicit-s0/free {work.name}" for work in works), str(other)]
    assert values["differences"][0]["values"] == ["0.1", "0.2", "0.2"]


@pytest.mark.parametrize(("old", "new"), [("tol: 0.1", "tol: 0.2"), ("eval_block_len: 4", "eval_block_len: 2")])
def test_a_column_of_former_settings_is_marked(
    capsys: pytest.CaptureFixture[str], finished: ExperimentFile, old: str, new: str
) -> None:
    assert "(stale)" not in output(capsys, "compare", "implicit-s0", "implicit-s0/unrolled", *where(finished))
    finished.edit(old, new)
    labels = [column.label for column in compared(finished, "implicit-s0", "implicit", "implicit-s0/unrolled")]
    assert labels == ["implicit-s0/free (stale)", "implicit/free (stale)", "implicit-s0/unrolled"]


def test_while_a_driver_runs_nobody_is_told_to_start_another(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile
) -> None:
    plan = real_plan(tiny)
    finish_with(plan, "data/s3-train", {})
    calls = (("compare", "implicit-s0", "explicit"), ("lineage", "report"), ("report",), ("missing",))
    told = [run(capsys, *call, *where(tiny)) for call in calls]
    assert all("; type: snakemake " in out + err for _, out, err in told)
    with held(plan.driver_lock) as pid:
        followed = [run(capsys, *call, *where(tiny)) for call in calls]
        numbers = output(capsys, "report", "--numbers", *where(tiny))
    said = f"; snakemake is running (process {pid}); to follow it, type: implicit-llm status {plan.argument}\n"
    assert all(said in text for text in (numbers, *(out + err for _, out, err in followed)))
    assert [code for code, _, _ in followed] == [code for code, _, _ in told]


def test_after_a_change_was_undone_numbers_and_pages_are_those_of_the_present_settings(
    capsys: pytest.CaptureFixture[str], finished: ExperimentFile
) -> None:
    finished.edit("eval_block_len: 4", "eval_block_len: 2")
    changed = real_plan(finished)
    for key in (EVALUATION, "report"):
        finish_with(changed, key, {"accuracy_last10": {"s3-test-L8-h0.5": {"blockwise": 0.125}}})
    plan = real_plan(finished.edit("eval_block_len: 2", "eval_block_len: 4"))
    assert plan.shows_another("report")
    for command in (("compare", "implicit-s0"), ("report", "--numbers")):
        out = output(capsys, *command, *where(finished))
        assert re.search(r"^accuracy_last10 s3-test-L8-h0\.5 blockwise +0\.75", out, re.MULTILINE), out
        assert "(stale)" not in out
    page = f"{plan.work['report']}/index.html"
    assert output(capsys, "report", *where(finished)) == f"{page}\n"
    assert f"next: nothing, all is done; {page}" in output(capsys, "status", *where(finished))


def test_a_renamed_run_has_its_evaluations_and_its_lineage(
    capsys: pytest.CaptureFixture[str], finished: ExperimentFile
) -> None:
    finished.edit("  explicit:", "  plain:")
    root = real_plan(finished).root
    for stage in ("train", "evaluate"):
        (root / stage / "explicit-s0").rename(root / stage / "plain-s0")
    assert numbers(compared(finished, "plain"), "evaluation")["accuracy_last10 s3-test-L8-h0.5 parallel"] == ["0.25"]
    evaluation = root / "evaluate/plain-s0/explicit/word-problem"
    verified = output(capsys, "lineage", str(evaluation), "--verify")
    assert "evaluate/plain-s0/explicit/word-problem" in verified
    assert "train/plain-s0/explicit" in verified
    assert ": none broken" in verified
    readers = output(capsys, "lineage", str(root / "train/plain-s0/explicit"), "--forward")
    assert "evaluate/plain-s0/explicit/word-problem" in readers


def test_results_in_a_linked_folder_have_their_lineage(
    capsys: pytest.CaptureFixture[str], finished: ExperimentFile
) -> None:
    root = real_plan(finished).root
    for folder in (root / "train/implicit-s0", root):
        moved = finished.path.parent / "larger disk" / folder.name
        moved.parent.mkdir(exist_ok=True)
        folder.rename(moved)
        folder.symlink_to(moved)
    assert ": none broken" in output(capsys, "lineage", str(root / "report"), "--verify")


def test_the_lineage_of_a_result_has_no_copies_to_which_links_lead(
    capsys: pytest.CaptureFixture[str], finished: ExperimentFile
) -> None:
    root = real_plan(finished).root
    (root / "copy").symlink_to(shutil.copytree(root, root.parent.parent / "copy"))
    found = json.loads(output(capsys, "lineage", str(root / "report"), "--json"))
    assert not [run for run in found["runs"] if "copy" in run["run_dir"]]


def test_a_solver_that_only_one_has_is_no_difference_of_null(finished: ExperimentFile) -> None:
    found = shown(compared(finished, "implicit-s0", "explicit"))
    assert (found["phase.solver.tol"], found["input start"]) == (("0.1", "-"), (UNROLLED, "-"))
    assert "phase.solver" not in found


def test_evaluations_of_this_very_model_are_set_side_by_side(finished: ExperimentFile) -> None:
    found = compared(finished, "implicit-s0", "explicit")
    rows = numbers(found, "evaluation word-problem")
    first = "accuracy_last10 s3-test-L8-h0.5 blockwise"  # L8 before L16
    assert next(iter(rows)) == first
    assert rows["accuracy_last10 s3-test-L16-h0.5 blockwise"] == ["0.75", "-"]
    assert rows["accuracy_last10 s3-test-L16-h0.5 parallel"] == ["-", "0.25"]
    plan = real_plan(finished)
    for path in (plan.root / EVALUATION).rglob("*.json"):
        path.write_text(path.read_text().replace(plan.identities[FREE].fingerprint, "0" * 64))
    assert first not in numbers(compared(finished, FREE, "explicit"), "evaluation")


def test_what_an_unknown_input_was_is_not_invented(finished: ExperimentFile) -> None:
    plan = real_plan(finished)
    fingerprint = plan.identities[UNROLLED].fingerprint[:FINGERPRINT_DIGITS]
    shutil.rmtree(plan.root / UNROLLED)
    found = shown(compared(finished, "implicit-s0", "implicit-s1"))
    assert found["input start"] == (f"not found ({fingerprint})", "train/implicit-s1/unrolled")


def test_the_command_prints_tables_and_json(capsys: pytest.CaptureFixture[str], finished: ExperimentFile) -> None:
    out = output(capsys, "compare", "implicit-s0", "explicit", *where(finished))
    for line in (
        r"^phase\.solver\.tol +0\.1 +- *$",
        r"^accuracy_last10 s3-test-L8-h0\.5 blockwise +0\.75 +-$",
        "2 numbers of sweeps are in --json",
    ):
        assert re.search(line, out, re.MULTILINE), line
    assert "@" not in out
    alone = output(capsys, "compare", "implicit-s0", *where(finished))
    assert ("nothing differs" in alone, "accuracy_last10" in alone) == (False, True)
    seeds = ("compare", "implicit", "explicit", *where(finished))
    assert "implicit/free (2 seeds)" in output(capsys, *seeds)
    values = json.loads(output(capsys, *seeds, "--json"))
    assert [len(members) for members in values["columns"].values()] == [2, 1]
    (loss,) = [row["values"] for row in values["numbers"] if row["name"] == "loss" and "end" in row["section"]]
    assert loss == [[1.0, 2.0], [1.0]]


@pytest.mark.parametrize(
    ("name", "label", "keys"),
    [
        (FREE, "implicit-s0/free", [FREE]),
        ("implicit-s0/unrolled", "implicit-s0/unrolled", [UNROLLED]),
        ("implicit-s0", "implicit-s0/free", [FREE]),
        ("implicit", "implicit/free", [FREE, OTHER]),
        ("implicit/unrolled", "implicit/unrolled", [UNROLLED, "train/implicit-s1/unrolled"]),
        ("explicit/", "explicit-s0/explicit", [EXPLICIT]),
    ],
)
def test_a_run_is_found_by_what_people_call_it(plan: Plan, name: str, label: str, keys: list[str]) -> None:
    assert find_model(name, plan) == (label, keys)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (12345, "12,345"),
        (1e-7, "1e-07"),
        (0.123456, "0.1235"),
        (5061.3, "5,061"),
        (2.5e12, "2.5e+12"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number_text(value) == text


def test_times_shares_and_costs_have_a_unit_that_fits() -> None:
    times = {None: "-", 0: "0 s", 89: "89 s", 90: "2 min", 5000: "83 min", 6000: "1.7 h", 86400 * 20: "20 d"}
    assert {seconds: time_text(seconds) for seconds in times} == times
    shares = {None: "-", 0.0: "0 %", 0.004: "0.4 %", 0.5: "50 %", 1.0: "100 %"}
    assert {share: share_text(share) for share in shares} == shares
    costs = [("cpu", 12 / 3600), ("cpu", 0.5), ("cpu", 3), ("gpu", 0.5), ("gpu", 12345.6), (None, None)]
    texts = ["12 s wall time", "30 min wall time", "3.0 h wall time", "0.5 GPU-hours", "12,346 GPU-hours", "-"]
    assert [Cost(unit, hours, "x", "y").text for unit, hours in costs] == texts  # type: ignore[arg-type]
