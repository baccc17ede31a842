"""The folder of each job: the driver (Snakemake) and the job communicate through its files only.

The driver writes its record before it submits and before it waits. From the record the next driver sees which jobs are
pending, running or finished, and does not submit them again. All of it can be deleted when no job runs.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_FOLDER = Path(".snakemake/submitit")  # in the working directory of Snakemake
STATUS_VARIABLE = "SUBMITIT_JOB_STATUS"  # in the environment of a job: the path of its status file
KEY_DIGITS = 16
DAY_S = 86400

# What became of the last submission, as far as a driver knows.
SUBMITTING = "submitting"  # sbatch may have been called or not
SUBMITTED = "submitted"
REPORTED = "reported"  # Snakemake knows how it ended
CANCELLED = "cancelled"


class JobFiles:
    """The files of one job, in `<folder>/jobs/<rule>-<hash of the outputs>`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "record.json"  # by the driver: the last submission
        self.attempts = path / "attempts.jsonl"  # by the job, like all that follow: start and end of every attempt
        self.history = path / "history.jsonl"  # the attempts of earlier jobs for these outputs
        self.status = path / "status.json"  # what the rule's command says about itself
        self.output_log = path / "output.log"  # what all attempts printed
        self.running = path / "running"  # locked while the job runs
        self.kept_logs = path / "kept-logs"  # lines of the rule's logs from earlier attempts

    def outcome(self, number: int) -> Path:
        """How submission `number` ended, written once."""
        return self.path / f"outcome-{number}.json"

    def submission(self, number: int) -> Path:
        """Submitit's own folder of a submission."""
        return self.path / str(number)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the only driver that may decide about this job."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def hold_running(self) -> Iterator[None]:
        """Mark the job as running; the kernel releases the lock however the process ends."""
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
        """When the job last started, ended, printed or made progress; seconds since the epoch, 0 for never."""
        times = [0.0]
        for path in (self.output_log, self.attempts, self.status):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def reset(self) -> None:
        """Forget earlier attempts, since the next job does not continue them; only the efficiency report keeps them."""
        if self.attempts.exists():
            with open(self.history, "ab") as history:
                history.write(self.attempts.read_bytes())
        for path in (self.attempts, self.status, self.output_log, *self.path.glob("outcome-*.json")):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.kept_logs, ignore_errors=True)


@dataclass(frozen=True)
class Record:
    """The last submission of a job.

    `key`: hash of the job's content; `name`: in Slurm, unique; `job_id`: in Slurm, or the pid of submitit's local
    controller; `folder`: submitit's; `task`: index within a job array; `started`: start of the controller, in clock
    ticks since boot; `excluded`: nodes to avoid; `memory`: factor; `retries`: by failure class.
    """

    key: str
    name: str
    number: int
    cluster: str
    folder: str
    state: str = SUBMITTING
    job_id: str = ""
    task: int | None = None
    host: str = field(default_factory=socket.gethostname)
    started: int | None = None
    submitted_unix_s: float = field(default_factory=time.time)
    excluded: list[str] = field(default_factory=list)
    memory: float = 1.0
    retries: dict[str, int] = field(default_factory=dict)
    gpus: list[int] = field(default_factory=list)
    rule: str = ""
    wildcards: str = ""
    requested: dict[str, Any] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether Snakemake does not know yet how the submission ended."""
        return self.state in (SUBMITTING, SUBMITTED)


def save(files: JobFiles, record: Record) -> None:
    write_json(files.record, asdict(record))


def load(files: JobFiles) -> Record | None:
    """The record, or None if there is none or another version of this plugin wrote it."""
    try:
        return Record(**read_json(files.record))
    except TypeError:  # a key is missing or unknown
        return None


def load_all(folder: Path) -> list[tuple[JobFiles, Record | None]]:
    """The jobs ever submitted from `folder`, sorted by name."""
    every = [JobFiles(path) for path in sorted((folder / "jobs").glob("*/"))]
    return [(files, load(files)) for files in every]


def job_files(folder: Path, rule: str, outputs: Sequence[str]) -> JobFiles:
    """The folder of the job that makes `outputs`."""
    return JobFiles(folder / "jobs" / f"{_plain(rule)}-{digest(outputs)[:KEY_DIGITS]}")


def slurm_name(prefix: str, rule: str, wildcards: str = "") -> str:
    """A name in Slurm that no other submission has, from this folder or another; jobs are searched for by it."""
    words = [prefix, _plain(rule)[:40], _plain(wildcards)[:60], os.urandom(4).hex()]
    return "-".join(filter(None, words))


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_as_json)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value) if isinstance(value, os.PathLike) else type(value).__name__  # repr may contain an address


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)


def private_folder(path: Path) -> Path:
    """Create `path` as a folder that only its owner may enter, since jobs execute the pickles in it.

    Raises: PermissionError if it belongs to another user.
    """
    path = Path(path).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user; set --submitit-folder to a folder of your own")
    path.chmod(0o700)
    return path


def clean(folder: Path, is_success_deleted: bool, days: int) -> None:
    """Delete jobs older than `days` (0: none), and the logs of successful jobs if wanted.

    A job that may still run keeps everything. A successful job loses its output and submitit's files, and keeps its
    record and its figures.
    """
    oldest = time.time() - days * DAY_S if days else 0.0
    found: list[Path] = []
    used: set[Path] = set()
    for files, record in load_all(folder):
        if record is not None and record.is_open:
            used.add(Path(record.folder))
        elif max(files.last_change(), record.submitted_unix_s if record else files.path.stat().st_mtime) < oldest:
            found.append(files.path)
        elif is_success_deleted and record and read_json(files.outcome(record.number)).get("failure_class", "") is None:
            found += [files.submission(number) for number in range(1, record.number + 1)]
            found += [files.output_log, files.kept_logs, files.status]
        elif record is not None:
            used.add(Path(record.folder))
    # the records of an array are written some seconds after its folder
    arrays = (path for path in (folder / "arrays").glob("*/") if time.time() - path.stat().st_mtime > 60)
    for path in {*found, *arrays} - used:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write atomically and durably: a submission must be on record even if this machine crashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(tmp, "xb") as file:
            file.write(content)
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


def tail(path: Path, limit_bytes: int = 65536, since: int = 0) -> str:
    """The end of a text file, from byte `since` on, or "" if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(since, path.stat().st_size - limit_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


@contextmanager
def logs_of_all_attempts(logs: Sequence[str], folder: Path) -> Iterator[None]:
    """Keep the lines of a rule's logs, which Snakemake deletes when an attempt starts, in `folder` meanwhile, and put
    them in front of the new lines."""
    kept = {folder / digest(log)[:KEY_DIGITS]: Path(log) for log in logs}
    for copy, log in kept.items():
        if log.exists():
            write_bytes(copy, _both(copy, log))
    yield
    for copy, log in kept.items():
        if copy.exists():
            write_bytes(log, _both(copy, log))
            copy.unlink()


def _both(copy: Path, log: Path) -> bytes:
    before, lines = (path.read_bytes() if path.exists() else b"" for path in (copy, log))
    return lines if lines.startswith(before) else before + lines  # a crash at the end leaves them in both places
