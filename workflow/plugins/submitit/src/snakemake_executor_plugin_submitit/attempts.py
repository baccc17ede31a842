"""What is known of a job's attempts, and whether another one is worth while."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_submitit.job_files import append_line, read_lines

SIGNAL_EARLY_S = 60  # Slurm sends the signal of --signal up to a minute before the time that was asked for


@dataclass(frozen=True)
class Start:
    """`pid`: the process that the job runs in; `progress`: as the job had stated it before; `waited_s`: since it was
    submitted, or since its last attempt ended."""

    attempt: int
    submission: int
    job_id: str
    host: str
    nodes: str
    pid: int
    progress: Any = None
    unix_s: float = 0.0
    waited_s: float = 0.0
    event: str = "start"


@dataclass(frozen=True)
class End:
    """`exit_code`: of the job's command, None if it was killed; `asked`: the signal that asked it to stop, if any;
    `used`: see usage.py."""

    attempt: int
    exit_code: int | None
    asked: str | None
    seconds: float
    is_time_limit: bool
    progress: Any = None
    unix_s: float = 0.0
    used: dict[str, Any] = field(default_factory=dict)
    event: str = "end"


def add(path: Path, event: Start | End) -> None:
    append_line(path, asdict(event))


def starts(path: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(path) if line.get("event") == "start"]


def ends(path: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(path) if line.get("event") == "end"]


def pairs(*paths: Path) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Each start with its end, None where the attempt was killed or still runs; in the order of time."""
    found: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
    for line in (line for path in paths for line in read_lines(path)):
        if line.get("event") == "start":
            found.append((line, None))
        elif found and line.get("event") == "end":
            found[-1] = (found[-1][0], line)
    return found


def unfruitful(path: Path, progress: Any) -> int:
    """How many attempts in a row, up to the last, ran to their time limit without making progress.

    An attempt without an end was killed; `progress` is what the job states now. A job that states none is not counted.
    """
    if progress is None:
        return 0
    begun, ended = starts(path), {line["attempt"]: line for line in ends(path)}
    count, after = 0, progress
    for start in reversed(begun):
        end = ended.get(start["attempt"])
        if after != start["progress"] or (end is not None and not end["is_time_limit"]):
            break
        count, after = count + 1, start["progress"]
    return count


def is_time_limit(seconds: float, limit_s: float, delay_s: float) -> bool:
    """Whether a signal after `seconds` announces the time limit, not a preemption."""
    return seconds >= limit_s - delay_s - SIGNAL_EARLY_S
