"""Run directories and who may write there, signals, the identity of a run, and the manifest over its files."""

import errno
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from implicit_llm_contracts.runs import signals
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.identity import Identity, canonical_json, compute_fingerprint, run_and_phase
from implicit_llm_contracts.runs.manifest import FileRecord, Manifest, ManifestError
from implicit_llm_contracts.runs.run_directory import (
    ResultError,
    RunDirectory,
    RunDirectoryBusy,
    is_result_shown,
    run_directories,
    show_result,
)
from tests.refusals import refused


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


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "12_3"),
    ],
)
def test_who_waits_for_a_slurm_job_is_told_its_id(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], job: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with run.lock(), pytest.raises(RunDirectoryBusy, match=rf"on \S+ in Slurm job {job} is writing here"), run.lock():
        pass


def test_a_job_does_not_start_without_its_name_in_the_lock(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with refused("cannot write .*the disk is full", StorageError), run.lock():
        pass
    monkeypatch.undo()
    with run.lock():
        assert f"process {os.getpid()} on" in (run.path / "work" / ".lock").read_text()


def test_the_lock_goes_with_the_process_that_held_it(run: RunDirectory) -> None:
    holder = run.lock()
    pid = fork(lambda: holder.__enter__())
    with pytest.raises(RunDirectoryBusy, match=f"process {pid} on .* is writing here"), run.lock():
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
    for name in ("commit.json", "manifest.json"):
        assert (run.work / name).read_bytes() == manifest.to_bytes()


def test_declared_files_are_copied_for_snakemake_and_for_people_and_again_after_they_were_deleted(
    run: RunDirectory,
) -> None:
    (run.work / "declared" / "figures").mkdir(parents=True)
    (run.work / "declared" / "index.html").write_text("page")
    (run.work / "declared" / "figures" / "1.svg").write_text("figure")
    manifest = run.publish(["declared"], {})
    assert is_result_shown(run.path, run.work)
    for folder in (run.path, run.work):
        (folder / "index.html").unlink()
    (run.work / "manifest.json").unlink()
    assert not is_result_shown(run.path, run.work)
    assert run.find_done() == manifest
    run.republish(manifest)
    assert is_result_shown(run.path, run.work)
    for folder in (run.path, run.work):
        assert (folder / "index.html").read_text() == "page"
        assert (folder / "figures" / "1.svg").read_text() == "figure"


def test_a_result_whose_copy_without_a_suffix_is_gone_is_not_shown(run: RunDirectory) -> None:
    (run.work / "declared").mkdir(parents=True)
    (run.work / "declared" / "LICENSE").write_text("free")
    run.publish(["declared"], {})
    assert is_result_shown(run.path, run.work)
    (run.path / "LICENSE").unlink()
    assert not is_result_shown(run.path, run.work)


def test_the_readable_names_show_one_result_and_nothing_of_the_one_before(run: RunDirectory) -> None:
    other = RunDirectory(run.path, Identity("report", "x", {"seed": 1}, "c0de", {}))
    other.prepare()
    for one, names in ((run, ("index.html", "figures/1.svg")), (other, ("index.html", "figures/2.svg"))):
        (one.work / "declared" / "figures").mkdir(parents=True)
        for name in names:
            (one.work / "declared" / name).write_text(one.work.name)
        (one.work / "job.log").write_text(one.work.name)
        one.publish(["declared"], {})
    show_result(run.path, run.work)
    assert (run.path / "index.html").read_text() == (run.path / "job.log").read_text() == run.work.name
    assert [path.name for path in (run.path / "figures").iterdir()] == ["1.svg"]
    assert [is_result_shown(run.path, one.work) for one in (run, other)] == [True, False]


def test_a_folder_that_holds_only_a_manifest_is_finished(run: RunDirectory) -> None:
    manifest = run.publish([], {})
    (run.work / "commit.json").unlink()
    assert run.find_done() == manifest


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
    assert run.find_done() == manifest
    (run.work / "a").write_text("evil")
    assert run.find_done() is None
    assert sorted(path.name for path in run.work.iterdir()) == ["a.bad", "commit.json", "manifest.json"]
    (run.work / "commit.json").write_text("{")
    assert run.find_done() is None
    assert (run.work / "commit.json.bad").exists()


def test_run_directories_behind_links_are_found_once_and_last(tmp_path: Path) -> None:
    results, disk = tmp_path / "results", tmp_path / "disk"
    for path in (results / "b" / "train" / "x", disk / "moved" / "y", disk / "other" / "z"):
        (path / "work").mkdir(parents=True)
    for name, target in {"b/a": "moved", "a": "other", "c": "moved/y", "latest": "../results/b"}.items():
        (results / name).symlink_to(disk / target)
    (results / "b" / "loop").symlink_to(results)
    (results / "b" / "above").symlink_to(tmp_path)
    found = [path.relative_to(results).as_posix() for path in run_directories(results)]
    assert found == ["b/train/x", "a/z", "c"]
    (disk / "moved" / "w" / "work").mkdir(parents=True)
    found = [path.relative_to(results).as_posix() for path in run_directories(results)]
    assert found == ["b/train/x", "a/z", "c", "b/a/w"]
    assert list(run_directories(results / "c")) == [results / "c"]


def test_another_identity_works_elsewhere_and_its_manifest_is_not_taken_for_ours(run: RunDirectory) -> None:
    other = RunDirectory(run.path, Identity("train", "x", {"seed": 1}, "c0de", {}))
    other.prepare()
    assert run.work != other.work
    assert run.work.parent == other.work.parent == run.path / "work"
    other.publish([], {})
    (other.work / "commit.json").rename(run.work / "commit.json")
    assert run.find_done() is None


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


FINGERPRINT = "ab" * 32


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    (run_dir / "work").mkdir(parents=True)
    for name in ("b", "a"):
        (run_dir / "work" / name).write_text(f"content of {name}")
    return run_dir


@pytest.fixture
def manifest(run_dir: Path) -> Manifest:
    files = tuple(FileRecord.of(run_dir / "work" / name, run_dir) for name in ("b", "a"))
    return Manifest("train", "x/free", FINGERPRINT, {"z": 1, "a": [1.5, None]}, "c", {}, files, {"loss": 0.25})


def test_reading_gives_what_was_written_with_the_files_in_the_order_of_their_paths(
    manifest: Manifest, run_dir: Path
) -> None:
    manifest.write(run_dir / "manifest.json")
    read = Manifest.read(run_dir / "manifest.json")
    assert [record.path for record in read.files] == ["work/a", "work/b"]
    assert read == replace(manifest, files=manifest.files[::-1])


def test_equal_manifests_give_equal_bytes_whatever_the_order(manifest: Manifest) -> None:
    config = dict(reversed(list(manifest.config.items())))
    other = replace(manifest, config=config, files=manifest.files[::-1])
    assert other.to_bytes() == manifest.to_bytes()
    assert manifest.to_bytes().endswith(b"}\n")


def test_numbers_that_are_not_finite_become_null() -> None:
    summary = {"loss": math.nan, "list": [math.inf, 1], "deep": {"x": -math.inf}}
    written = json.loads(Manifest("s", "n", FINGERPRINT, {}, "c", {}, (), summary).to_bytes())
    assert written["summary"] == {"loss": None, "list": [None, 1], "deep": {"x": None}}


def test_a_summary_that_is_not_json_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="object"):
        Manifest("s", "n", FINGERPRINT, {}, "c", {}, (), {"model": object()}).to_bytes()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is no manifest: Expecting value"),
        (b'{"format": 1, "sta', "is no manifest: Unterminated string"),
        (b"\xff\xfe", "is no manifest: "),
        (b"[]", "expected format 1, found 'list'"),
        (b'{"format": 2}', "expected format 1, found 2"),
        (b'{"format": 1, "stage": 3}', "stage: expected a string, found 3"),
    ],
)
def test_a_damaged_manifest_is_absent_for_find_and_a_one_line_error_for_read(
    tmp_path: Path, content: bytes, found: str
) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    assert Manifest.find(path) is None
    with refused(f"^{path}: .*{found}.*type `rm -f {path}` and run the workflow again", ManifestError):
        Manifest.read(path)


