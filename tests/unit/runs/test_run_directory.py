"""Run directories and who may write there, and signals: both also in forked processes."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from implicit_llm_contracts.runs import signals
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


def test_a_finished_run_is_found_until_a_file_or_its_manifest_changes_and_that_is_set_aside(run: RunDirectory) -> None:
    (run.work / "a").write_text("good")
    manifest = run.publish(["a"], {})
    assert run.find_done("sha256") == manifest
    (run.work / "a").write_text("evil")
    assert run.find_done("size") == manifest
    assert run.find_done("sha256") is None
    assert sorted(path.name for path in run.work.iterdir()) == ["a.bad", "manifest.json"]
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


def leave(number: int, frame: object) -> None:
    sys.exit(99)


def fork_has(number: int, handler: object) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.getsignal(number) == handler else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture(params=sorted(signals.IN_FORKS))
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal without a handler, also where a job of another test left one."""
    before = signal.getsignal(request.param)
    signals.restore(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_this_process_has_the_handler_until_it_is_taken_back_and_a_fork_does_not(number: signal.Signals) -> None:
    previous = signals.handle(number, leave)
    assert fork_has(number, signals.IN_FORKS[number])
    with pytest.raises(SystemExit):
        signal.raise_signal(number)
    signals.restore(number, previous)
    assert previous == signal.getsignal(number) == signal.SIG_DFL
    assert fork_has(number, signal.SIG_DFL)


def test_other_signals_are_refused() -> None:
    with pytest.raises(ValueError, match="SIGHUP"):
        signals.handle(signal.SIGHUP, leave)


def test_workers_of_a_pool_end_whatever_they_wait_for() -> None:
    previous = signals.handle(signal.SIGTERM, leave)
    context = multiprocessing.get_context("fork")
    lock = context.Lock()
    try:
        with lock:  # a worker cannot run a Python handler while it waits for a lock
            workers = [context.Process(target=lock.acquire) for _ in range(20)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join(60)
        assert [worker.exitcode for worker in workers] == [-signal.SIGTERM] * 20
    finally:
        signals.restore(signal.SIGTERM, previous)
        for worker in workers:
            worker.kill()
