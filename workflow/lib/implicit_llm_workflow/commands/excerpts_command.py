"""The sub-command `excerpts`."""

from __future__ import annotations

from typing import Annotated

import typer

from implicit_llm_workflow.commands import experiment_options as options


def excerpts(
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
    as_json: Annotated[bool, options.as_json("one entry for each")] = False,
) -> None:
    """List the figures and tables of the paper, each of which Snakemake makes by itself, and what is there of them.

    jobs: how many there are behind it, and how many of them are fresh. page: of its own, in results/NAME/excerpt/.

    **Example**

        implicit-llm excerpts --config miniature
        snakemake --configfile workflow/config/miniature.yaml --profile profiles/local figure_1_left
    """
    import json
    from collections import Counter
    from dataclasses import asdict

    from rich.table import Table

    from implicit_llm_workflow.experiment_files.excerpts import STAGE
    from implicit_llm_workflow.results.explain import upstream_closure

    plan = options.make_plan(config, results)
    table = Table("target", "jobs", "fresh", "page", "figures and tables", "in the paper", box=None, pad_edge=False)
    listed = []
    for excerpt in plan.experiment.excerpts.values():
        key = f"{STAGE}/{excerpt.name}"
        states = Counter(plan.statuses[job].state for job in upstream_closure(plan, [key]) if job != key)
        entry = {**asdict(excerpt), "jobs": states.total(), "fresh": states["fresh"], "page": plan.statuses[key].state}
        listed.append(entry)
        shown = ", ".join([*excerpt.figures, *(f"{name} (table)" for name in excerpt.tables)])
        table.add_row(excerpt.name, *(str(entry[name]) for name in ("jobs", "fresh", "page")), shown, excerpt.title)
    if as_json:
        typer.echo(json.dumps({"experiment": plan.experiment.name, "excerpts": listed}, indent=1, ensure_ascii=False))
        return
    options.wide_console().print(table if listed else "the experiment names no excerpts")
