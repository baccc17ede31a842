"""Why jobs run, what they take and what stays."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.atomic import write_json
from implicit_llm_contracts.runs.identity import config_differences
from implicit_llm_workflow.estimates import Cost, total_text
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import ACCEPTED, AcceptedUnreadable, read_acceptance
from implicit_llm_workflow.results.accept import (
    NotAcceptable,
    chosen_jobs,
    new_acceptances,
    take_back,
)
from implicit_llm_workflow.results.explain import as_json, explain, headline, lines_below, running_table
from implicit_llm_workflow.results.job_states import JobView
from implicit_llm_workflow.results.listing import experiments
from tests.refusals import refused
from tests.unit.workflow.experiments import ALL, EVALUATIONS, EXPLICIT, FREE, TEST_SETS, ExperimentFile, keys, work_of

GPU = "NVIDIA H200"


def spend(plan: Plan, key: str, busy_s: list[float], device: str = "cpu", processes: int = 1) -> None:
    """Provenance of a job as if its attempts had taken so long."""
    values = {"attempts": [{"busy_s": seconds} for seconds in busy_s], "device": device, "processes": processes}
    (work_of(plan, key) / "provenance.json").write_text(json.dumps(values))


def running(jobs: list[JobView]) -> set[str]:
    return {job.node.key for job in jobs if job.runs}


def cost_of(plan: Plan, key: str) -> Cost:
    return next(job["cost"] for job in as_json(explain(plan))["jobs"] if job["job"] == key)


def test_nothing_runs_when_all_is_fresh(finished: ExperimentFile) -> None:
    found = explain(finished.plan())
    assert (running(found), {job.node.key for job in found if job.has_result}) == (set(), ALL)
    assert headline(found) == f"Nothing will run: what is needed of {len(ALL)} jobs is there"


def test_each_reason_stands_by_itself(finished: ExperimentFile) -> None:
    plan = finished.edit("tol: 0.1", "tol: 0.2").plan({"evaluate": "new"})
    jobs = {job["job"]: job for job in as_json(explain(plan))["jobs"]}
    assert jobs.keys() == ALL
    assert {key for key, job in jobs.items() if job["runs"]} == {*FREE, *EVALUATIONS, "report"}
    assert jobs["train/implicit-s0/free"]["difference"].config == ("phase.solver.tol 0.1 -> 0.2",)
    evaluation = jobs["evaluate/implicit-s0/free/word-problem"]
    assert evaluation["difference"].changed_inputs == ("train/implicit-s0/free",)
    assert (evaluation["code"].new, evaluation["code"].files) == ("new", None)  # nothing is known of the old code


TEXTS = ("x" * 38, "y" * 39)
BLOCKS = {"name": "blockwise", "eval_block_len": 4}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ([8, 16], [8, 16, 32], ["value.32 - -> 32"]),
        ([8, 16], [16], ["value.8 8 -> -"]),
        ([8, 16], [8, 32], ["value.1 16 -> 32"]),
        ([8, 8], [8], ["value [8,8] -> [8]"]),
        (*TEXTS, [f'value "{TEXTS[0]}" -> "{TEXTS[1][:36]}...']),  # cut after forty characters
        (
            [BLOCKS],
            [{**BLOCKS, "eval_block_len": 8}, {"name": "sequential"}],
            ["value.blockwise.eval_block_len 4 -> 8", 'value.sequential - -> {"name":"sequential"}'],
        ),
        (
            [BLOCKS],
            [{"name": "sequential"}],
            [
                'value.blockwise {"eval_block_len":4,"name":"blockwise"} -> -',
                'value.sequential - -> {"name":"sequential"}',
            ],
        ),
    ],
)
def test_values_and_lists_are_compared_by_entry(old: object, new: object, said: list[str]) -> None:
    assert list(config_differences({"value": old}, {"value": new})) == said


def test_a_target_is_explained_with_what_it_needs_alone(finished: ExperimentFile) -> None:
    plan = finished.edit("batch_size: 8", "batch_size: 4").plan()
    found = explain(plan, ["evaluate/explicit-s0/explicit/word-problem"])
    assert running(found) == EXPLICIT
    assert {job.node.key for job in found if job.has_result} == {"data/s3-train", *TEST_SETS}


@pytest.mark.parametrize(
    ("device", "processes", "cost"),
    [
        ("cpu", 1, {"unit": "cpu", "hours": 1.0}),
        (GPU, 8, {"unit": "gpu", "hours": 8.0}),
    ],
)
def test_a_job_takes_as_long_as_its_attempts_took_together_on_all_gpus(
    finished: ExperimentFile, device: str, processes: int, cost: dict[str, Any]
) -> None:
    key = "train/explicit-s0/explicit"
    spend(finished.plan(), key, [1800, 1800], device, processes)
    assert cost_of(finished.plan({"train": "new"}), key) == Cost(**cost, device=device, basis="as last time")


def test_another_seed_and_another_number_of_sequences_are_counted_in(finished: ExperimentFile) -> None:
    plan = finished.plan()
    spend(plan, "train/implicit-s0/unrolled", [3600])
    changed = finished.edit("batch_size: 8", "batch_size: 4").plan()
    assert cost_of(changed, "train/implicit-s0/unrolled").hours == 0.5
    other = cost_of(changed, "train/implicit-s1/unrolled")
    assert (other.hours, other.basis) == (0.5, "as another seed x 0.5, with other settings")


def test_what_nothing_tells_is_not_known_and_counted(plan: Plan) -> None:
    found = explain(plan)
    unknown = [job for job in found if job.cost.hours is None]
    assert {"data/s3-train", "report"} <= {job.node.key for job in unknown}
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
    assert "train/implicit-s0/unrolled and 14 like it" in map(str, table.columns[0].cells)


NEW = {"train": "new"}
EVERY_TRAINING = ["train/*"]


def accept(plan: Plan, *targets: str) -> list[str]:
    """Accept as the command does; the jobs that were."""
    found = new_acceptances(plan, chosen_jobs(plan, targets), "the log was reworded")
    for key, acceptance in found.items():
        write_json(plan.root / key / ACCEPTED, acceptance)
    return list(found)


def test_accepted_training_is_fresh_and_so_is_all_that_was_made_from_it(finished: ExperimentFile) -> None:
    old = finished.plan()
    before = {path: path.read_bytes() for path in old.root.rglob("manifest.json")}
    assert len(accept(finished.plan(NEW), *EVERY_TRAINING)) == 5
    plan = finished.plan(NEW)
    assert keys(plan, "fresh") == ALL
    assert plan.statuses["train/implicit-s0/free"].why == "the code changed, accepted: the log was reworded"
    assert plan.statuses["report"].why == ""
    assert {path: path.read_bytes() for path in before} == before
    # Each job is asked for what it is, so that Snakemake sees no change.
    files = {key: plan.identity_file(node) for key, node in plan.nodes.items()}
    assert files == {key: old.identity_file(node) for key, node in old.nodes.items()}
    assert keys(finished.plan({**NEW, "evaluate": "new"}), "stale") == {*EVALUATIONS, "report"}


def test_an_acceptance_ends_with_the_next_change_and_comes_back_with_the_code(finished: ExperimentFile) -> None:
    accept(finished.plan(NEW), *EVERY_TRAINING)
    assert "train/explicit-s0/explicit" in keys(finished.plan({"train": "newer"}), "stale")
    assert keys(finished.plan(NEW), "fresh") == ALL
    assert not finished.plan().accepted
    finished.edit("tol: 0.1", "tol: 0.2")
    assert "train/implicit-s0/free" in keys(finished.plan(NEW), "stale")
    assert "train/implicit-s0/unrolled" in keys(finished.plan(NEW), "fresh")


def test_a_result_that_is_lost_is_made_with_the_code_of_now(finished: ExperimentFile) -> None:
    accept(finished.plan(NEW), *EVERY_TRAINING)
    plan = finished.plan(NEW)
    (plan.run_dir(plan.nodes["train/explicit-s0/explicit"]) / "manifest.json").unlink()
    plan = finished.plan(NEW)
    assert plan.identities["train/explicit-s0/explicit"].code == "new"
    assert keys(plan, "missing") == {"train/explicit-s0/explicit"}


def test_revoking_makes_stale_again(finished: ExperimentFile) -> None:
    stale = keys(finished.plan(NEW), "stale")
    accept(finished.plan(NEW), *EVERY_TRAINING)
    plan = finished.plan(NEW)
    assert len(take_back(plan, chosen_jobs(plan, EVERY_TRAINING))) == 5
    assert (keys(finished.plan(NEW), "stale"), list(plan.root.rglob("accepted.json"))) == (stale, [])
    with pytest.raises(NotAcceptable, match="nothing was accepted"):
        take_back(plan, chosen_jobs(plan, ["report"]))


def test_what_never_finished_is_refused(plan: Plan) -> None:
    with pytest.raises(NotAcceptable, match="never finished"):
        accept(plan, "report")


@pytest.mark.parametrize(
    ("edit", "target", "message"),
    [
        (
            ("tol: 0.1", "tol: 0.2"),
            "train/implicit-s0/free",
            r"its code .*\(config: phase.solver.tol 0.1 -> 0.2;",
        ),
        (
            ("num_samples: 64", "num_samples: 48"),
            "train/explicit-s0/explicit",
            r"its code .*\(input changed: data/s3-train\)",
        ),
        (
            None,
            "train/implicit-s0/free",
            r"\(input changed: train/implicit-s0/unrolled\), .*accept inputs as",
        ),
        (None, "data/s3-train", "is fresh, so that there is nothing to accept"),
        (None, "nothing/*", "no job matches"),
    ],
)
def test_what_is_not_code_alone_is_refused_and_nothing_is_done(
    finished: ExperimentFile, edit: tuple[str, str] | None, target: str, message: str
) -> None:
    if edit is not None:
        finished.edit(*edit)
    plan = finished.plan(NEW)
    with pytest.raises(NotAcceptable, match=message):
        accept(plan, "train/explicit-s0/explicit" if "free" in target else "train/implicit-s0/unrolled", target)
    assert not list(plan.root.rglob("accepted.json"))


def test_a_forged_acceptance_of_another_config_does_not_hold(finished: ExperimentFile) -> None:
    accept(finished.plan(NEW), *EVERY_TRAINING)
    finished.edit("tol: 0.1", "tol: 0.2")
    plan = finished.plan(NEW)
    path = plan.run_dir(plan.nodes["train/implicit-s0/free"]) / "accepted.json"
    values = json.loads(path.read_text())
    values["wanted"] = plan.identities["train/implicit-s0/free"].fingerprint
    path.write_text(json.dumps(values))
    assert "train/implicit-s0/free" in keys(finished.plan(NEW), "stale")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"why": 1}'])
def test_a_damaged_record_is_an_error_that_names_it(finished: ExperimentFile, text: str) -> None:
    path = finished.beside("results/tiny/report/accepted.json", text)
    with pytest.raises(AcceptedUnreadable, match=str(path)):
        _ = finished.plan().statuses
    (listed,) = experiments({"tiny": str(finished.path)}, finished.path.parent / "results")
    assert (listed.error or "").startswith(f"{path}: is no accepted exception")


def test_a_folder_that_may_not_be_read_is_named(finished: ExperimentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with refused(r"report/accepted.json: cannot be read \(Permission denied\); ask its owner", AcceptedUnreadable):
        read_acceptance(finished.path.parent / "results/tiny/report")
