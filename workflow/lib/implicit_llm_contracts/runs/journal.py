"""Write and read the journal of a run: JSON lines that the stage appends, from which MLflow gets all metrics.

    {"kind": "metrics", "step": 10, "time": "2025-01-01T00:00:00.000+00:00", "values": {"loss": 1.5}}
    {"kind": "event", "name": "stage_started", "time": ..., "host": ...}
    {"kind": "rewind", "step": 5, "time": ...}        earlier points of steps above 5 do not count any more

A number that is not finite is written as null and read back as nan. Complete lines are never changed or removed, so
the number of a line is a permanent position.
"""

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import StorageError, retried, storage_errors

log = logging.getLogger(__name__)


class JournalError(UserError):
    """A complete line of a journal is damaged."""


@dataclass(frozen=True)
class Point:
    """The metrics of one step."""

    step: int
    time: str
    values: dict[str, float]


class Journal:
    """The writer of a journal. Each line reaches the operating system before the call returns, unless the disk fails.

    Lines that could not be written wait in memory for the next call. A crash loses only lines after the last
    `flush_to_disk`, which are newer than the state from which the stage resumes.
    path: None writes nothing, for ranks above 0 of a distributed job. An incomplete last line of the file is deleted.
    Raises: StorageError if the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self._place = path, path or Path(os.devnull)
        self._descriptor: int | None = None
        self._waiting = b""
        if path is not None:
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                faults.point("journal.before_open")
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
                # Remove the incomplete last line of a killed process, which no reader has counted.
                whole, newline, torn = os.pread(self._descriptor, path.stat().st_size, 0).rpartition(b"\n")
                if torn:
                    os.ftruncate(self._descriptor, len(whole + newline))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics after `step` steps; values may be numbers of numpy or torch."""
        numbers = {key: float(value) for key, value in values.items()}
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        self._append({"kind": "metrics", "step": int(step), "time": now(), "values": finite})

    def event(self, name: str, **fields: object) -> None:
        """Append an event; `fields` must be JSON."""
        self._append({"kind": "event", "name": name, "time": now(), **fields})

    def rewind(self, step: int) -> None:
        """Record that the stage resumes from the state after `step` steps; call this before the first new point."""
        self._append({"kind": "rewind", "step": int(step), "time": now()})

    def flush_to_disk(self) -> None:
        """Write the waiting lines and flush them to disk. Raises: StorageError.

        A stage calls this before it commits a checkpoint, so the journal has all points before the checkpoint.
        """
        if self._descriptor is None:
            return
        self._write_waiting()
        with storage_errors(self._place):
            faults.point("journal.before_fsync")
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Try to write the waiting lines once more, ignore a StorageError, and close the file."""
        if self._descriptor is not None:
            with suppress(StorageError):
                self._write_waiting()
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, record: dict[str, Any]) -> None:
        if self._descriptor is None:
            return
        is_first = not self._waiting
        self._waiting += (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
        try:
            if is_first:
                retried(self._write_waiting, self._place)
            else:
                self._write_waiting()
        except StorageError as error:
            if is_first:
                log.warning("%s; until then the journal waits in memory", error)
            return
        faults.point("journal.after_append")

    def _write_waiting(self) -> None:
        """Append the waiting lines; after an error, the unwritten rest remains in memory. Raises: StorageError."""
        assert self._descriptor is not None
        with storage_errors(self._place, len(self._waiting)):
            while self._waiting:  # one iteration, except after a partial write
                faults.point("journal.before_append")
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]


class JournalTail:
    """A reader of a journal, which returns each complete line once. `lines`: the number of lines read so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        self._bytes_read = 0

    def new_records(self) -> list[dict[str, Any]]:
        """Return the records of the lines since the last call; empty if there is no file.

        Raises: JournalError for a damaged line.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self._bytes_read)
                raw = b"".join(file.read().rpartition(b"\n")[0:2])
        except FileNotFoundError:
            return []
        lines = enumerate(raw.split(b"\n")[:-1], self.lines + 1)
        records = [parse_line(line, f"{self.path}: line {number}") for number, line in lines]
        self._bytes_read += len(raw)
        self.lines += len(records)
        return records


def read(path: Path) -> list[Point]:
    """Return the points that count, in the order of writing; ignore an incomplete last line.

    Raises: JournalError for a damaged line.
    """
    return points_of(read_records(path))


def points_of(records: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Return the points of these records; a rewind to step n drops the earlier points of steps above n."""
    points: list[Point] = []
    for record in records:
        if record["kind"] == "metrics":
            points.append(point_of(record))
        elif record["kind"] == "rewind":
            points = [point for point in points if point.step <= record["step"]]
    return points


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of all complete lines; empty if there is no file.

    Raises: JournalError for a damaged line.
    """
    return JournalTail(path).new_records()


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Return the record of a complete line. Raises: JournalError."""
    try:
        record: dict[str, Any] = json.loads(line)
        if record["kind"] in ("metrics", "rewind"):
            record["step"] = int(record["step"])
        if record["kind"] == "metrics":
            datetime.fromisoformat(point_of(record).time)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(f"{where} is damaged ({error}); delete this line") from error
    return record


def point_of(record: Mapping[str, Any]) -> Point:
    """Return the point of a record of the kind `metrics`."""
    values = {key: math.nan if value is None else float(value) for key, value in record["values"].items()}
    return Point(record["step"], record["time"], values)


def now() -> str:
    """Return the present time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
