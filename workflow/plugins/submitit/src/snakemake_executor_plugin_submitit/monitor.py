"""Watch the submitted jobs through their files, and through Slurm or the local processes.

For a failed job, this module also writes the message to the user and decides whether to submit it again.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import psutil

from snakemake_executor_plugin_submitit import processes
from snakemake_executor_plugin_submitit.request import Job
from snakemake_executor_plugin_submitit.slurm import UNKNOWN, SlurmQueue
from snakemake_executor_plugin_submitit.store import (
    CLASSES,
    PREEMPTED_EXIT,
    SLURM_CLASSES,
    End,
    read_attempts,
    tail,
    write_json,
)

GRACE_S = 5.0  # between SIGTERM and SIGKILL
SETTLE_S = 15  # until the job's last file is visible here, after Slurm has seen the job's end
LAST_LINES = 30
OUT_OF_MEMORY = re.compile(r"exceeded memory limit|oom[-_ ]kill|out of memory", re.IGNORECASE)


@dataclass
class Monitor:
    """A monitor of submitted jobs; `clock` returns seconds and can be replaced in tests."""

    queue: SlurmQueue
    lost_after_s: float
    clock: Callable[[], float] = time.monotonic

    def look(self, jobs: Sequence[Job]) -> list[End | None]:
        """Return how each job ended, or None if it has not; query Slurm at most once, and only if a query is due.

        Update `slurm` and `doubt` of the jobs, and write the end of a job that could not write it.
        """
        ends = [job.end for job in jobs]
        on_slurm = [job for job, end in zip(jobs, ends, strict=True) if end is None and job.record.is_on_slurm]
        if on_slurm and self.queue.is_due():
            states = self.queue.ask(job.record.job_id for job in on_slurm)
            for job in on_slurm:
                job.slurm = states[job.record.job_id]
        return [end or self._without_word(job) for job, end in zip(jobs, ends, strict=True)]

    def _without_word(self, job: Job) -> End | None:
        """Return the end of a job that wrote no final end, by its state in Slurm or by its processes; else None."""
        if job.record.is_on_slurm:
            state, is_over = job.slurm.state, job.slurm.is_over
            # Wait for a second answer, because Slurm shows a job as ended before it requeues the job.
            settle_s = self.lost_after_s if job.slurm == UNKNOWN else max(SETTLE_S, 1.5 * self.queue.interval_s)
        else:
            if job.process is not None:
                job.process.poll()  # removes an ended controller from the process table
            state, is_over, settle_s = "", not processes.is_local_job_alive(job.files, job.record), 1
        if not is_over:
            job.doubt = None
            return None
        if job.doubt is None or job.doubt[0] != state:
            job.doubt = (state, self.clock())
        if self.clock() - job.doubt[1] < settle_s:
            return None
        if job.slurm == UNKNOWN:
            return recorded(job, End("lost", f"Slurm has not known job {job.record.job_id} for {settle_s:.0f} s"))
        with suppress(OSError):
            os.listdir(job.files.path)  # NFS caches a failed look-up until the client lists the folder
        end = job.files.end(job.record.number)
        if end and not (end.is_provisional and state in SLURM_CLASSES):
            return end
        return recorded(job, failure_of(job, state, end.exit_code if end else None))


def recorded(job: Job, end: End) -> End:
    """Write `end` for a job that did not know or could not write it, and return it. Ignore errors of the file system.

    Other programs read this file, because they do not query Slurm about a job that was reported to Snakemake.
    """
    with suppress(OSError):  # Snakemake reports the end in any case
        write_json(job.files.outcome(job.record.number), end._asdict())
    return end


def failure_of(job: Job, state: str, exit_code: int | None) -> End:
    """Return the failure of a job that did not write its end, or whose end is provisional.

    Slurm's state determines the failure class, or without a state the last attempt. A message about memory in
    submitit's standard error makes the class "oom", unless the job was cancelled or preempted. A job that reached its
    time limit is "preempted" if it makes progress or requests a restart.
    """
    begun = [one for one in read_attempts(job.files.attempts) if one["submission"] == job.record.number]
    last = begun[-1] if begun else {}
    if not state and last.get("asked") == "SIGINT":
        state = "TIMEOUT" if last["is_time_limit"] else "CANCELLED"
    elif not state and last.get("exit_code") == PREEMPTED_EXIT:
        state = "PREEMPTED"  # submitit's local controller starts a job at most six times
    if job.slurm.is_refused:
        return End("user", "no node can run it (Slurm's reason: BadConstraints)", exit_code)
    kind = SLURM_CLASSES.get(state, "lost")
    if state not in ("CANCELLED", "PREEMPTED") and OUT_OF_MEMORY.search(tail(job.stderr)):
        kind = "oom"
    is_fruitful = job.files.progress() is not None and not job.files.is_unfruitful()
    if kind == "timeout" and (is_fruitful or exit_code == PREEMPTED_EXIT):
        kind = "preempted"  # another attempt resumes from the job's checkpoint
    message = {
        "lost": "it ended without an outcome",
        "cancelled": "cancelled",
        "timeout": "killed at its time limit",
        "oom": "killed for lack of memory",
    }.get(kind, "")
    if job.slurm.exit_code:
        message = f"{message} (exit code {job.slurm.exit_code})"
    return End(kind, message, exit_code, job.slurm.nodes or last.get("nodes", ""))


def is_worth_another(job: Job, kind: str, requeue_limit: int) -> bool:
    """Return whether to submit a failed job again: by the retries of its class, or for "preempted" by `requeue_limit`.

    A preempted job is not submitted again if its last attempts made no progress (`JobFiles.is_unfruitful`).
    """
    limit = CLASSES[kind].retries
    if limit is not None:
        return job.record.retries.get(kind, 0) < limit
    return len(read_attempts(job.files.attempts)) <= requeue_limit and not job.files.is_unfruitful()


def message(job: Job, why: End) -> str:
    """Return all facts that help to find the cause: class, states, codes, logs, last lines."""
    assert why.failure_class is not None
    facts = [
        f"class {why.failure_class}",
        f"Slurm state {job.slurm.state or 'unknown'}" if job.record.is_on_slurm else "",
        "" if why.exit_code is None else f"exit code {why.exit_code}",
        f"on {why.nodes}" if why.nodes else "",
    ]
    lines = [
        f"job {job.record.job_id} failed: {', '.join(filter(None, facts))}{': ' + why.message if why.message else ''}",
        f"next: {CLASSES[why.failure_class].advice}",
        f"output: {job.files.output_log}",
        f"submitit: {job.stderr}",
    ]
    last = (tail(job.files.output_log) or tail(job.stderr)).splitlines()[-LAST_LINES:]
    return "\n".join([*lines, *(["last lines:"] if last else []), *(f"    {line}" for line in last)])


def stop_all(jobs: Sequence[Job]) -> None:
    """Send SIGTERM to every process of these local jobs, and SIGKILL to those that remain after GRACE_S."""
    found = processes_of(jobs)
    processes.kill(found, signal.SIGTERM)
    psutil.wait_procs(found, GRACE_S)
    processes.kill(processes_of(jobs))


def processes_of(jobs: Sequence[Job]) -> list[psutil.Process]:
    """Return the processes of local jobs, including submitit's controllers."""
    found = (processes.of_job(processes.controller(job.record), job.files.status) for job in jobs)
    return [process for process in {*chain(*found)} if processes.start_ticks(process.pid) is not None]
