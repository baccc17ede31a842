import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import ResultError, RunDirectory, RunDirectoryBusy


@pytest.fixture
def run(run_path: Path) -> RunDirectory:
    run = RunDirectory(run_path, Identity("train", "x", {}, "c0de", {}))
    run.prepare()
    return run


def fork(child: Callable[[], None]) -> int:
    """Run `child` in a forked process, which then waits to be killed; returns when `child` has returned."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        child()
        os.write(tell, b"x")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_second_writer_is_told_who_writes(run: RunDirectory) -> None:
    with run.lock(), pytest.raises(RunDirectoryBusy, match=rf"process {os.getpid()} on .* is writing here"), run.lock():
        pass
    with run.lock():
        pass


def test_the_lock_goes_with_the_process_that_held_it(run: RunDirectory) -> None:
    holder = run.lock()
    pid = fork(lambda: holder.__enter__())
    with pytest.raises(RunDirectoryBusy, match=f"process {pid} on"), run.lock():
        pass
    kill(pid)
    with run.lock():
        pass


def test_a_forked_worker_that_outlives_its_parent_does_not_keep_the_lock(run: RunDirectory) -> None:
    with run.lock():
        worker = fork(lambda: None)
    try:
        with run.lock():
            pass
    finally:
        kill(worker)


def test_files_and_directories_are_published_with_their_paths(run: RunDirectory) -> None:
    (run.work / "model" / "sub").mkdir(parents=True)
    for name in ("a.json", "model/config.json", "model/sub/w", "model/.w.12345678.tmp", "not-named"):
        (run.work / name).write_text(name)
    manifest = run.publish(["model", run.work / "a.json", "model/sub"], {"loss": 1.0})
    prefix = f"work/{run.work.name}/"
    assert [record.path.removeprefix(prefix) for record in manifest.files] == [
        "a.json",
        "model/config.json",
        "model/sub/w",
    ]
    assert Manifest.read(run.path / "manifest.json") == manifest
    assert (run.work / "manifest.json").read_bytes() == (run.path / "manifest.json").read_bytes()


def test_declared_files_are_copied_to_the_run_directory_and_again_after_they_were_deleted(run: RunDirectory) -> None:
    (run.work / "declared" / "figures").mkdir(parents=True)
    (run.work / "declared" / "index.html").write_text("page")
    (run.work / "declared" / "figures" / "1.svg").write_text("figure")
    manifest = run.publish(["declared"], {})
    (run.path / "index.html").unlink()
    run.republish(manifest)
    assert (run.path / "index.html").read_text() == "page"
    assert (run.path / "figures" / "1.svg").read_text() == "figure"


@pytest.mark.parametrize("name", ["missing", "../outside", "link", "holder"])
def test_what_cannot_be_vouched_for_is_refused(run: RunDirectory, name: str) -> None:
    (run.work.parent / "outside").write_text("x")
    (run.work / "link").symlink_to(run.work.parent / "outside")
    (run.work / "holder").mkdir()
    (run.work / "target").write_text("x")
    (run.work / "holder" / "inner-link").symlink_to(run.work / "target")
    with pytest.raises(ResultError):
        run.publish([name], {})
    assert not (run.path / "manifest.json").exists()


def test_a_finished_run_is_found_until_a_file_changes_and_that_file_is_set_aside(run: RunDirectory) -> None:
    (run.work / "a").write_text("good")
    manifest = run.publish(["a"], {})
    assert run.find_done("sha256") == manifest
    (run.work / "a").write_text("evil")
    assert run.find_done("size") == manifest
    assert run.find_done("sha256") is None
    assert sorted(path.name for path in run.work.iterdir()) == ["a.bad", "manifest.json"]


def test_a_damaged_committed_manifest_counts_as_absent_and_is_set_aside(run: RunDirectory) -> None:
    (run.work / "manifest.json").write_text("{")
    assert run.find_done("size") is None
    assert (run.work / "manifest.json.bad").exists()


def test_another_identity_works_elsewhere_and_its_manifest_is_not_taken_for_ours(run: RunDirectory) -> None:
    other = RunDirectory(run.path, Identity("train", "x", {"seed": 1}, "c0de", {}))
    other.prepare()
    assert run.work != other.work
    assert run.work.parent == other.work.parent == run.path / "work"
    other.publish([], {})
    (other.work / "manifest.json").rename(run.work / "manifest.json")
    assert run.find_done("size") is None
