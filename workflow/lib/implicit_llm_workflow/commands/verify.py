"""The command `verify`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.commands import options

if TYPE_CHECKING:
    from implicit_llm_workflow.planning.plan import Plan

EXIT_BROKEN = 1


def verify(
    targets: Annotated[
        list[str] | None,
        options.targets(
            "Jobs, such as data/a5-train, or their run directories or manifests; shards come with their stream. "
            "All jobs if none is given."
        ),
    ] = None,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
) -> None:
    """Recompute the sha256 of every file of an experiment's finished jobs.

    Lists each file that is missing or changed, and the commands that rebuild them. Ends with exit code 1 if it finds
    any.

    **Example**

        implicit-llm verify --config demo
        implicit-llm verify data/a5-train train/a5-implicit-s0/free
    """
    from implicit_llm_workflow.results.verify import (
        broken_lines,
        check_files,
        count_text,
        files_of_jobs,
        rebuild_commands,
        with_shards,
    )

    plan, console = options.make_plan(config, results), options.wide_console()
    nodes = with_shards(plan, targets) if targets else list(plan.nodes.values())
    files, damaged, unfinished = files_of_jobs(plan, nodes)
    broken = [*damaged, *check_files(files)]
    waiting = f", {len(unfinished)} not made yet" if unfinished else ""
    console.print(f"{count_text(f'{len(nodes) - len(unfinished)} jobs', files, broken)}{waiting}")
    if not broken:
        return
    for line in broken_lines(broken):
        console.print(line, soft_wrap=True)
    jobs = list(dict.fromkeys(item.job for item in broken))
    console.print("To make them again:")
    for command in rebuild_commands(plan, jobs, jobs if targets else ()):
        console.print(f"    {command}", soft_wrap=True, markup=False)
    states = _states(plan)
    stale = [job for job in jobs if job not in {item.job for item in damaged} and states.get(job) == "stale"]
    if stale:
        console.print(
            f"Also stale, and so rebuilt from the current config and code: {', '.join(stale)}", soft_wrap=True
        )
    others = [key for key in plan.wanted if key not in jobs and states.get(key) not in (None, "fresh")]
    if others and not targets:
        console.print(
            f"The second command also makes {len(others)} jobs that are stale or missing; for the broken ones alone: "
            f"`implicit-llm verify {shlex.join(jobs[:1])} --config {plan.experiment.source}`",
            soft_wrap=True,
            markup=False,
        )
    raise typer.Exit(EXIT_BROKEN)


def _states(plan: Plan) -> dict[str, str]:
    """By job fresh, stale or missing; empty if they are unknown because sources cannot be read."""
    try:
        return {key: status.state for key, status in plan.statuses.items()}
    except UserError:
        return {}
