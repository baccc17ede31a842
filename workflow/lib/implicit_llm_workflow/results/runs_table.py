"""The models of an experiment as a table for people and as JSON for machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from implicit_llm_workflow.results.job_look import Observed
from implicit_llm_workflow.results.run_names import run_and_phase
from implicit_llm_workflow.results.shown_numbers import MISSING, number_text, share_text, time_text

STATE_STYLE = {
    "done": "green",
    "running": "bold cyan",
    "queued": "cyan",
    "stopped": "magenta",
    "failed": "bold red",
    "stale": "yellow",
    "waiting": "dim",
}
NARROW = 130  # characters, below which an MLflow run is named by its first digits
SHORT_ID_DIGITS = 8
# The journal's names of a loss and of the health of a solver, and how they are shown.
_METRICS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("loss", "loss", number_text),
    ("residual", "residual", lambda value: number_text(value, 2)),
    ("num_iter", "iter", lambda value: number_text(value, 3)),
    ("unconverged_share", "unconv", share_text),
)


def runs_table(jobs: Iterable[Observed], width: int) -> Table:
    """A row for each; `width`: of what it is printed on, in characters."""
    is_narrow = width < NARROW
    table = Table(box=None, pad_edge=False, collapse_padding=is_narrow)
    table.add_column("run", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("phase", overflow="fold")
    for heading in ("step", *(heading for _, heading, _ in _METRICS), "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("mlflow", no_wrap=True)
    for job in jobs:
        run, phase = run_and_phase(job.node.key)
        style = STATE_STYLE[job.state]
        run_id = job.mlflow_run_id or MISSING
        table.add_row(
            escape(run),
            f"[{style}]{job.state}[/{style}]",
            escape(phase),
            step_text(job),
            *[show(job.metrics.get(name)) for name, _, show in _METRICS],
            time_text(age_s(job)),
            run_id[:SHORT_ID_DIGITS] if is_narrow else run_id,
        )
    return table


def step_text(job: Observed) -> str:
    """ "450/1200", both counted from the beginning of the curriculum."""
    progress = job.progress
    if progress.end_step is None:
        return MISSING if progress.step is None else str(progress.step)
    return f"{MISSING if progress.step is None else progress.step}/{progress.end_step}"


def age_s(job: Observed) -> float | None:
    """Since the job last wrote something."""
    return None if job.unix_s is None else max(0.0, time.time() - job.unix_s)


def as_json(job: Observed) -> dict[str, Any]:
    """Everything that is known of one job."""
    run, phase = run_and_phase(job.node.key)
    submitted = job.submitted
    return {
        "job": job.node.key,
        "run": run,
        "phase": phase,
        "status": job.state,
        "why": job.why or None,
        "failure_class": job.failure_class,
        "progress": asdict(job.progress),
        "metrics": dict(job.metrics),
        "age_s": age_s(job),
        "mlflow_run_id": job.mlflow_run_id,
        "host": job.where or None,
        "submitted": None if submitted is None else _submitted_values(asdict(submitted)),
    }


def _submitted_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "output_log": str(values["output_log"])}
