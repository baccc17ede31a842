"""The command `verify`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.commands import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from implicit_llm_workflow.node import Node
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
    from tqdm import tqdm

    from implicit_llm_workflow.results.verify import rebuild_commands, take_inventory, verify_files

    plan = options.make_plan(config, results)
    nodes = list(with_shards(plan, targets)) if targets else list(plan.nodes.values())
    found = take_inventory(plan, nodes)
    size = sum(file.size for file in found.files)
    with tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc="verify", disable=None) as bar:
        broken = [*found.broken, *verify_files(found.files, bar.update)]
    console = options.wide_console()
    for item in broken:
        console.print(f"[red]broken[/red] {item.path}: {item.why} (job {item.job})", soft_wrap=True)
    waiting = f", {len(found.unfinished)} not made yet" if found.unfinished else ""
    console.print(
        f"{len(found.finished)} jobs, {len(found.files)} files, {size / 2**20:,.1f} MiB: "
        f"{len(broken) or 'none'} broken{waiting}"
    )
    if not broken:
        return
    jobs = list(dict.fromkeys(item.job for item in broken))
    console.print("To make them again:")
    for command in rebuild_commands(plan, jobs, jobs if targets else ()):
        console.print(f"    {command}", soft_wrap=True, markup=False)
    states = _states(plan)
    stale = [job for job in jobs if job not in {item.job for item in found.broken} and states.get(job) == "stale"]
    if stale:
        console.print(f"Also stale, and so rebuilt from the current config and code: {', '.join(stale)}")
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
    """By job fresh, stale or missing; empty when sources that cannot be read hide it."""
    try:
        return {key: status.state for key, status in plan.statuses.items()}
    except UserError:
        return {}


def with_shards(plan: Plan, targets: list[str]) -> Iterator[Node]:
    """The targets' jobs; with a stream of tokens also those of its shards, to whose files it points."""
    for node in dict.fromkeys(plan.find(target).key for target in targets):
        for key in plan.nodes[node].upstream.values():
            if plan.nodes[key].config.get("kind") == "token_shard":
                yield plan.nodes[key]
        yield plan.nodes[node]
