"""One MLflow run for each invocation of Snakemake, above the runs that began in it.

A run stays below the invocation that began it. Later ones that work on it are added to its tag `invocations`, by which
their own run leads to it. The driver does not know MLflow, so the first job of an invocation makes its run, and each
job that ends brings its status up to date.
"""

from __future__ import annotations

from implicit_llm_jobs.tracking.invocation import TAG, Invocation
from implicit_llm_jobs.tracking.mlflow_client import Client, NewRun
from implicit_llm_jobs.tracking.mlflow_store import alone
from implicit_llm_jobs.tracking.tracked_run import TrackedRun

_KEY = "invocation-{}"


def find_or_create(client: Client, run: TrackedRun) -> list[str]:
    """MLflow ids of the invocations that worked on the run, in their order."""
    invocations = run.invocations()
    if not invocations:
        return []
    with alone(run.config_dir / ".mlflow.lock"):  # jobs that start at the same time would each make one
        return [client.find_or_create_run(_new_run(run, item)) for item in invocations]


def close(client: Client, run: TrackedRun) -> None:
    """Set the status of the run's invocations from those of all their runs, one of which has ended."""
    for item in run.invocations():
        run_id = client.find_run(run.experiment, _KEY.format(item.id))
        if run_id is None:  # someone has deleted it
            continue

        def has(status: str, given: str = item.id) -> bool:
            return client.has_run(run.experiment, {TAG: given}, status)

        if has("RUNNING") or has("SCHEDULED"):
            client.set_status(run_id, "RUNNING")
        else:
            status = "FAILED" if has("FAILED") or has("KILLED") else "FINISHED"
            client.set_status(run_id, status, run.times()[1])


def _new_run(run: TrackedRun, item: Invocation) -> NewRun:
    key = _KEY.format(item.id)
    return NewRun(run.experiment, item.name, key, item.tags(run.experiment), item.started)
