"""What can be deleted and what is damaged: freed files and what they do to the plan, and every byte of a manifest."""

import errno
import os
import shutil
from pathlib import Path
from typing import IO

import pytest

from implicit_llm_contracts.runs import atomic, manifest
from implicit_llm_workflow import console
from implicit_llm_workflow.commands.options import make_plan
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.explain import explain
from implicit_llm_workflow.results.garbage import FORMER, Garbage, delete, find_garbage
from implicit_llm_workflow.results.job_states import JobView, holder_of, observe
from implicit_llm_workflow.results.verify import with_shards
from implicit_llm_workflow.rules.snakemake_driver import withdraw
from tests.refusals import refused
from tests.unit.workflow.experiments import (
    START_S,
    TINY,
    ExperimentFile,
    finish_with,
    held,
    output,
    real_plan,
    refusal,
    run,
    where,
    work_of,
)

DATA, UNROLLED, FREE = "data/s3-train", "train/implicit-s0/unrolled", "train/implicit-s0/free"
EVALUATION = "evaluate/implicit-s0/free/word-problem"
KEPT = {"commit.json", "training.json", "journal.jsonl"}


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


def running(plan: Plan) -> dict[str, JobView]:
    return {job.node.key: job for job in explain(plan) if job.runs}


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


def test_a_linked_folder_may_belong_to_another_experiment_and_is_kept(
    capsys: pytest.CaptureFixture[str], made: ExperimentFile
) -> None:
    root = real_plan(made).root
    for stage in ("train", "data"):
        (root / stage).rename(root.parent / stage)
        (root / stage).symlink_to(root.parent / stage)
    made.edit("seeds: [0, 1]", "seeds: [0]")
    make_all(real_plan(made))
    said = gc(capsys, made, "--remove")
    assert "evaluate/implicit-s1/free/word-problem: of no job of the experiment" in said
    assert f"kept, because links may lead to another experiment: {root / 'data'}, {root / 'train'}\n" in said
    assert (root / "train/implicit-s1/free/manifest.json").is_file()


def test_what_a_silent_job_on_another_machine_holds_is_kept(
    capsys: pytest.CaptureFixture[str], made: ExperimentFile
) -> None:
    before = real_plan(made)
    gone = before.run_dir(before.nodes["train/implicit-s1/free"])
    make_all(real_plan(made.edit("seeds: [0, 1]", "seeds: [0]")))
    for path in gone.glob("work/*/journal.jsonl"):
        os.utime(path, (START_S, START_S))
    with held(lock := gone / "work" / ".lock"):
        lock.write_text("process 7 on elsewhere in Slurm job 8\n")
        assert f"{gone}: kept, process 7 on elsewhere in Slurm job 8 is writing here" in gc(capsys, made, "--remove")
        assert (gone / "manifest.json").is_file()
    assert f"{gone}: of no job" in gc(capsys, made, "--remove")
    assert not gone.exists()


def test_a_former_result_that_was_deleted_in_part_is_no_result_when_its_settings_come_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, made: ExperimentFile
) -> None:
    before = real_plan(made)
    make_all(real_plan(made.edit("tol: 0.1", "tol: 0.2")))
    deleted = []

    def interrupted(path: Path) -> None:
        deleted.append(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        run(capsys, "gc", "--remove", *where(made))
    assert [path.exists() for path in deleted] == [True]
    (key,) = (key for key, node in before.nodes.items() if deleted[0].is_relative_to(before.run_dir(node)))
    assert real_plan(made.edit("tol: 0.2", "tol: 0.1")).statuses[key].state == "stale"
    made.edit("tol: 0.1", "tol: 0.2")
    assert "deleted" in gc(capsys, made, "--remove")
    assert not deleted[0].exists()


def test_a_stale_result_keeps_the_inputs_of_its_inputs(made: ExperimentFile) -> None:
    before = real_plan(made)
    plan = real_plan(made.edit("group: S3", "group: S3\n    shard_samples: 16"))
    assert plan.work[DATA] != before.work[DATA]
    for key in plan.nodes.keys() - {EVALUATION, "report"}:  # the evaluation still has the result of the former model
        finish_with(plan, key, {})
    garbage = {item.path for item in find_garbage(real_plan(made))}
    assert not garbage & {work_of(before, key) for key in (FREE, UNROLLED, DATA)}


def test_a_freed_job_is_done_and_whole_until_a_job_needs_its_files(
    capsys: pytest.CaptureFixture[str], made: ExperimentFile
) -> None:
    for key in (DATA, UNROLLED, FREE):
        assert f"freed: {key}, 3 files" in gc(capsys, made, "--payload", key)
    plan = real_plan(made)
    assert names(plan, FREE) == {*KEPT, "freed"}
    assert (running(plan), find_garbage(plan)) == ({}, [])
    (plan.run_dir(plan.nodes["report"]) / "manifest.json").unlink()
    assert set(running(real_plan(made))) == {"report"}  # which reads metrics alone
    (plan.run_dir(plan.nodes[EVALUATION]) / "manifest.json").unlink()
    jobs = running(real_plan(made))
    assert set(jobs) == {DATA, UNROLLED, FREE, EVALUATION, "report"}
    assert jobs[FREE].result.why == f"its files were freed, and {EVALUATION} needs them"
    assert jobs[UNROLLED].result.why == f"its files were freed, and {FREE} needs them"
    assert jobs[FREE].cost.basis != "done before, is taken up again"
    assert observe(real_plan(made))[FREE].state == "stale"


def test_a_freed_result_that_is_no_longer_forced_is_still_a_freed_one(
    capsys: pytest.CaptureFixture[str], made: ExperimentFile
) -> None:
    gc(capsys, made, "--payload", FREE)
    plan = real_plan(made)
    withdraw(plan, [FREE], [plan.manifest(plan.nodes[FREE])])
    assert plan.look()[FREE].state == "stale"
    output(capsys, "accept", "*", "--forced", *where(made))
    assert plan.look()[FREE].is_freed
    assert running(real_plan(made)) == {}
    (plan.run_dir(plan.nodes[EVALUATION]) / "manifest.json").unlink()
    assert {FREE, EVALUATION} <= set(running(real_plan(made)))


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


def test_a_full_disk_is_freed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, made: ExperimentFile
) -> None:
    """Nothing is written, not even the name of the process into its lock."""

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = real_plan(made)
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(atomic, "open", full, raising=False)
    assert "jobs freed: 1;" in gc(capsys, made, "--payload", FREE)
    assert names(plan, FREE) == {*KEPT, "freed"}
    assert plan.look()[FREE].is_freed


