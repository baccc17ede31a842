"""The command `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from implicit_llm_workflow.commands import options


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Runs as `implicit-llm runs` prints them, with or without a phase (a5-implicit-s1/free). Without a "
            "seed (a5-implicit) it compares all seeds. Run directories of any experiment work too.",
            metavar="RUN",
            show_default=False,
        ),
    ],
    html: Annotated[
        Path | None, typer.Option(help="Also write a page with the curves; it needs nothing else.", metavar="FILE")
    ] = None,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
    as_json: Annotated[bool, options.as_json("with every number of every seed")] = False,
) -> None:
    """Compare runs: settings, code, inputs and metrics.

    Of inputs (the phase before, the data) only what differs in them is shown. Numbers: those of the manifest at the end
    of the phase, those of its evaluations, and the last ones in the journal, also of a run that still works. Of several
    seeds the mean, the lowest and the highest. The curves go back to the first phase.

    **Example**

        implicit-llm compare a5-implicit a5-explicit
        implicit-llm compare a5-implicit-s1 a5-explicit-s1 --html curves.html
        implicit-llm compare results/demo/train/s3-implicit-s0/free \\
            elsewhere/results/demo/train/s3-implicit-s0/free
    """
    from implicit_llm_workflow.results import compare as results_of

    plan = None if all(results_of.is_folder(name) for name in names) else options.make_plan(config, results)
    comparison = results_of.Comparison.of(results_of.find_columns(names, plan))
    console = options.wide_console(is_error=as_json)
    if as_json:
        options.print_json(results_of.as_json(comparison))
    else:
        for part in results_of.view(comparison):
            console.print(part)
    if html is not None:
        from implicit_llm_workflow.results.compare_page import write_page

        write_page(comparison, html)
        console.print(f"page: {html}", markup=False, soft_wrap=True)
