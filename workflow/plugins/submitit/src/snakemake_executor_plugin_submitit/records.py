"""Provide this package's public interface: the state of submitted jobs, for other programs.

The names in this module are stable; names in other modules may change. The functions only read files and query Slurm,
and never wait for the executor.
"""

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from snakemake_executor_plugin_submitit import processes, store
from snakemake_executor_plugin_submitit.slurm import NO_ANSWER, PENDING, SlurmQueue, SlurmState
from snakemake_executor_plugin_submitit.store import CLASSES, DEFAULT_FOLDER, End, JobFiles, Record

__all__ = ["ADVICE", "DEFAULT_FOLDER", "Submitted", "job_key", "read_jobs"]

State = Literal["queued", "running", "ended"]
ADVICE: Mapping[str, str] = {name: known.advice for name, known in CLASSES.items()}
"""What a user can do about a failure, by its class."""

SILENT = logging.Logger("silent", logging.CRITICAL)  # a failed query needs no message: it returns NO_ANSWER


@dataclass(frozen=True)
class Submitted:
    """The last submission of a job.

    job_id: "" until it is known. state: None if unknown. slurm_state: Slurm's name for the state; "UNKNOWN" if Slurm
    does not know the job, "" if it was not asked or did not answer. reason: why the job waits. failure_class: None for
    success, before the end, and if unknown. message: how the job ended.
    """

    job_id: str
    cluster: str
    state: State | None
    slurm_state: str
    reason: str
    nodes: str
    submitted_unix_s: float
    failure_class: str | None
    message: str
    output_log: Path

    @property
    def has_failed(self) -> bool:
        """Whether the job ended with an error. A cancelled or preempted job has not failed."""
        return self.failure_class not in (None, "preempted", "cancelled")


def job_key(outputs: Iterable[str | os.PathLike[str]]) -> str:
    """Return the key of a job: a hash of `outputs`, which must be the absolute paths of all outputs of the job."""
    return store.digest(sorted(os.path.normpath(output) for output in outputs))[: store.KEY_DIGITS]


def read_jobs(folder: Path = DEFAULT_FOLDER, keys: Collection[str] | None = None) -> dict[str, Submitted]:
    """Return the last submission of each job in `folder` that has a readable record, by its `job_key`.

    keys: the keys of the jobs to include; None includes all. Slurm is queried once, and only if a job may still run.
    """
    found = {}
    for files, known in store.load_all(folder, keys):
        if known:
            found[files.key] = (files, known, files.end(known.number))
    ids = [
        known.job_id
        for _, known, end in found.values()
        if known.is_on_slurm and known.is_open and known.job_id and (end is None or end.is_provisional)
    ]
    states = SlurmQueue(0, SILENT).ask(ids) if ids else {}
    return {key: _submitted(*job, states.get(job[1].job_id, NO_ANSWER)) for key, job in found.items()}


def _submitted(files: JobFiles, known: Record, end: End | None, current: SlurmState) -> Submitted:
    if current.state == "CANCELLED":  # the driver sees and records this some seconds later
        end = End("cancelled", "cancelled", nodes=current.nodes)
    state: State | None = "ended"
    if current.state in PENDING:
        state = "queued"
    elif current.is_alive:
        state = "running"
    elif known.is_open and end is None and current == NO_ANSWER:
        if known.is_on_slurm or not known.job_id or known.host != os.uname().nodename:
            state = None
        elif processes.is_local_job_alive(files, known):
            state = "running"
    return Submitted(
        job_id=known.job_id,
        cluster=known.cluster,
        state=state,
        slurm_state=current.state,
        reason=current.reason,
        nodes=current.nodes or (end.nodes if end else ""),
        submitted_unix_s=known.submitted_unix_s,
        failure_class=end.failure_class if end else None,
        message=" ".join(end.message.split()) if end else "",
        output_log=files.output_log,
    )
