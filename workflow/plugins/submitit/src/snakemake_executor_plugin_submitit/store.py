"""Store each job's files in a folder, through which alone the driver (Snakemake) and the job communicate.

The driver writes a job's record before it submits the job, and again with the job's id. From the records, the next
driver sees which jobs are pending, running or finished, and does not submit them again. You can delete all files when
no driver is active and no job is pending or running.
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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_FOLDER = Path(".snakemake/submitit")  # in the working directory of Snakemake
STATUS_VARIABLE = "SUBMITIT_JOB_STATUS"  # in the environment of a job: the path of its status file
KEY_DIGITS = 16
DAY_S = 86400


class JobFiles:
    """The files of one job, in `<folder>/jobs/<rule>-<hash of the outputs>`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "record.json"  # the last submission; the driver writes this file
        self.attempts = path / "attempts.jsonl"  # start and end of every attempt; the job writes this and the following
        self.status = path / "status.json"  # the status that the rule's command reports
        self.output_log = path / "output.log"  # the output of all attempts
        self.running = path / "running"  # locked while the job runs

    @property
    def key(self) -> str:
        return self.path.name.rpartition("-")[2]

    def outcome(self, number: int) -> Path:
        """Return the path of the file with the `End` of submission `number`."""
        return self.path / f"outcome-{number}.json"

    def end(self, number: int) -> "End | None":
        """Return the `End` of submission `number`; None without one, or if another version of this plugin wrote it.

        An unknown failure class becomes "bug", and so does a success without the exit code 0.
        """
        try:
            end = End(**read_json(self.outcome(number)))
        except TypeError:  # a key is missing or unknown
            return None
        is_known = end.failure_class in CLASSES or (end.failure_class is None and end.exit_code == 0)
        return end if is_known else end._replace(failure_class="bug")

    def submission(self, number: int) -> Path:
        """Return submitit's own folder of a submission."""
        return self.path / str(number)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Wait for the job's lock and hold it; only the driver that holds it may decide about the job."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def hold_running(self) -> Iterator[None]:
        """Mark the job as running; the kernel releases the lock however the process ends."""
        with open(self.running, "a+") as file:  # NFS grants a shared lock only to a file that is open for reading
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    def is_running_here(self) -> bool:
        """Return whether a process of this machine runs the job."""
        try:
            with open(
                self.running, "r+"
            ) as file:  # NFS grants an exclusive lock only to a file that is open for writing
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def last_change(self) -> float:
        """Return when the job last started, ended, printed or reported, in seconds since 1970; 0 for never."""
        times = [0.0]
        for path in (self.output_log, self.attempts, self.status):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def progress(self) -> Any:
        """Return the progress that the job reported, or None."""
        return read_json(self.status).get("progress")

    def is_unfruitful(self) -> bool:
        """Return whether the last attempts ran to their time limit, or were killed, without progress.

        The result is False for a job that reports no progress, and for fewer than UNFRUITFUL_LIMIT attempts.
        """
        last, progress = read_attempts(self.attempts)[-UNFRUITFUL_LIMIT:], self.progress()
        is_stuck = [one["progress"] == progress and one.get("is_time_limit", True) for one in last]
        return progress is not None and len(last) == UNFRUITFUL_LIMIT and all(is_stuck)

    def reset(self) -> None:
        """Delete the files of earlier attempts, which do not count for the next submission."""
        for path in (self.attempts, self.status, self.output_log, *self.path.glob("outcome-*.json")):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Record:
    """The last submission of a job.

    key: a hash of the job's rule, outputs, parameters and command, equal for every driver; `JobFiles.key` differs.
    wildcards: their values, for names. name: the unique name in Slurm. is_open: whether Snakemake does not know yet how
    the job ended. job_id: the id in Slurm, or the pid of submitit's local controller; "" until it is known whether
    sbatch accepted the job. folder: submitit's folder. task: the index in a job array. started: when the controller
    started, in clock ticks since boot. excluded: nodes to avoid. memory: the factor of the memory request. retries: the
    number of retries by failure class.
    """

    key: str
    name: str
    number: int
    cluster: str
    folder: str
    is_open: bool = True
    job_id: str = ""
    task: int | None = None
    host: str = field(default_factory=socket.gethostname)
    started: int | None = None
    submitted_unix_s: float = field(default_factory=time.time)
    excluded: list[str] = field(default_factory=list)
    memory: float = 1.0
    retries: dict[str, int] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    rule: str = ""
    wildcards: str = ""
    requested: dict[str, int] = field(default_factory=dict)

    @property
    def is_on_slurm(self) -> bool:
        return self.cluster == "slurm"


def save(files: JobFiles, record: Record) -> None:
    write_json(files.record, asdict(record))


def load(files: JobFiles) -> Record | None:
    """Return the record, or None if there is none or another version of this plugin wrote it."""
    try:
        return Record(**read_json(files.record))
    except TypeError:  # a key is missing or unknown
        return None


def load_all(folder: Path, keys: Collection[str] | None = None) -> Iterator[tuple[JobFiles, Record | None]]:
    """Yield the files and the record of each job in `folder`, sorted by path; None for an unreadable record.

    keys: the values of `JobFiles.key` of the jobs to load; None loads all.
    """
    every = [JobFiles(path) for path in sorted((folder / "jobs").glob("*/"))]
    return ((files, load(files)) for files in every if keys is None or files.key in keys)


