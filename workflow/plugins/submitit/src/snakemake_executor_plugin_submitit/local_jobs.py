"""Ending jobs that are processes of this machine, with all that they started."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from snakemake_executor_plugin_submitit import processes
from snakemake_executor_plugin_submitit.job_files import STATUS_VARIABLE
from snakemake_executor_plugin_submitit.monitor import Tracked

GRACE_S = 5.0


def stop_all(jobs: Sequence[Tracked]) -> None:
    """SIGTERM to every process of the jobs, SIGKILL to those that are there after a while."""
    if not jobs:
        return
    processes.kill(pids_of(jobs), signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        for job in jobs:
            if job.process is not None:
                job.process.poll()
        if not pids_of(jobs):
            return
        time.sleep(0.1)
    processes.kill(pids_of(jobs), signal.SIGKILL)


def pids_of(jobs: Sequence[Tracked]) -> list[int]:
    """The processes below submitit's controllers, and those that were started by a job and went out of its family."""
    found: dict[int, None] = {}
    for job in jobs:
        controller = int(job.record.job_id)
        if processes.is_alive(controller, job.record.started):
            found.update(dict.fromkeys(processes.descendants(controller)))
        for pid in processes.with_environment(**{STATUS_VARIABLE: str(job.files.status)}):
            if processes.start_ticks(pid) is not None:
                found[pid] = None
    return list(found)
