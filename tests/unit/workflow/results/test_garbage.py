"""What can be deleted, and what a job that needs freed files does to the plan."""

import pytest

from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.explain import ExplainedJob, explain
from implicit_llm_workflow.results.garbage import find_garbage
from tests.unit.workflow.console_calls import output, refusal, where
from tests.unit.workflow.experiments import ExperimentFile
from tests.unit.workflow.run_dirs import finish_with, held, real_plan, work_of

DATA, UNROLLED, FREE = "data/s3-train", "train/implicit-s0/unrolled", "train/implicit-s0/free"
EVALUATION = "evaluate/implicit-s0/free/word-problem"
KEPT = {"manifest.json", "training.json", "journal.jsonl"}


def make_all(plan: Plan, *, without: tuple[str, ...] = ()) -> None:
    """Finish every job, with records and larger files in its work folder."""
    for key, node in plan.nodes.items():
        if key not in without:
            finish_with(plan, key, {})
            work = work_of(plan, key)
            for name in ("training.json", "journal.jsonl"):
                (work / name).write_text("{}")
            if node.stage in ("data", "train"):
                for name in ("model/model.safetensors", "checkpoint/state.json", "rows.npy"):
                    (work / name).parent.mkdir(exist_ok=True)
                    (work / name).write_bytes(b"x" * 1000)


@pytest.fixture
def made(tiny: ExperimentFile) -> ExperimentFile:
    make_all(real_plan(tiny))
    return tiny


def gc(capsys: pytest.CaptureFixture[str], experiment: ExperimentFile, *words: str) -> str:
    return output(capsys, "gc", *words, *where(experiment))


def running(plan: Plan) -> dict[str, ExplainedJob]:
    return {job.key: job for job in explain(plan) if job.runs}


def names(plan: Plan, key: str) -> set[str]:
    work = work_of(plan, key)
    return {path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file()}


def test_results_of_former_settings_and_of_no_job_are_listed_and_deleted_on_request_alone(
    capsys: pytest.CaptureFixture[str], made: ExperimentFile
) -> None:
    before = real_plan(made)
    old, gone = work_of(before, FREE), before.run_dir(before.nodes["train/implicit-s1/free"])
    assert find_garbage(before) == []
    assert find_garbage(real_plan(made.edit("tol: 0.1", "tol: 0.2"))) == []  # the manifests still name the old results
    plan = real_plan(made.edit("seeds: [0, 1]", "seeds: [0]"))
    make_all(plan)
    listed = gc(capsys, made)
    assert f"{old}: of former settings or code" in listed
    assert f"{gone}: of no job of the experiment" in listed
    with held(gone / "work" / ".lock"):
        assert str(gone) not in gc(capsys, made)
    removed = [item.path for item in find_garbage(plan)]
    assert all(path.is_dir() for path in removed)  # still
    assert "deleted" in gc(capsys, made, "--remove")
    assert not any(path.exists() for path in removed)
    assert find_garbage(plan) == []
    assert all(status.state == "fresh" for status in real_plan(made).statuses.values())


def test_a_freed_job_is_done_and_whole_until_a_job_needs_its_files(
    capsys: pytest.CaptureFixture[str], made: ExperimentFile
) -> None:
    for key in (DATA, UNROLLED, FREE):
        assert f"freed: {key}, 3 files" in gc(capsys, made, "--payload", key)
    plan = real_plan(made)
    assert names(plan, FREE) == {*KEPT, "freed.json"}
    assert (running(plan), find_garbage(plan)) == ({}, [])
    (plan.run_dir(plan.nodes["report"]) / "manifest.json").unlink()
    assert set(running(real_plan(made))) == {"report"}  # which reads metrics alone
    (plan.run_dir(plan.nodes[EVALUATION]) / "manifest.json").unlink()
    jobs = running(real_plan(made))
    assert set(jobs) == {DATA, UNROLLED, FREE, EVALUATION, "report"}
    assert jobs[FREE].status.why == f"its files were freed, and {EVALUATION} needs them"
    assert jobs[UNROLLED].status.why == f"its files were freed, and {FREE} needs them"
    assert jobs[FREE].cost.basis != "done before, is taken up again"


def test_freed_shards_are_made_again_with_the_stream_that_points_to_them(
    capsys: pytest.CaptureFixture[str], language: ExperimentFile
) -> None:
    plan = real_plan(language)
    make_all(plan)
    stream = next(key for key, node in plan.nodes.items() if node.config.get("kind") == "token_stream")
    shard = next(key for key, node in plan.nodes.items() if node.config.get("kind") == "token_shard")
    gc(capsys, language, "--payload", shard)
    assert running(real_plan(language)) == {}
    training = next(key for key, node in plan.nodes.items() if node.upstream.get("data") == stream)
    (plan.run_dir(plan.nodes[training]) / "manifest.json").unlink()
    assert set(running(real_plan(language))) == {shard, stream, training}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--payload", EVALUATION), "has small files alone"),
        (("--payload", FREE), f"{EVALUATION} has still to read its files"),
        (("--payload",), "goes with jobs"),
        ((FREE,), "goes with jobs"),
    ],
)
def test_what_cannot_be_freed_is_one_line(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile, words: tuple[str, ...], message: str
) -> None:
    make_all(real_plan(tiny), without=() if words[-1] == EVALUATION else (EVALUATION,))
    assert message in refusal(capsys, "gc", *words, *where(tiny))


def test_a_pattern_leaves_out_what_cannot_be_freed(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile) -> None:
    plan = real_plan(tiny)
    make_all(plan, without=(EVALUATION,))
    said = gc(capsys, tiny, "--payload", "train/implicit-s0/*")
    assert "1 jobs freed" in said
    assert names(plan, UNROLLED) == {*KEPT, "freed.json"}
    assert "model/model.safetensors" in names(plan, FREE)
