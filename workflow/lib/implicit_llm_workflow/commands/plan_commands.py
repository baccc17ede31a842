"""Sub-commands that look at a whole experiment and run nothing."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from implicit_llm_workflow.commands import experiment_options as options

_STYLE = {"fresh": "green", "stale": "yellow", "missing": "dim"}


def identity(
    target: Annotated[
        str,
        typer.Argument(
            help="A job, such as train/a5-implicit-s1/free, or its run directory or manifest.", show_default=False
        ),
    ],
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
) -> None:
    """Print what the result of a job depends on: its config, its code and the fingerprints of its inputs, as JSON.

    **Example**

        implicit-llm identity data/a5-train --config demo > id.json
    """
    plan = options.make_plan(config, results)
    typer.echo(plan.identities[plan.find(target).key].to_json())


def nodes(
    targets: Annotated[
        list[str] | None,
        options.targets(
            "Jobs, such as train/a5-implicit-s1/free, their run directories, fingerprints or MLflow runs, with all "
            "that they are made from. The whole experiment if none is given."
        ),
    ] = None,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
    as_json: Annotated[bool, options.as_json()] = False,
) -> None:
    """List the jobs of an experiment: which results are fresh, stale or missing, and why.

    **Example**

        implicit-llm nodes --config workflow/config/demo.yaml
        implicit-llm nodes train/a5-implicit-s1/free --json | jq '.jobs[] | select(.state == "stale") | .why'
    """
    import json

    from rich.table import Table

    from implicit_llm_workflow.results.explain import upstream_closure

    plan = options.make_plan(config, results)
    keys = upstream_closure(plan, [plan.find(target).key for target in targets]) if targets else plan.nodes
    statuses = {key: plan.statuses[key] for key in keys}
    if as_json:
        jobs = [
            {"job": key, "state": status.state, "fingerprint": plan.identities[key].fingerprint, "why": status.why}
            for key, status in statuses.items()
        ]
        typer.echo(json.dumps({"experiment": plan.experiment.name, "jobs": jobs}, indent=1, ensure_ascii=False))
        return
    table = Table("job", "state", "fingerprint", "why", box=None, pad_edge=False)
    for key, status in statuses.items():
        style = _STYLE[status.state]
        table.add_row(key, f"[{style}]{status.state}[/{style}]", plan.identities[key].fingerprint[:16], status.why)
    console = options.wide_console()
    console.print(table)
    counts: Counter[str] = Counter(status.state for status in statuses.values())
    console.print(", ".join(f"{counts[state]} {state}" for state in _STYLE if counts[state]))


def headline(
    config: options.Config = options.DEFAULT_CONFIG, results: options.Results = options.DEFAULT_RESULTS
) -> None:
    """Print the main numbers of an experiment, and where its report and MLflow runs are.

    **Example**

        implicit-llm headline --config demo
    """
    from implicit_llm_workflow.results.headline import headline_tables, where_to_look

    plan = options.make_plan(config, results)
    console = options.wide_console()
    for table in headline_tables(plan):
        console.print(table)
    for line in where_to_look(plan):
        console.print(line)


COMMANDS = (identity, nodes, headline)
