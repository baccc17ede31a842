"""Writes that are whole or not there, the journal, and a file system that shows new files late, as NFS does."""

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from implicit_llm_contracts.runs import atomic, journal
from implicit_llm_contracts.runs.atomic import (
    WAIT,
    StorageError,
    commit_directory,
    default_wait_s,
    new_directory,
    new_file,
    wait_for_files,
    write_atomic,
)
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.journal import Journal, JournalError
from implicit_llm_contracts.runs.manifest import ManifestError
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs.stage import StageRequest, run_stage
from tests.limits import file_size_limit
from tests.refusals import refused


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that would have been waited."""
    waited: list[float] = []
    monkeypatch.setattr(atomic, "time", SimpleNamespace(sleep=waited.append))
    return waited


def test_the_bytes_are_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_atomic(tmp_path / "new" / "a.json", "ä\n")
    assert (tmp_path / "new" / "a.json").read_bytes() == "ä\n".encode()
    assert names(tmp_path / "new") == ["a.json"]


def test_data_and_directory_are_synced_in_this_order_around_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    rename = os.rename

    def record_fsync(descriptor: int) -> None:
        calls.append("fsync directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "fsync file")

    def record_rename(source: Path, target: Path) -> None:
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    write_atomic(tmp_path / "a", b"x")
    assert calls == ["fsync file", "rename", "fsync directory"]


def test_a_write_that_fails_half_way_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"old")
    with file_size_limit(100), pytest.raises(StorageError, match="files may not be that large"):
        write_atomic(path, b"x" * 1000)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_no_space_is_a_user_error_with_the_bytes_needed_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    monkeypatch.setenv("IMPLICIT_LLM_FAULT", "atomic.before_fsync:enospc")
    with refused(r"cannot write .*/a \(12 bytes needed, \d+ bytes free\): the disk is full", StorageError) as caught:
        write_atomic(tmp_path / "a", b"x" * 12)
    assert (caught.value.errno, caught.value.exit_code) == (errno.ENOSPC, 2)
    assert names(tmp_path) == []
    assert pauses == []


def test_a_file_that_is_written_piece_by_piece_is_there_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    for content in (b"new", b"newer"):
        with new_file(tmp_path / "x" / "y" / "b") as file:
            file.write(content[:2])
            file.write(content[2:])
        assert (tmp_path / "x" / "y" / "b").read_bytes() == content
    with pytest.raises(TypeError), new_file(tmp_path / "x" / "y" / "c") as file:
        file.write("no bytes")  # type: ignore[arg-type]
    assert names(tmp_path / "x" / "y") == ["b"]


def test_an_existing_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for name, file in (("old", "only-in-old"), ("new", "only-in-new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    commit_directory(tmp_path / "new", tmp_path / "old")
    assert names(tmp_path) == ["old"]
    assert names(tmp_path / "old") == ["only-in-new"]


def test_other_users_may_read_the_files_of_a_directory_if_the_umask_allows_it(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_directory(tmp_path / "model") as directory:
            for path in (directory / "model.safetensors", directory / "below" / "state"):
                path.parent.mkdir(exist_ok=True)
                path.touch(mode=0o600)  # as safetensors does
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").rglob("*")}
    assert found == {"model.safetensors": 0o640, "below": 0o750, "state": 0o640}


def test_an_existing_directory_stays_if_the_new_one_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_directory(tmp_path / "model") as directory:
        (directory / "first").touch()
    monkeypatch.setenv("IMPLICIT_LLM_FAULT", "atomic.before_rename:eio@1")
    with refused("cannot write", StorageError), new_directory(tmp_path / "model") as directory:
        (directory / "second").touch()
    assert names(tmp_path) == ["model"]
    assert names(tmp_path / "model") == ["first"]


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path: Path) -> None:
    keep = [tmp_path / name for name in ("a.tmp", ".hidden", "step-30.tmp.json")]
    leftover_dir = tmp_path / "sub" / ".model.12345678.tmp"
    leftover_dir.mkdir(parents=True)
    for path in [*keep, leftover_dir / "weights", atomic.temporary_name(tmp_path / "a.json")]:
        path.touch()
    atomic.remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([*(path.name for path in keep), "sub"])
    assert names(tmp_path / "sub") == []


def test_a_file_whose_temporary_a_starting_job_deletes_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, sweeps = os.fsync, iter([atomic.remove_leftovers])

    def fsync_while_a_job_starts(descriptor: int) -> None:
        fsync(descriptor)
        next(sweeps, lambda path: None)(tmp_path)

    monkeypatch.setattr(os, "fsync", fsync_while_a_job_starts)
    write_atomic(tmp_path / "ready-1-1", b"17")
    assert (tmp_path / "ready-1-1").read_bytes() == b"17"
    assert names(tmp_path) == ["ready-1-1"]


@pytest.mark.parametrize("kind", ["eacces", "eio", "estale"])
def test_an_error_that_passes_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], kind: str
) -> None:
    monkeypatch.setenv("IMPLICIT_LLM_FAULT", f"atomic.before_fsync:{kind}@1,atomic.before_rename:{kind}@1")
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert names(tmp_path) == ["a"]
    assert pauses == [0.2, 0.2]


@pytest.mark.parametrize(
    ("kind", "message"), [("eacces", "permission"), ("eio", "reports an error"), ("estale", "know")]
)
def test_an_error_that_stays_ends_after_growing_pauses_with_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], kind: str, message: str
) -> None:
    write_atomic(tmp_path / "a", b"old")
    monkeypatch.setenv("IMPLICIT_LLM_FAULT", f"atomic.before_write:{kind}@1+")
    with pytest.raises(StorageError, match=message) as caught:
        write_atomic(tmp_path / "a", b"new")
    assert caught.value.failure_class == "quota"
    assert pauses == [0.2, 1.0, 5.0]
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_after_an_error_of_fsync_the_bytes_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    synced = []
    fsync = os.fsync

    def fail_once(descriptor: int) -> None:
        synced.append(os.stat(descriptor).st_ino)
        if len(synced) == 1:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    write_atomic(tmp_path / "a", b"new")
    assert synced[1] == (tmp_path / "a").stat().st_ino  # of another file than the first: that one is gone
    assert len(pauses) == 1


class LateFileSystem:
    """Hides a file until its directory has been listed sixty times, on a clock that only waiting moves."""

    def __init__(self, elsewhere: Path) -> None:
        self.elsewhere, self.hidden = elsewhere, elsewhere
        self.listings, self.now = 0, 0.0

    def hide(self, path: Path) -> None:
        path.rename(self.elsewhere)
        self.hidden = path

    def listdir(self, path: Path) -> list[str]:
        self.listings += 1
        if self.listings == 60:
            self.elsewhere.rename(self.hidden)
        return os.listdir(path)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LateFileSystem:
    late = LateFileSystem(tmp_path / "elsewhere")
    monkeypatch.setattr(atomic, "os", SimpleNamespace(**vars(os) | {"listdir": late.listdir}))
    monkeypatch.setattr(atomic, "time", SimpleNamespace(monotonic=lambda: late.now, sleep=late.sleep))
    return late


def test_a_file_that_comes_into_sight_late_is_waited_for(
    late: LateFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WAIT, "60")
    (tmp_path / "a").touch()
    late.hide(tmp_path / "a")
    wait_for_files([tmp_path / "a"])
    assert late.now == pytest.approx(30)  # 60 listings, half a second apart


def test_a_file_that_never_comes_is_waited_for_until_the_deadline(
    late: LateFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WAIT, "60")
    wait_for_files([tmp_path / "nowhere" / "a"])
    assert late.now == pytest.approx(60)


@pytest.mark.parametrize(
    ("env", "wait_s"), [({}, 0), ({"SLURM_JOB_ID": "1"}, 60), ({"SLURM_JOB_ID": "1", WAIT: "5"}, 5)]
)
def test_only_jobs_of_slurm_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], wait_s: float
) -> None:
    for name in ("SLURM_JOB_ID", WAIT):
        monkeypatch.delenv(name, raising=False)
    os.environ |= env
    assert default_wait_s() == wait_s


@pytest.mark.parametrize("value", ["x", "-1", "nan", "inf", "1 min"])
def test_a_wrong_time_to_wait_is_refused_before_a_file_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    monkeypatch.setenv(WAIT, value)
    with refused(f"{WAIT}: '{value}' is not allowed; give a number of seconds of at least 0, such as 60, or unset it"):
        wait_for_files([tmp_path])


def write_one(context: StageContext) -> StageResult:
    (context.work / "out.txt").write_text("out")
    return StageResult(["out.txt"], {})


@pytest.mark.parametrize("name", ["commit.json", "out.txt"])
def test_a_stage_reads_an_input_that_comes_into_sight_late(
    late: LateFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_identity: Callable[..., Identity],
    name: str,
) -> None:
    manifest = run_stage(StageRequest(tmp_path / "d", make_identity("data", "d")), write_one)
    next((tmp_path / "d").glob("work/*/manifest.json")).unlink()
    late.hide(next((tmp_path / "d").glob(f"work/*/{name}")))
    request = StageRequest(
        tmp_path / "x", make_identity("train", "x", {"data": manifest.fingerprint}), {"data": tmp_path / "d"}
    )
    with pytest.raises(ManifestError):
        run_stage(request, write_one)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert run_stage(request, write_one) is not None
    assert late.now == pytest.approx(30)


@pytest.fixture
def writer(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def steps(path: Path) -> list[int]:
    return [point.step for point in journal.read(path)]


def test_points_and_events_come_back_in_order(writer: Journal) -> None:
    writer.metrics(1, {"loss": 1.5})
    writer.event("checkpoint", step=1)
    writer.metrics(2, {"loss": math.nan, "rate": math.inf})
    points = journal.read(writer.path)
    assert [(point.step, list(point.values)) for point in points] == [(1, ["loss"]), (2, ["loss", "rate"])]
    assert points[0].values == {"loss": 1.5}
    assert all(math.isnan(value) for value in points[1].values.values())
    assert [record["step"] for record in journal.read_records(writer.path) if record["kind"] == "event"] == [1]
    assert '"values": {"loss": null, "rate": null}}' in writer.path.read_text(), "strict JSON"


def test_a_rewind_drops_the_later_points_before_it_and_keeps_those_after(writer: Journal) -> None:
    for step in (1, 2, 3, 4):
        writer.metrics(step, {"loss": step})
    writer.rewind(2)
    for step in (3, 4):
        writer.metrics(step, {"loss": step * 10})
    points = [(point.step, point.values["loss"]) for point in journal.read(writer.path)]
    assert points == [(1, 1), (2, 2), (3, 30), (4, 40)]


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("torn", [b'{"kind": "metrics", "step": 2, "va', b"x" * 200_000])
def test_a_torn_last_line_is_ignored_and_cut_off_by_the_next_writer(
    tmp_path: Path, num_before: int, torn: bytes
) -> None:
    path = tmp_path / "journal.jsonl"
    for step in range(num_before):
        Journal(path).metrics(step, {"loss": 1.0})
    with open(path, "ab") as file:
        file.write(torn)
    assert steps(path) == list(range(num_before))
    Journal(path).metrics(3, {"loss": 1.0})
    assert steps(path) == [*range(num_before), 3]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind": "event", "name": "a"}\nnonsense\n{"kind": "event", "name": "b"}\n')
    with pytest.raises(JournalError, match=r"journal\.jsonl: line 2 is damaged"):
        journal.read(path)


def fill_up_after(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk take so many bytes of the next write, and then none."""
    write, full = os.write, mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))

    def write_part_then_fail(descriptor: int, raw: bytes) -> int:
        monkeypatch.setattr(os, "write", full)
        return write(descriptor, raw[:num_bytes])

    monkeypatch.setattr(os, "write", write_part_then_fail if num_bytes else full)


