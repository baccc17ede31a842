"""Why jobs run, what they take and what stays."""

import json
from typing import Any

import pytest

from implicit_llm_workflow.estimates.cost import total_text
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import config_differences
from implicit_llm_workflow.results.explain import ExplainedJob, as_json, explain, headline, lines_below, running_table
from tests.unit.workflow.experiments import ALL, EXPLICIT, FREE, TEST_SETS, ExperimentFile
from tests.unit.workflow.run_dirs import work_of

GPU = "NVIDIA H200"


def spend(plan: Plan, key: str, busy_s: list[float], device: str = "cpu", argv: tuple[str, ...] = ()) -> None:
    """Provenance of a job as if its attempts had taken so long."""
    attempts = [{"busy_s": seconds} for seconds in busy_s]
    values = {"attempts": attempts, "device": device, "argv": list(argv)}
    (work_of(plan, key) / "provenance.json").write_text(json.dumps(values))


def running(jobs: list[ExplainedJob]) -> set[str]:
    return {job.key for job in jobs if job.runs}


def cost_of(plan: Plan, key: str) -> dict[str, Any]:
    return next(job["cost"] for job in as_json(explain(plan))["jobs"] if job["job"] == key)


def test_nothing_runs_when_all_is_fresh(finished: ExperimentFile) -> None:
    found = explain(finished.plan())
    assert (running(found), {job.key for job in found if job.is_fresh}) == (set(), ALL)
    assert headline(found) == f"Nothing will run: what is needed of {len(ALL)} jobs is there"


def test_each_reason_stands_by_itself(finished: ExperimentFile) -> None:
    plan = finished.edit("tol: 0.1", "tol: 0.2").plan({"evaluate": "new"})
    jobs = {job["job"]: job for job in as_json(explain(plan))["jobs"]}
    assert set(jobs) == ALL
    changed = {*FREE, "evaluate/explicit-s0/explicit/word-problem", "report"}
    assert {key for key, job in jobs.items() if job["runs"]} == changed
    assert jobs["train/implicit-s0/free"]["difference"]["config"] == ("phase.solver.tol 0.1 -> 0.2",)
    evaluation = jobs["evaluate/implicit-s0/free/word-problem"]
    assert evaluation["difference"]["changed_inputs"] == ("train/implicit-s0/free",)
    assert evaluation["code"]["new"] == "new"
    assert evaluation["code"]["files"] is None  # nothing was recorded of the old code


def test_what_was_added_to_a_list_or_removed_from_it_is_the_reason(finished: ExperimentFile) -> None:
    mode = "- {name: blockwise, eval_mode: blockwise, eval_block_len: 4}"
    other = mode.replace("block_len: 4", "block_len: 8")
    more = f"{other}\n      - {{name: sequential, eval_mode: sequential}}"
    added, one = "modes: added {name: sequential", "- {name: sequential, eval_mode: sequential}"
    for text, reasons in (
        (more, [added, "modes[blockwise].eval_block_len 4 -> 8"]),
        (one, [added, "modes: removed {name: blockwise"]),
    ):
        plan = finished.edit(mode, text).plan()
        found = plan.statuses["evaluate/explicit-s0/explicit/word-problem"].difference.config
        assert [line.partition(",")[0] for line in found if line.startswith("modes")] == reasons
        finished.edit(text, mode)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ([8, 16], [8, 16, 32], "lengths: added 32"),
        ([8, 16], [16], "lengths: removed 8"),
        ([8, 16], [8, 32], "lengths[1] 16 -> 32"),
        ([8, 8], [8], "lengths: the same entries in another order or number"),
    ],
)
def test_lists_of_numbers_are_compared_by_entry(old: list[int], new: list[int], said: str) -> None:
    assert list(config_differences({"lengths": old}, {"lengths": new})) == [said]


def test_a_value_of_more_than_forty_characters_is_cut() -> None:
    (said,) = config_differences({"text": "x" * 38}, {"text": "y" * 39})
    assert said == 'text "' + "x" * 38 + '" -> "' + "y" * 36 + "..."


def test_a_target_is_explained_with_what_it_needs_alone(finished: ExperimentFile) -> None:
    plan = finished.edit("batch_size: 8", "batch_size: 4").plan()
    found = explain(plan, ["evaluate/explicit-s0/explicit/word-problem"])
    assert running(found) == EXPLICIT
    assert {job.key for job in found if job.is_fresh} == {"data/s3-train", *TEST_SETS}


@pytest.mark.parametrize(
    ("device", "words", "cost"),
    [
        ("cpu", (), {"unit": "cpu", "hours": 1.0}),
        (GPU, ("train", "--nodes", "2", "--processes-per-node=4", "--threads", "3"), {"unit": "gpu", "hours": 8.0}),
    ],
)
def test_a_job_takes_as_long_as_its_attempts_took_together_on_all_gpus(
    finished: ExperimentFile, device: str, words: tuple[str, ...], cost: dict[str, Any]
) -> None:
    key = "train/explicit-s0/explicit"
    spend(finished.plan(), key, [1800, 1800], device, words)
    assert cost_of(finished.plan({"train": "new"}), key) == {**cost, "device": device, "basis": "as last time"}


def test_another_seed_and_another_number_of_sequences_are_counted_in(finished: ExperimentFile) -> None:
    plan = finished.plan()
    spend(plan, "train/implicit-s0/unrolled", [3600])
    changed = finished.edit("batch_size: 8", "batch_size: 4").plan()
    assert cost_of(changed, "train/implicit-s0/unrolled")["hours"] == 0.5
    other = cost_of(changed, "train/implicit-s1/unrolled")
    assert (other["hours"], other["basis"]) == (0.5, "as another seed x 0.5, with other settings")


def test_a_result_of_before_is_taken_up_again_for_nothing(finished: ExperimentFile) -> None:
    plan = finished.edit("tol: 0.1", "tol: 0.2").plan()
    key = "train/implicit-s0/free"
    (work_of(plan, key) / "manifest.json").write_text("{}")
    assert cost_of(plan, key)["basis"] == "done before, is taken up again"


def test_what_nothing_tells_is_not_known_and_counted(plan: Plan) -> None:
    found = explain(plan)
    unknown = [job for job in found if job.cost.hours is None]
    assert {"data/s3-train", "report"} <= {job.key for job in unknown}
    assert total_text(job.cost for job in unknown) == f"{len(unknown)} of unknown cost"
    total = as_json(found)["total"]
    assert (total["jobs"], total["unknown"]) == (len(ALL), len(unknown))


def test_a_missing_result_runs_again_but_not_for_a_target_that_does_not_need_it(finished: ExperimentFile) -> None:
    plan = finished.plan()
    (plan.run_dir(plan.nodes["data/s3-train"]) / "manifest.json").unlink()
    assert running(explain(finished.plan())) == {"data/s3-train"}
    found = explain(finished.plan(), ["report"])
    assert running(found) == set()
    assert list(lines_below(found))[-1] == "1 missing but not needed: data/s3-train"
    assert running(explain(finished.plan(), ["data/s3-train"])) == {"data/s3-train"}


def test_many_jobs_alike_share_a_row(tiny: ExperimentFile) -> None:
    plan = tiny.edit("seeds: [0, 1]", "seeds: [0, 1, 2, 3, 4, 5, 6]").plan()
    table = running_table(explain(plan))
    assert "train/implicit-s0/unrolled and 14 like it" in list(table.columns[0].cells)
