"""The driver's record of what it submitted, written before it submits and before it waits.

It is what keeps the next driver from submitting again what is pending, running or finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_submitit.job_files import JobFiles, read_json, write_json

# What has become of the last submission, as far as a driver knows.
SUBMITTING = "submitting"  # sbatch may have been called or not
SUBMITTED = "submitted"
REPORTED = "reported"  # Snakemake has been told how it ended; nothing to be taken over
CANCELLED = "cancelled"
KEY_DIGITS = 16
DEFAULT_FOLDER = Path(".snakemake/submitit")  # in the working directory of Snakemake


@dataclass(frozen=True)
class Record:
    """`key`: of the job's content; `name`: in Slurm, unique; `job_id`: of Slurm, or the pid of submitit's controller;
    `folder`: submitit's; `task`: the index within a job array; `started`: the controller's start, in ticks since boot;
    `excluded`: nodes to stay away from; `memory`: factor; `retries`: by failure class; `rule` and what follows: of the
    job, for those who look at it.
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
    excluded: tuple[str, ...] = ()
    memory: float = 1.0
    retries: dict[str, int] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    rule: str = ""
    wildcards: str = ""
    requested: dict[str, Any] = field(default_factory=dict)
    logs: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether Snakemake has not been told yet how the submission ended."""
        return self.state in (SUBMITTING, SUBMITTED)

    def changed(self, **values: Any) -> Record:
        return replace(self, **values)


def save(files: JobFiles, record: Record) -> None:
    write_json(files.record, asdict(record))


def load(files: JobFiles) -> Record | None:
    """The record, or None if there is none or another version of this plugin wrote it."""
    values = read_json(files.record)
    known = {f.name for f in fields(Record)}
    if not values or not {"key", "name", "number", "cluster", "folder"} <= values.keys() <= known:
        return None
    tuples = {name: tuple(values.get(name, ())) for name in ("excluded", "gpus", "logs")}
    return Record(**{**values, **tuples})


def job_files(folder: Path, rule: str, outputs: list[str]) -> JobFiles:
    """The folder of the job that makes `outputs`."""
    return JobFiles(folder / "jobs" / f"{_plain(rule)}-{digest(outputs)[:KEY_DIGITS]}")


def content_key(rule: str, outputs: list[str], params: Any) -> str:
    """Equal for jobs that make the same outputs with the same parameters, in whatever driver."""
    return digest([rule, outputs, params])


def slurm_name(prefix: str, rule: str, wildcards: str = "") -> str:
    """A name that no other submission has, of this or of another folder: by it a job is found again."""
    words = [prefix, _plain(rule)[:40], _plain(wildcards)[:60], os.urandom(4).hex()]
    return "-".join(filter(None, words))


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_as_json)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value) if isinstance(value, os.PathLike) else type(value).__name__  # an object may print its address


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)
