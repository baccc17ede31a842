"""Journals as the driver reads them, also while they are written."""

from pathlib import Path

from implicit_llm_contracts.runs import journal
from implicit_llm_workflow.results.job_states import TAIL_BYTES, Tail, read_tail


def written(path: Path, *, points: int = 0) -> journal.Journal:
    """A journal of the library itself, with a start and so many points."""
    open_journal = journal.Journal(path)
    open_journal.event("stage_started", host="here", pid=1)
    for step in range(1, points + 1):
        open_journal.metrics(step, {"loss": 1 / step, "learning_rate": 0.1})
    return open_journal


def test_points_are_those_that_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    open_journal = written(path, points=8)
    open_journal.rewind(5)
    open_journal.metrics(6, {"loss": 9.0})
    assert list(read_tail(path).points) == journal.read(path)
    assert [point.step for point in read_tail(path).points] == [1, 2, 3, 4, 5, 6]


def test_a_torn_and_a_damaged_line_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, points=2).close()
    with open(path, "ab") as file:
        file.write(
            b'\xff{"kind"\n[1]\n{"kind": "metrics", "step": 3}\n'
            b'{"kind": "metrics", "step": 3, "time": "?", "values": {}}\n'
            b'{"kind": "metrics", "step": 4, "ti'
        )
    tail = read_tail(path)
    assert [point.step for point in tail.points] == [1, 2]
    assert (tail.is_open, tail.last.step) == (True, 2)


def test_the_end_is_enough_of_a_long_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    open_journal = written(path, points=8000)
    assert path.stat().st_size > 2 * TAIL_BYTES
    assert read_tail(path).is_open
    open_journal.event("stage_failed", error="ValueError: no")
    tail = read_tail(path)
    assert (tail.is_open, tail.event["error"]) == (False, "ValueError: no")
    assert [point.step for point in tail.points][-1] == 8000
    assert len(tail.points) < 4000


def test_the_points_of_an_attempt_are_those_since_its_start(tmp_path: Path) -> None:
    path = tmp_path / "j"
    assert read_tail(path) == Tail()
    open_journal = written(path)
    open_journal.metrics(10, {"loss": 2.0})
    open_journal.event("stage_preempted")
    open_journal.event("stage_started")
    assert [point.step for point in read_tail(path).points] == [10]  # nothing else is known yet
    open_journal.metrics(20, {"loss": 1.0})
    assert [point.step for point in read_tail(path).points] == [20]