def test_a_missing_manifest_names_the_path_and_nothing_to_remove(tmp_path: Path) -> None:
    assert Manifest.find(tmp_path / "manifest.json") is None
    with refused(r"manifest\.json: no manifest there; give the directory((?!rm -f).)*\Z", ManifestError):
        Manifest.read(tmp_path / "manifest.json")


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/a"])
def test_a_path_that_leads_out_of_the_run_directory_is_refused(tmp_path: Path, path: str) -> None:
    Manifest.of(Identity("s", "n", {}, "", {}), (FileRecord(path, 1, "0"),), {}).write(tmp_path / "manifest.json")
    with pytest.raises(ManifestError, match="leads out of the run directory"):
        Manifest.read(tmp_path / "manifest.json")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, r"work/a: expected 12 bytes, found no file; type `rm -f"),
        ("short", "work/a: expected 12 bytes, found 5"),
        ("content of A", r"work/a: expected sha256 [0-9a-f]{16}, found [0-9a-f]{16}"),  # found by its digest alone
    ],
)
def test_a_file_that_is_missing_or_not_as_recorded_is_named(
    manifest: Manifest, run_dir: Path, content: str | None, error: str
) -> None:
    manifest.verify(run_dir)
    path = run_dir / "work" / "a"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ManifestError, match=error) as caught:
        manifest.verify(run_dir)
    assert caught.value.path == path


