"""What the executor plugin knows of the jobs of a plan: its records of what it submitted, and what Slurm says."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.freed import PAGES
from implicit_llm_workflow.planning.plan import RESULTS, Plan

if TYPE_CHECKING:
    from snakemake_executor_plugin_submitit.job_files import JobFiles
    from snakemake_executor_plugin_submitit.record import Record

_SILENT = logging.getLogger(f"{__name__}.slurm")  # what goes wrong with a question is said in the answer
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False

FOLDER = Path(".snakemake/submitit")  # the executor's default, in the working directory of Snakemake
DIGITS = 16
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")


@dataclass(frozen=True)
class Submitted:
    """The last submission of a job. `state`: None where nobody could say whether it still runs.

    `slurm_state` is Slurm's own word, `reason` why a job waits; `failure_class` and `message` say how it ended.
    """

    job_id: str
    cluster: str
    state: Literal["queued", "running", "ended"] | None
    slurm_state: str
    reason: str
    nodes: str
    submitted_unix_s: float
    failure_class: str | None
    message: str
    output_log: Path


def submitted_jobs(plan: Plan, nodes: Iterable[Node], folder: Path | None = None) -> dict[str, Submitted]:
    """By key, those of the nodes that were ever submitted. Slurm is asked once, and only if something may still run."""
    from snakemake_executor_plugin_submitit.job_files import JobFiles
    from snakemake_executor_plugin_submitit.record import load

    jobs = (folder or plan.root.parent.parent / FOLDER) / "jobs"
    try:
        names = os.listdir(jobs)
    except OSError:
        return {}
    folders = {name.rpartition("-")[2]: JobFiles(jobs / name) for name in names}
    found: dict[str, tuple[JobFiles, Record]] = {}
    for node in nodes:
        files = folders.get(_outputs_digest(plan, node))
        record = load(files) if files is not None else None
        if files is not None and record is not None:
            found[node.key] = (files, record)
    slurm = _ask_slurm(record for files, record in found.values() if not _is_final(files, record))
    return {key: _submitted(files, record, slurm) for key, (files, record) in found.items()}


def outputs_of(plan: Plan, node: Node) -> list[str]:
    """What the node's rule declares, below the working directory of Snakemake: by it the executor knows a job again."""
    run_dir = RESULTS / plan.experiment.name / node.key
    names = ["manifest.json"]
    if node.stage in PAGES:
        names += ["index.html", "claims.json"]
    if node.stage == "report":
        names += ["numbers.tex", "lineage.svg"]
        names += [f"tables/{table}.{form}" for table in plan.tables for form in ("csv", "tex")]
        names += [f"figures/{figure}.svg" for figure in plan.figures]
    return [(run_dir / name).as_posix() for name in names]


def _outputs_digest(plan: Plan, node: Node) -> str:
    """By which the executor calls the folder of the job that makes the node's outputs."""
    from snakemake_executor_plugin_submitit.record import digest

    home = plan.root.parent.parent.absolute()
    return digest(sorted(os.path.normpath(home / output) for output in outputs_of(plan, node)))[:DIGITS]


def _is_final(files: JobFiles, record: Record) -> bool:
    """Whether the job itself said how it ended, and Slurm cannot know better."""
    from snakemake_executor_plugin_submitit.job_files import read_json
    from snakemake_executor_plugin_submitit.monitor import is_provisional

    outcome = read_json(files.outcome(record.number))
    return bool(outcome) and not is_provisional(outcome)


def _ask_slurm(records: Iterable[Record]) -> Mapping[str, Any] | None:
    """States by job id; None where Slurm gives no answer."""
    from snakemake_executor_plugin_submitit.slurm_queue import NoAnswer, SlurmQueue

    ids = [record.job_id for record in records if record.cluster == "slurm" and _is_open(record) and record.job_id]
    if not ids:
        return {}
    try:
        return SlurmQueue(interval_s=0, log=_SILENT).ask(ids)
    except NoAnswer:
        return None


def _submitted(files: JobFiles, record: Record, slurm: Mapping[str, Any] | None) -> Submitted:
    from snakemake_executor_plugin_submitit.job_files import read_json

    outcome = read_json(files.outcome(record.number))
    known = (slurm or {}).get(record.job_id)
    if known is not None and known.state == "CANCELLED":  # the driver will see the same, some seconds later
        outcome = {**outcome, "failure_class": "user", "message": "cancelled"}
    return Submitted(
        job_id=record.job_id,
        cluster=record.cluster,
        state=_state(record, outcome, known, is_answered=slurm is not None),
        slurm_state=known.state if known is not None else "",
        reason=known.reason if known is not None else "",
        nodes=(known.nodes if known is not None else "") or str(outcome.get("nodes") or ""),
        submitted_unix_s=record.submitted_unix_s,
        failure_class=outcome.get("failure_class"),
        message=" ".join(str(outcome.get("message") or "").split()),
        output_log=files.output_log,
    )


def _state(
    record: Record, outcome: Mapping[str, Any], known: Any, *, is_answered: bool
) -> Literal["queued", "running", "ended"] | None:
    from snakemake_executor_plugin_submitit import processes

    if not _is_open(record) or (outcome and known is None):
        return "ended"
    if record.cluster != "slurm":
        if not record.job_id or record.host != os.uname().nodename:
            return None
        return "running" if processes.is_alive(int(record.job_id), record.started) else "ended"
    if known is None:
        return "ended" if is_answered and record.job_id else None
    return "queued" if known.state in _QUEUED else "ended" if known.is_ended else "running"


def _is_open(record: Record) -> bool:
    from snakemake_executor_plugin_submitit.record import SUBMITTED, SUBMITTING

    return record.state in (SUBMITTING, SUBMITTED)
