"""The command `prefetch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from implicit_llm_workflow.commands import options

EXIT_FAILED = 1
_STYLE = {"there": "green", "fetched": "green", "failed": "red"}


def prefetch(
    config: options.Config = options.DEFAULT_CONFIG,
    downloads: Annotated[
        Path | None,
        typer.Option(help="Folder of fetched files; else $IMPLICIT_LLM_DATA, else results/downloads.", metavar="DIR"),
    ] = None,
    log: Annotated[Path | None, typer.Option(help="File to which each line is appended.", metavar="FILE")] = None,
) -> None:
    """Fetch what the jobs of an experiment need from the network: data sets, tokenizers, evaluation data.

    Run it where there is a network, on a cluster the login node. It resumes an interrupted call; what is
    there already is not fetched again. Ends with exit code 1 if something could not be had.

    **Example**

        implicit-llm prefetch --config paper --downloads /scratch/downloads
        snakemake prefetch --profile profiles/local \\
            --configfile workflow/config/paper.yaml
    """
    from implicit_llm_contracts.runs.places import downloads_folder
    from implicit_llm_workflow.planning.plan import RESULTS
    from implicit_llm_workflow.prefetching.needs import needs_of
    from implicit_llm_workflow.prefetching.prefetch import satisfy

    plan = options.make_plan(config, RESULTS)
    folder = downloads_folder(downloads)
    console = options.wide_console()
    needs = needs_of(plan)
    failed = 0
    for need in needs:
        outcome = satisfy(need, folder)
        failed += outcome.state == "failed"
        console.print(f"[{_STYLE[outcome.state]}]{outcome.state}[/] {outcome.what}", soft_wrap=True)
        _append(log, f"{outcome.state} {outcome.what}")
    if not needs:
        console.print(f"{plan.experiment.name} needs nothing from the network")
    if failed:
        console.print(f"{failed} of {len(needs)} could not be had; the rest is in {folder}", soft_wrap=True)
        raise typer.Exit(EXIT_FAILED)


def _append(log: Path | None, line: str) -> None:
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