def test_a_pattern_leaves_out_what_cannot_be_freed(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile) -> None:
    plan = real_plan(tiny)
    make_all(plan, without=(EVALUATION,))
    said = gc(capsys, tiny, "--payload", "train/implicit-s0/*")
    assert "jobs freed: 1;" in said
    assert names(plan, UNROLLED) == {*KEPT, "freed"}
    assert "model/model.safetensors" in names(plan, FREE)


OTHER = "data/s3-test-L8-h0.5"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two data sets as their jobs leave them, one of them in four shards."""
    path = tmp_path_factory.mktemp("made") / "tiny.yaml"
    path.write_text(TINY.replace("group: S3", "group: S3\n    shard_samples: 16"))
    plan = real_plan(ExperimentFile(path))
    for key in (DATA, OTHER):
        with pytest.raises(SystemExit) as stopped:
            console.main(["job", "--run-dir", str(plan.root / key), "--identity", plan.identities[key].to_json()])
        assert not stopped.value.code
    return path.parent


@pytest.fixture
def data(template: Path, tmp_path: Path) -> Path:
    """The run directory of a data set, in a copy."""
    shutil.copytree(template, tmp_path / "copy")
    return tmp_path / "copy" / "results" / "tiny" / DATA


def verify(data: Path, capsys: pytest.CaptureFixture[str], *targets: str, code: int = 1) -> str:
    return output(capsys, "verify", *targets, *where(ExperimentFile(data.parents[3] / "tiny.yaml")), code=code)


def test_whole_results_pass_and_unfinished_jobs_are_counted(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "not made yet: 10 of 12 jobs\n2 jobs, 14 files, 0.0 MiB: none broken\n"  # 6 shards, 2 indices
    assert verify(data, capsys, code=0) == said


def test_a_missing_a_cut_and_a_changed_file_are_told_apart_with_their_job(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, cut, changed = sorted(data.glob("work/*/shards/*.npy"))[:3]
    size = cut.stat().st_size
    missing.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    changed.write_bytes(changed.read_bytes()[::-1])
    out = verify(data, capsys)
    assert f"broken {missing}: expected {size} bytes, found no file" in out
    assert f"broken {cut}: expected {size} bytes, found {size - 1} (job {DATA})" in out
    assert f"broken {changed}: expected sha256" in out
    assert "3 broken" in out
    assert "3 broken" in verify(data, capsys, str(data))
    assert f"rm -f {data / 'manifest.json'}" in verify(data, capsys)
    verify(data, capsys, OTHER, code=0)
    assert "not made yet: 1 of 1 jobs" in verify(data, capsys, "train/explicit-s0/explicit", code=0)


def test_a_file_that_may_not_be_read_is_not_to_be_made_again(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable = min(data.glob("work/*/shards/*.npy"))

    def opened(path: Path, mode: str) -> IO[bytes]:
        if path == unreadable:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, mode)

    monkeypatch.setattr(manifest, "open", opened, raising=False)
    out = verify(data, capsys)
    assert f"broken {unreadable}: cannot be read (Permission denied) (job {DATA})" in out
    assert "rm -f" not in out
    with refused(f"cannot read {unreadable}: permission denied; ask its owner", manifest.FileUnreadable):
        manifest.Manifest.read(data / "manifest.json").verify(data)


def test_a_manifest_that_may_not_be_read_is_not_to_be_made_again(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (commit,), read = data.glob("work/*/commit.json"), Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path == commit:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    out = verify(data, capsys)
    assert f"broken {commit}: cannot read the manifest (Permission denied)" in out
    assert "rm -f" not in out


@pytest.mark.parametrize("damage", ["{", '{"stage": "data"}', None])
def test_a_damaged_manifest_is_broken_itself(
    data: Path, capsys: pytest.CaptureFixture[str], damage: str | None
) -> None:
    path = next(data.glob("work/*/commit.json"))
    path.write_text(damage or path.read_text().replace('"seed": 0', '"seed": 1'))
    out = verify(data, capsys)
    assert f"broken {path}:" in out
    assert f"rm -f {data}/manifest.json" in out


def test_a_stream_of_tokens_is_verified_with_its_shards(tmp_path: Path) -> None:
    plan = make_plan("miniature", tmp_path)
    keys = [node.key for node in with_shards(plan, ["data/text-train", "data/babi-train"])]
    assert keys == ["data/text-shard-00000", "data/text-shard-00001", "data/text-train", "data/babi-train"]


def test_a_deletion_is_no_job_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former, seen = tmp_path / "work" / "0123456789abcdef", []
    former.mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", lambda path: seen.append(holder_of(tmp_path / "work" / ".lock")))
    delete(Garbage(former, FORMER, 0))
    assert (seen, former.exists()) == ([None], False)