def job_files(folder: Path, rule: str, outputs: Sequence[str]) -> JobFiles:
    """Return the files of the job of `rule` with these `outputs`."""
    return JobFiles(folder / "jobs" / f"{_plain(rule)}-{digest(outputs)[:KEY_DIGITS]}")


def slurm_name(prefix: str, rule: str, wildcards: str = "") -> str:
    """Return a name in Slurm that is unique also across folders, so that a search by name finds this submission."""
    words = [prefix, _plain(rule)[:40], _plain(wildcards)[:60], os.urandom(4).hex()]
    return "-".join(filter(None, words))


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_as_json)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value) if isinstance(value, os.PathLike) else type(value).__name__  # a repr may contain an address


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)


def private_folder(path: Path) -> Path:
    """Create a folder, or restrict an existing one, so that only its owner can enter: jobs execute the pickles in it.

    Returns: the absolute path, with ~ expanded. Raises: PermissionError if the folder belongs to another user.
    """
    path = path.expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user; set --submitit-folder to a folder of your own")
    path.chmod(0o700)
    return path


def no_storage(path: Path, error: OSError) -> str:
    return f"--submitit-folder: {path}: {error.strerror or error}; free some space there, or name another folder"


def clean(folder: Path, days: int) -> None:
    """Delete jobs older than `days` (0: none) whose record is not open, and folders of arrays that no job uses."""
    oldest = time.time() - days * DAY_S if days else 0.0
    used: set[Path] = set()
    for files, record in load_all(folder):
        last_s = max(files.last_change(), record.submitted_unix_s if record else files.path.stat().st_mtime)
        if last_s < oldest and not (record and record.is_open):
            shutil.rmtree(files.path)
        elif record:
            used.add(Path(record.folder))
    for array in (folder / "arrays").glob("*/"):
        # Another driver may have submitted a new array after the records were read above.
        if array not in used and time.time() - array.stat().st_mtime > 60:
            shutil.rmtree(array)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically and durably, so that a submission is on record even if this machine crashes.

    The folder of the file is created. Raises: OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(tmp, "x", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=1, sort_keys=True) + "\n")
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
    """Return the JSON object in the file, or {} if there is none; a job may write anything to the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def tail(path: Path, limit_bytes: int = 65536, since: int = 0) -> str:
    """Return the last `limit_bytes` of a text file, without those before byte `since`; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(since, path.stat().st_size - limit_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


PREEMPTED_EXIT = 75  # EX_TEMPFAIL: the job requests a restart
UNFRUITFUL_LIMIT = 2  # attempts in a row without progress, each of which reached its time limit or was killed


class FailureClass(NamedTuple):
    """A class of failures.

    retries: how often the executor submits the job again; None means up to the requeue limit. advice: text for the
    user. is_elsewhere: whether to retry on other nodes. memory: the factor of the next memory request.
    """

    retries: int | None
    advice: str
    is_elsewhere: bool = False
    memory: float = 1.0


CLASSES = {
    "preempted": FailureClass(None, "start the workflow again, or raise --submitit-requeue-limit"),
    "cancelled": FailureClass(0, "start the workflow again"),
    "timeout": FailureClass(0, "raise the resource 'runtime', or write checkpoints more often"),
    "oom": FailureClass(
        1, "raise the resource 'mem_mb' (it includes Snakemake itself, about 200 MB) or use smaller batches", memory=1.5
    ),
    "node_fail": FailureClass(1, "report the node to the administrators of the cluster", is_elsewhere=True),
    "lost": FailureClass(1, "look for the job with `sacct`, then start the workflow again", is_elsewhere=True),
    "hang": FailureClass(0, "look at the stacks in the log"),
    "non_finite": FailureClass(0, "look at the log; the last good checkpoint is kept"),
    "env": FailureClass(0, "fix the environment of the node"),
    "quota": FailureClass(0, "free some space"),
    "user": FailureClass(0, "see the message"),
    "bug": FailureClass(0, "see the log"),
}

SLURM_CLASSES = {
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
}


class End(NamedTuple):
    """The end of a submission.

    failure_class: None for success. exit_code: that of the job's command, or None if unknown. nodes: in Slurm's
    notation. asked: the signal that asked the job to stop.
    """

    failure_class: str | None
    message: str = ""
    exit_code: int | None = None
    nodes: str = ""
    asked: str | None = None

    @property
    def is_provisional(self) -> bool:
        """Whether Slurm's state decides instead: after SIGTERM, Slurm may requeue the job, or a user cancelled it."""
        return self.asked == "SIGTERM" and self.failure_class in ("preempted", "timeout")


def add_attempt(path: Path, event: str, **facts: Any) -> dict[str, Any]:
    """Append a "start" or an "end" to a job's attempts, and return it.

    Both have `unix_s`, and `progress` as the job reported it.
    A start has `submission`, `job_id`, `host`, `nodes` and `pid`, that of the job's first process.
    An end has `exit_code`, that of the job's command; `asked`, the signal that asked it to stop, or None; `seconds`;
    and `is_time_limit`.
    """
    written = {"event": event, "unix_s": round(time.time(), 1), **facts}
    with open(path, "a+b") as file:
        file.seek(max(0, file.tell() - 1))
        if file.read() not in (b"", b"\n"):
            file.write(b"\n")  # a crash has truncated the last line
        file.write(json.dumps(written, sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return written


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """Return the attempts in the file: the facts of each start, and the facts that only its end has.

    An attempt without an end was killed or still runs. Lines that a crash truncated are skipped.
    """
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] == "start":
            found.append(event)
        elif found:
            found[-1] = event | found[-1]
    return found
