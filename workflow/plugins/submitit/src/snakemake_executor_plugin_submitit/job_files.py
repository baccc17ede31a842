"""The folder of one job: what the driver (Snakemake) and the job itself know of each other is in its files.

    <folder>/jobs/<rule>-<hash of the outputs>/
        lock              held by a driver while it decides whether to submit, `running` by the job while it runs
        record.json       the driver's: what was submitted last (record.py)
        attempts.jsonl    the job's: start and end of every attempt; history.jsonl: of earlier jobs for these outputs
        status.json       what the job says of itself: the path is in its environment as SUBMITIT_JOB_STATUS
        outcome-N.json    how submission N ended, written once, by the job
        output.log        what the job printed, of all attempts
        N/                submitit's own folder of submission N

All of it can be deleted when no job runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATUS_VARIABLE = "SUBMITIT_JOB_STATUS"


@dataclass(frozen=True)
class JobFiles:
    path: Path

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def history(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def output_log(self) -> Path:
        return self.path / "output.log"

    @property
    def running(self) -> Path:
        return self.path / "running"

    @property
    def kept_logs(self) -> Path:
        return self.path / "kept-logs"

    def outcome(self, number: int) -> Path:
        return self.path / f"outcome-{number}.json"

    def submission(self, number: int) -> Path:
        return self.path / str(number)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only driver that decides on this job."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def hold_running(self) -> Iterator[None]:
        """Show that the job runs; the kernel lets go of the lock however the process ends."""
        with open(self.running, "a") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    def is_running_here(self) -> bool:
        """Whether a process of this machine runs the job."""
        try:
            with open(self.running) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def last_change(self) -> float:
        """When the job last printed something, began, ended or made progress; seconds since the epoch, 0 for never."""
        times = [0.0]
        for path in (self.output_log, self.attempts, self.status):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def start_afresh(self) -> None:
        """Forget earlier attempts: what follows is another job, not the continuation of one.

        Only how long they took and what they used is kept, for the report on efficiency.
        """
        if self.attempts.exists():
            with open(self.history, "ab") as history:
                history.write(self.attempts.read_bytes())
        for path in (self.attempts, self.status, self.output_log, *self.path.glob("outcome-*.json")):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.kept_logs, ignore_errors=True)


def private_folder(path: Path) -> Path:
    """Make `path` a folder that only its owner may enter: the pickles within are executed by the jobs.

    Raises: PermissionError when it belongs to somebody else.
    """
    path = Path(path).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user; set --submitit-folder to a folder of your own")
    path.chmod(0o700)
    return path


def write_json(path: Path, value: Any) -> None:
    """Write atomically, and durably: a submission must be known after a crash of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(tmp, "x", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file, or {} if there is none or it cannot be read: a job may write anything there."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def append_line(path: Path, value: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; a line that was cut off by a crash is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    values = []
    for line in lines:
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return values


def last_lines(path: Path, number: int = 20, limit_bytes: int = 65536) -> str:
    """The last lines of a text file, or "" if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-number:])


def put_logs_aside(logs: Sequence[str], folder: Path) -> None:
    """Keep the lines of a rule's logs in `folder`: Snakemake deletes the logs at the next attempt."""
    for log in logs:
        lines = _read_bytes(Path(log))
        if lines:
            kept = _read_bytes(_kept(log, folder))
            # a crash right after `put_logs_back` leaves the kept lines in both places
            _write_bytes(_kept(log, folder), lines if lines.startswith(kept) else kept + lines)


def put_logs_back(logs: Sequence[str], folder: Path) -> None:
    """Put the kept lines in front of those of the attempt that has ended."""
    for log in logs:
        kept = _read_bytes(_kept(log, folder))
        if kept:
            lines = _read_bytes(Path(log))
            if not lines.startswith(kept):
                Path(log).parent.mkdir(parents=True, exist_ok=True)
                _write_bytes(Path(log), kept + lines)
            _kept(log, folder).unlink(missing_ok=True)


def _kept(log: str, folder: Path) -> Path:
    return folder / hashlib.sha256(log.encode()).hexdigest()[:16]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _write_bytes(path: Path, lines: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_bytes(lines)
    os.replace(tmp, path)
