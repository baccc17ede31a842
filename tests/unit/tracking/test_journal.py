import errno
import math
import os
from pathlib import Path
from unittest import mock

import pytest

from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.journal import Journal, JournalError


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
    assert [event["step"] for event in journal.read_events(writer.path)] == [1]
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
