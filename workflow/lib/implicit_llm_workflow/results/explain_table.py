"""The explanation of what will run as a table for people and as JSON for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from implicit_llm_workflow.estimates.cost import Cost
from implicit_llm_workflow.results.explain import ExplainedJob, Explanation

MAX_ALIKE = 6  # jobs of a stage with the same reason that get a row each
SHOWN_INPUTS = 3
_NAMES = {"gpu": "GPU", "cpu": "CPU"}
_STYLE = {"stale": "yellow", "missing": "dim"}


def running_table(jobs: Iterable[ExplainedJob]) -> Table:
    """A row for each job; many of a stage with the same reason share one."""
    table = Table("job", "state", "why", "takes", box=None, pad_edge=False)
    groups: dict[tuple[str, str, str], list[ExplainedJob]] = {}
    for job in jobs:
        groups.setdefault((job.stage, job.status.state, job.status.why), []).append(job)
    for (_, state, why), alike in groups.items():
        shown = f"[{_STYLE[state]}]{state}[/{_STYLE[state]}]"
        if len(alike) > MAX_ALIKE:
            name = f"{alike[0].key} and {len(alike) - 1:,} like it"
            table.add_row(escape(name), shown, escape(why), total_text(job.cost for job in alike))
            continue
        for job in alike:
            table.add_row(escape(job.key), shown, escape(_why(job)), f"{cost_text(job.cost)} ({job.cost.basis})")
    return table


def code_lines(jobs: Iterable[ExplainedJob]) -> Iterator[str]:
    """The code that changed, once for each stage's module and old digest."""
    for change in dict.fromkeys(job.code for job in jobs if job.code is not None):
        digests = f"{change.old[:12]} -> {change.new[:12]}"
        if change.files is None:
            yield f"  {change.module}: what changed is not recorded for a result this old ({digests})"
        else:
            yield f"  {change.module}: {', '.join(map(str, change.files))} ({digests})"


def summary_lines(explanation: Explanation) -> Iterator[str]:
    """What it takes in all, and what stays."""
    running, kept = explanation.running, explanation.kept
    number = len(explanation.jobs) + len(kept)
    if running:
        yield f"{len(running):,} of {number:,} jobs will run: {total_text(job.cost for job in running)}"
    else:
        yield f"Nothing will run: what is needed of {number:,} jobs is there"
    if kept:
        stages = ", ".join(f"{count:,} {stage}" for stage, count in Counter(job.stage for job in kept).items())
        yield f"{len(kept):,} stay ({stages}), which took {total_text(job.cost for job in kept)}"
    for job in kept:
        if job.accepted is not None:
            yield f"  accepted with other code: {job.key} ({job.accepted})"
    if absent := [job.key for job in explanation.jobs if not job.runs]:
        more = ", ..." if len(absent) > SHOWN_INPUTS else ""
        yield f"{len(absent):,} missing but not needed: {', '.join(absent[:SHOWN_INPUTS])}{more}"


def total_text(costs: Iterable[Cost]) -> str:
    """Hours by kind, and how many jobs have none."""
    hours: dict[str, float] = {}
    unknown = 0
    for cost in costs:
        if cost.unit is None or cost.hours is None:
            unknown += 1
        else:
            hours[cost.unit] = hours.get(cost.unit, 0.0) + cost.hours
    parts = [duration_text(hours[unit], unit) for unit in ("gpu", "cpu") if unit in hours]
    if unknown:
        parts.append(f"{unknown:,} of unknown cost")
    return " and ".join(parts) or "nothing"


def cost_text(cost: Cost) -> str:
    return "-" if cost.unit is None or cost.hours is None else duration_text(cost.hours, cost.unit)


def duration_text(hours: float, unit: str) -> str:
    """ "12 s CPU", "3.4 min CPU", "120 GPU-hours"."""
    seconds = hours * 3600
    if unit == "gpu" and hours >= 0.1:
        return f"{hours:,.3g} GPU-hours" if hours < 1000 else f"{hours:,.0f} GPU-hours"
    if seconds < 100:
        return f"{seconds:.2g} s {_NAMES[unit]}"
    return f"{seconds / 60:.3g} min {_NAMES[unit]}" if hours < 2 else f"{hours:,.3g} h {_NAMES[unit]}"


def as_json(explanation: Explanation) -> dict[str, Any]:
    """Everything, each job by itself."""
    return {
        "jobs": [_job_values(job) for job in explanation.jobs],
        "kept": [
            {"job": job.key, "stage": job.stage, "accepted": job.accepted, "cost": asdict(job.cost)}
            for job in explanation.kept
        ],
        "total": {
            "jobs": len(explanation.running),
            **{f"{unit}_hours": _hours(explanation.running, unit) for unit in ("gpu", "cpu")},
            "unknown": sum(job.cost.hours is None for job in explanation.running),
        },
    }


def _hours(jobs: Iterable[ExplainedJob], unit: str) -> float:
    return sum(job.cost.hours or 0.0 for job in jobs if job.cost.unit == unit)


def _job_values(job: ExplainedJob) -> dict[str, Any]:
    difference = job.status.difference
    return {
        "job": job.key,
        "state": job.status.state,
        "why": job.status.why,
        "runs": job.runs,
        "config": list(difference.config) if difference else [],
        "inputs": {
            "changed": list(difference.changed_inputs) if difference else [],
            "new": list(difference.new_inputs) if difference else [],
            "no_longer_used": list(difference.removed_inputs) if difference else [],
        },
        "code": asdict(job.code) if job.code is not None else None,
        "cost": asdict(job.cost),
    }


def _why(job: ExplainedJob) -> str:
    """Like the status says, but with no more than a few of the inputs."""
    difference = job.status.difference
    if difference is None or len(difference.changed_inputs) <= SHOWN_INPUTS:
        return job.status.why
    shown = ", ".join(difference.changed_inputs[:SHOWN_INPUTS])
    whole = ", ".join(difference.changed_inputs)
    return job.status.why.replace(whole, f"{shown} and {len(difference.changed_inputs) - SHOWN_INPUTS} more")
