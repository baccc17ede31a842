"""The public interface of this package: how submitted jobs are doing, for other programs.

Everything else may change; this module keeps its names. It never waits for the executor and only reads.
"""

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from snakemake_executor_plugin_submitit import processes, store
from snakemake_executor_plugin_submitit.slurm import PENDING, UNKNOWN, NoAnswer, SlurmQueue, SlurmState
from snakemake_executor_plugin_submitit.store import CLASSES, DEFAULT_FOLDER, End, JobFiles, Record

__all__ = ["ADVICE", "DEFAULT_FOLDER", "Submitted", "job_key", "read_jobs"]

State = Literal["queued", "running", "ended"]
ADVICE: Mapping[str, str] = {name: known.advice for name, known in CLASSES.items()}
"""What a user can do about a failure, by its class."""

_SILENT = logging.getLogger(f"{__name__}.silent")  # the answer shows if a question failed
_SILENT.disabled = True


@dataclass(frozen=True)
class Submitted:
    """The last submission of a job. `state`: None if it is unknown; `slurm_state`: as Slurm names it; `reason`: why the
    job waits; `failure_class`, `message`: how it ended."""

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


def job_key(outputs: Iterable[str | os.PathLike[str]]) -> str:
    """The key of the job that makes `outputs`: the absolute paths of all outputs that its rule declares."""
    return store.digest(sorted(os.path.normpath(output) for output in outputs))[: store.KEY_DIGITS]


def read_jobs(folder: Path = DEFAULT_FOLDER, keys: Collection[str] | None = None) -> dict[str, Submitted]:
    """The jobs ever submitted from `folder`, by `job_key`; only those of `keys` if given.

    Asks Slurm once, and only if something may still run.
    """
    found: dict[str, tuple[JobFiles, Record, End | None]] = {}
    ids = []
    for path in (folder / "jobs").glob("*/"):
        key, files = path.name.rpartition("-")[2], JobFiles(path)
        known = store.load(files) if keys is None or key in keys else None
        if known is None:
            continue
        end = files.end(known.number)
        found[key] = (files, known, end)
        if known.cluster == "slurm" and known.is_open and known.job_id and (end is None or end.is_provisional):
            ids.append(known.job_id)
    states: Mapping[str, SlurmState] | None = {}
    try:
        states = SlurmQueue(interval_s=0, log=_SILENT).ask(ids) if ids else {}
    except NoAnswer:
        states = None
    return {key: _submitted(*job, states) for key, job in found.items()}


def _submitted(files: JobFiles, known: Record, end: End | None, states: Mapping[str, SlurmState] | None) -> Submitted:
    """`states`: None if Slurm gives no answer."""
    current = (states or {}).get(known.job_id, UNKNOWN)
    if current.state == "CANCELLED":  # the driver sees the same some seconds later
        end = End("user", "cancelled", nodes=current.nodes)
    return Submitted(
        job_id=known.job_id,
        cluster=known.cluster,
        state=_state(files, known, end is not None, current, is_answered=states is not None),
        slurm_state=current.state,
        reason=current.reason,
        nodes=current.nodes or (end.nodes if end else ""),
        submitted_unix_s=known.submitted_unix_s,
        failure_class=end.failure_class if end else None,
        message=" ".join((end.message if end else "").split()),
        output_log=files.output_log,
    )


def _state(files: JobFiles, known: Record, has_ended: bool, current: SlurmState, *, is_answered: bool) -> State | None:
    if current.state in PENDING:
        return "queued"
    if current.state:
        return "running" if current.is_alive else "ended"
    if not known.is_open or has_ended:
        return "ended"
    is_visible = is_answered if known.cluster == "slurm" else known.host == os.uname().nodename
    if not known.job_id or not is_visible:
        return None
    is_alive = known.cluster != "slurm" and processes.is_local_job_alive(files, known)
    return "running" if is_alive else "ended"
