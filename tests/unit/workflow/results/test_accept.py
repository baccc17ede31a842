"""Results that are kept although their code changed."""

import json

import pytest

from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import AcceptedUnreadable
from implicit_llm_workflow.results.accept import (
    NotAcceptable,
    chosen_jobs,
    new_acceptances,
    revoke,
    save_acceptance,
)
from tests.unit.workflow.experiments import ALL, EVALUATIONS, ExperimentFile, keys

NEW = {"train": "new"}
EVERY_TRAINING = ["train/*"]


def accept(plan: Plan, *targets: str) -> list[str]:
    """Accept as the command does; the jobs that were."""
    found = new_acceptances(plan, chosen_jobs(plan, targets), "the log was reworded")
    for key, acceptance in found.items():
        save_acceptance(plan.run_dir(plan.nodes[key]), acceptance)
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
    assert len(revoke(plan, chosen_jobs(plan, EVERY_TRAINING))) == 5
    assert keys(finished.plan(NEW), "stale") == stale
    assert not list(plan.root.rglob("accepted.json"))
    with pytest.raises(NotAcceptable, match="nothing was accepted"):
        revoke(plan, chosen_jobs(plan, ["report"]))


def test_what_never_finished_is_refused(plan: Plan) -> None:
    with pytest.raises(NotAcceptable, match="never finished"):
        accept(plan, "report")


@pytest.mark.parametrize(
    ("edit", "target", "message"),
    [
        (("tol: 0.1", "tol: 0.2"), "train/implicit-s0/free", r"config changed too \(phase.solver.tol 0.1 -> 0.2\)"),
        (("num_samples: 64", "num_samples: 48"), "train/explicit-s0/explicit", r"inputs changed too \(data/s3-train\)"),
        (None, "train/implicit-s0/free", r"inputs changed too \(train/implicit-s0/unrolled\); accept these as well"),
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
    values["accepted"][0]["wanted"] = plan.identities["train/implicit-s0/free"].fingerprint
    path.write_text(json.dumps(values))
    assert "train/implicit-s0/free" in keys(finished.plan(NEW), "stale")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "accepted": [{"why": 1}]}'])
def test_a_damaged_record_is_an_error_that_names_it(finished: ExperimentFile, text: str) -> None:
    path = finished.beside("results/tiny/report/accepted.json", text)
    with pytest.raises(AcceptedUnreadable, match=str(path)):
        _ = finished.plan().statuses
