"""The journals of jobs as the driver reads them, while a job writes: damaged and torn lines are left out."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs import journal

JOURNAL = "journal.jsonl"
TAIL_BYTES = 1 << 16
STAGE_EVENTS = ("stage_started", "stage_finished", "stage_failed", "stage_stopped", "stage_preempted")


@dataclass(frozen=True)
class Point:
    """Metrics after `step` steps, at a time in seconds since 1970; what is not finite is left out."""

    step: int
    unix_s: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Tail:
    """The end of a journal. `event`: the last start or end of the stage; `points`: of the last attempt, that count.

    `unix_s`: when the last line was written.
    """

    event: Mapping[str, Any] | None = None
    points: tuple[Point, ...] = ()
    unix_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the stage has begun and not ended, as far as it could say so."""
        return self.event is not None and self.event["name"] == "stage_started"

    @property
    def last(self) -> Point | None:
        return self.points[-1] if self.points else None


def read_tail(path: Path) -> Tail:
    """The last lines of a journal, as many as it takes to know a point; without a file nothing."""
    limit = TAIL_BYTES
    while True:
        records, is_whole = _read_end(path, limit)
        tail = _tail_of(records, is_whole=is_whole)
        if is_whole or tail.points:
            return tail
        limit *= 8


def read_points(path: Path) -> list[Point]:
    """All points that count, in order of writing: those before a rewind to an earlier step do not."""
    return _points(_read_end(path, None)[0])


def _read_end(path: Path, limit: int | None) -> tuple[list[dict[str, Any]], bool]:
    """The records of the last bytes of the file, damaged lines left out, and whether they are all of it."""
    try:
        with open(path, "rb") as file:
            start = 0 if limit is None else max(0, os.fstat(file.fileno()).st_size - limit)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return [], True
    records: list[dict[str, Any]] = []
    for line in lines[min(start, 1) : -1]:  # the first one is cut, unless it is the first of the file
        with suppress(journal.JournalError):
            records += journal.parse_lines([line], path)
    return records, start == 0


def _tail_of(records: list[dict[str, Any]], *, is_whole: bool) -> Tail:
    times = [_unix_s(record) for record in records]
    found = [i for i, record in enumerate(records) if record.get("name") in STAGE_EVENTS]
    event: Mapping[str, Any] | None = records[found[-1]] if found else None
    if event is None and records and not is_whole:
        event = {"name": "stage_started"}  # farther back: after an end only another start is written
    points = _points(records)
    since = next((times[i] for i in reversed(found) if records[i]["name"] == "stage_started"), None)
    recent = [point for point in points if since is None or point.unix_s >= since]
    return Tail(event, tuple(recent or points[-1:]), next((time for time in reversed(times) if time is not None), None))


def _points(records: Iterable[Mapping[str, Any]]) -> list[Point]:
    return [
        Point(
            point.step,
            datetime.fromisoformat(point.time).timestamp(),
            {key: value for key, value in point.values.items() if math.isfinite(value)},
        )
        for point in journal.points_of(records)
    ]


def _unix_s(record: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(record["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None
