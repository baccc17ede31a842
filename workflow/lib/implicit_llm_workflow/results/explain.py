"""List the jobs of the next run of the workflow, with the reason and the cost of each."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from rich.table import Table
from rich.text import Text

from implicit_llm_workflow.estimates import CostModel, total_text
from implicit_llm_workflow.planning.code_digest import JobCode, changes_since
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.job_states import CodeChange, JobView, observe, state_text
from implicit_llm_workflow.text import plain_table

MAX_ALIKE = 6  # up to this many jobs with the same stage, state and reason get a row each; more share one
SHOWN_ABSENT = 3


def explain(plan: Plan, targets: Iterable[str] = ()) -> list[JobView]:
    """Return the views of the targets and of all their direct and indirect inputs, in the order of the plan.

    Without targets, the targets are all jobs except excerpts. Raises: UnknownTarget.
    """
    wanted = [plan.find(target).key for target in targets] or plan.wanted
    running = plan.running(wanted)
    costs = CostModel(plan)

    @cache
    def code_change(code: JobCode, old: str, new: str) -> CodeChange:
        return CodeChange(code.module, old, new, changes_since(plan.root, old, code))

    found = []
    for key, job in observe(plan, plan.with_inputs(wanted)).items():
        difference = job.result.difference
        change = code_change(plan.code(job.node), *difference.code) if difference and difference.code else None
        cost = costs.recorded(job.node) if job.has_result else costs.of(job.node)
        found.append(replace(job, runs=key in running, code=change, cost=cost))
    return found


def headline(jobs: Sequence[JobView]) -> str:
    """Return how many jobs will run and their total cost."""
    running = [job for job in jobs if job.runs]
    if not running:
        return f"Nothing will run: what is needed of {len(jobs):,} jobs is there"
    return f"{len(running):,} of {len(jobs):,} jobs will run: {total_text(job.cost for job in running)}"


def running_table(jobs: Iterable[JobView]) -> Table:
    """Return a table with a row for each job that will run; more than MAX_ALIKE similar jobs share a row."""
    rows: list[tuple[str, Text, str, str]] = []
    groups: dict[tuple[str, str, str], list[JobView]] = {}
    for job in jobs:
        if job.runs:
            groups.setdefault((job.node.stage, job.state, job.result.why), []).append(job)
    for (_, state, why), alike in groups.items():
        found = [(job.node.key, f"{job.cost.text} ({job.cost.basis})") for job in alike]
        if len(alike) > MAX_ALIKE:
            found = [(f"{alike[0].node.key} and {len(alike) - 1:,} like it", total_text(job.cost for job in alike))]
        rows += [(name, state_text(state), why, takes) for name, takes in found]
    return plain_table("job", "state", "why", "takes", rows=rows, whole=("state",))


def lines_below(jobs: Sequence[JobView]) -> Iterator[str]:
    """Yield lines about the changed code, once for each module and old digest, and about the jobs that will not run."""
    changes = list(dict.fromkeys(job.code for job in jobs if job.runs and job.code is not None))
    if changes:
        yield "Code that changed:"
    for change in changes:
        what = "what changed is not recorded for a result this old"
        files = what if change.files is None else ", ".join(change.files)
        yield f"  {change.module}: {files} ({change.old[:12]} -> {change.new[:12]})"
    if kept := [job for job in jobs if job.has_result]:
        stages = ", ".join(f"{count:,} {stage}" for stage, count in Counter(job.node.stage for job in kept).items())
        yield f"{len(kept):,} stay ({stages}), which took {total_text(job.cost for job in kept)}"
    for job in kept:
        if job.result.accepted is not None:
            yield f"  accepted with other code: {job.node.key} ({job.result.accepted.why})"
    if absent := [job.node.key for job in jobs if not job.runs and not job.has_result]:
        more = ", ..." if len(absent) > SHOWN_ABSENT else ""
        yield f"{len(absent):,} missing but not needed: {', '.join(absent[:SHOWN_ABSENT])}{more}"


def as_json(jobs: Sequence[JobView]) -> dict[str, Any]:
    """Return each job, and the totals of those that will run."""
    running = [job for job in jobs if job.runs]
    return {
        "jobs": [
            {
                "job": job.node.key,
                "stage": job.node.stage,
                "state": job.state,
                "why": job.result.why,
                "runs": job.runs,
                "difference": job.result.difference,
                "accepted": None if job.result.accepted is None else job.result.accepted.why,
                "code": job.code,
                "cost": job.cost,
            }
            for job in jobs
        ],
        "total": {
            "jobs": len(running),
            **{
                f"{unit}_hours": sum(job.cost.hours or 0.0 for job in running if job.cost.unit == unit)
                for unit in ("gpu", "cpu")
            },
            "unknown": sum(job.cost.hours is None for job in running),
        },
    }