@pytest.mark.parametrize("num_bytes", [0, 10])
def test_lines_that_a_full_disk_does_not_take_wait_and_come_whole(
    writer: Journal, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    writer.metrics(1, {"loss": 1.0})
    fill_up_after(num_bytes, monkeypatch)
    writer.metrics(2, {"loss": 1.0})
    writer.metrics(3, {"loss": 1.0})
    assert steps(writer.path) == [1]
    monkeypatch.undo()
    writer.metrics(4, {"loss": 1.0})
    assert steps(writer.path) == [1, 2, 3, 4]


def test_what_waits_cannot_be_flushed_and_leaves_no_half_line(writer: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.metrics(1, {"loss": 1.0})
    fill_up_after(10, monkeypatch)
    writer.metrics(2, {"loss": 1.0})
    with pytest.raises(StorageError, match=r"bytes needed, \d+ bytes free\): the disk is full"):
        writer.flush_to_disk()
    writer.close()
    monkeypatch.undo()
    Journal(writer.path).metrics(2, {"loss": 1.0})
    assert steps(writer.path) == [1, 2]


def test_a_journal_without_a_path_writes_nothing_and_a_missing_one_has_no_points(tmp_path: Path) -> None:
    writer = Journal(None)
    writer.metrics(1, {"loss": 1.0})
    writer.rewind(0)
    writer.flush_to_disk()
    writer.close()
    assert (list(tmp_path.iterdir()), steps(tmp_path / "none.jsonl")) == ([], [])
