"""The journal of a run: JSON lines, appended while the stage works, the source of everything that MLflow shows.

    {"kind": "metrics", "step": 10, "time": "2025-01-01T00:00:00.000+00:00", "values": {"loss": 1.5}}
    {"kind": "event", "name": "stage_started", "time": ..., "host": ...}
    {"kind": "rewind", "step": 5, "time": ...}        points of steps above 5 that stand before this line do not count

A number that is not finite is written as null and read back as nan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Point:
    """Metrics of one step."""

    step: int
    time: str
    values: dict[str, float]


class Journal:
    """Appends to a journal; each line reaches the operating system before the call returns."""

    def __init__(self, path: Path) -> None:
        raise NotImplementedError

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of a step (after it; the first step is 1)."""
        raise NotImplementedError

    def event(self, name: str, **fields: object) -> None:
        """Append something that happened; `fields` must be JSON."""
        raise NotImplementedError

    def rewind(self, step: int) -> None:
        """Say that the state is again that after `step`: call it on resume, before the first new point."""
        raise NotImplementedError

    def flush_to_disk(self) -> None:
        """fsync; called with every committed checkpoint, so that a power loss takes no points before it."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def read(path: Path) -> list[Point]:
    """Points that count, in order of writing: later points than a rewind are dropped, a torn last line is ignored."""
    raise NotImplementedError


def read_events(path: Path) -> list[dict]:
    """All events, in order of writing."""
    raise NotImplementedError