def test_only_the_files_that_are_read_are_checked(manifest: Manifest, run_dir: Path) -> None:
    (run_dir / "work" / "b").unlink()
    manifest.verify(run_dir, reads=lambda path: path.name == "a")
    with pytest.raises(ManifestError, match="found no file"):
        manifest.verify(run_dir, reads=lambda path: path.name in ("a", "b"))


PARTS: dict[str, Any] = {"stage": "data", "config": {"length": 16, "p": 0.2}, "code": "c0de", "upstream": {}}
VALUES = {**PARTS, "name": "a5-train", "fingerprint": compute_fingerprint(**PARTS)}


def read_identity(text: str) -> Identity:
    return Identity.read(text)[0]


def test_text_and_file_give_the_same_identity(tmp_path: Path) -> None:
    text = json.dumps(VALUES)
    (tmp_path / "identity.json").write_text(text)
    assert read_identity(text) == read_identity(f"@{tmp_path / 'identity.json'}")
    assert read_identity(text).config == {"length": 16, "p": 0.2}


def test_the_fingerprint_depends_on_every_part_and_on_nothing_else() -> None:
    changed = [{"stage": "train"}, {"config": {"length": 17, "p": 0.2}}, {"code": "x"}, {"upstream": {"data": "f"}}]
    assert len({compute_fingerprint(**{**PARTS, **change}) for change in [{}, *changed]}) == 5
    assert read_identity(json.dumps({**VALUES, "name": "other"})).fingerprint == VALUES["fingerprint"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"length": 17, "p": 0.2}}, r"fingerprint [0-9a-f]{16} does not belong to the rest"),
        ({"code": None}, "code: expected a string, found null"),
        ({"config": []}, "config: expected a mapping, found a list"),
        ({"name": "../../etc"}, "lead out of the folder"),
        ({"upstream": {"data": 3}}, "upstream.data: expected a string, found 3"),
        ({"inputs": ["data"]}, "inputs are no object of folders by role"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_a_wrong_identity_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with refused(message):
        read_identity(json.dumps({**VALUES, **change}))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not JSON"), ("[1]", "mapping"), ("{", "not JSON"), ("{}", "missing"), ("@/nowhere/i.json", "cannot read")],
)
def test_what_is_no_identity_is_refused(text: str, message: str) -> None:
    with refused(message):
        read_identity(text)


def test_fingerprints_are_of_sorted_json_in_plain_letters() -> None:
    assert canonical_json({"b": "ä", "a": [1, 2.5, None]}) == '{"a":[1,2.5,null],"b":"ä"}'


def test_a_training_job_names_its_run_without_the_seed_and_its_phase_if_it_has_one() -> None:
    assert run_and_phase("s5-implicit-s3/free", {"seed": 3}) == ("s5-implicit", "free")
    assert run_and_phase("s5-implicit-s3", {"seed": 3}) == ("s5-implicit", None)


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["work/abc/metrics.json", "work/abc/model/config.json"], "work/abc/model"),
        (["work/abc/submodel/config.json"], None),
        (["work/abc/metrics.json"], None),
    ],
)
def test_the_model_of_a_job_is_its_folder_of_that_name(paths: list[str], found: str | None) -> None:
    files = [FileRecord(path, 1, "0" * 64) for path in paths]
    assert Manifest.of(Identity("train", "x/free", {}, "c0de", {}), files, {}).model_folder == found
