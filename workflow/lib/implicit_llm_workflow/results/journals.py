"""The end of a job's journal as the driver reads it while the job writes: damaged and torn lines are left out."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs import journal

JOURNAL = "journal.jsonl"
TAIL_BYTES = 1 << 18
STAGE_EVENTS = ("stage_started", "stage_finished", "stage_failed", "stage_stopped", "stage_preempted")


@dataclass(frozen=True)
class Tail:
    """The end of a journal. `event`: the last start or end of the stage; `points`: of the last attempt, that count.

    `unix_s`: when the last line was written, in seconds since 1970.
    """

    event: Mapping[str, Any] | None = None
    points: tuple[journal.Point, ...] = ()
    unix_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the stage has begun and not ended, as far as it could say so."""
        return self.event is not None and self.event["name"] == "stage_started"

    @property
    def last(self) -> journal.Point | None:
        return self.points[-1] if self.points else None


def read_tail(path: Path) -> Tail:
    """What the last lines of a journal say; without a file nothing."""
    try:
        with open(path, "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return Tail()
    records: list[dict[str, Any]] = []
    for line in lines[min(start, 1) : -1]:  # the first one is cut, unless it is the first of the file
        with suppress(journal.JournalError):
            records += journal.parse_lines([line], path)
    events = [record for record in records if record.get("name") in STAGE_EVENTS]
    if not events and records and start > 0:
        events = [{"name": "stage_started"}]  # farther back: after an end only another start is written
    since = next((i for i in reversed(range(len(records))) if records[i].get("name") == "stage_started"), 0)
    points = journal.points_of(records[since:]) or journal.points_of(records)[-1:]
    return Tail(events[-1] if events else None, tuple(points), unix_s(records[-1]["time"]) if records else None)


def unix_s(time: str) -> float:
    """A time of the journal in seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()
