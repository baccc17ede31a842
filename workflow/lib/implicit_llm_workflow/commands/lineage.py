"""The command `lineage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from implicit_llm_workflow.commands import options

EXIT_BROKEN = 1


def lineage(
    artifact: Annotated[
        str,
        typer.Argument(
            help="A file of a finished job (a figure, a table), its run directory or its manifest. In the experiment "
            "of --config also a job such as report, a fingerprint (8 digits or more) or an MLflow run.",
            metavar="ARTIFACT",
            show_default=False,
        ),
    ],
    verify: Annotated[bool, options.flag("--verify", "Recompute the sha256 of every file on the way.")] = False,
    as_json: Annotated[bool, options.as_json("one entry for each run")] = False,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
) -> None:
    """Show where a result came from: the runs behind it, back to the data.

    Of each run the fingerprint, the MLflow run, commit, device and time, and whether it was accepted with other code
    than the one wanted. With --verify, ends with exit code 1 if a file is missing or changed.

    **Example**

        implicit-llm lineage results/demo/report/tables/accuracy.csv --verify
        implicit-llm lineage train/a5-implicit-s1/free --config demo --json
    """
    from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
    from implicit_llm_workflow.results.lineage import NoLineage, trace, tree_of
    from implicit_llm_workflow.results.lineage import as_json as lineage_json
    from implicit_llm_workflow.results.verify import broken_lines, check_files, count_text

    path = Path(artifact)
    if not path.exists():
        plan = options.make_plan(config, results)
        node = plan.find(artifact)
        result = plan.result_with(artifact)
        is_finished = result is not None and (result / MANIFEST).is_file()
        path = result if result is not None and is_finished else plan.run_dir(node)
        if not is_finished and plan.statuses[node.key].state == "missing":
            raise NoLineage(f"{node.key}: has not finished; type: {plan.command_for([node])}")
    found, console = trace(path), options.wide_console(is_error=as_json)
    if as_json:
        options.print_json(lineage_json(found))
    else:
        console.print(tree_of(found))
    if verify:
        files, damaged = found.files()
        broken = [*damaged, *check_files(files)]
        for line in [count_text(f"{len(found.runs)} runs", files, broken), *broken_lines(broken)]:
            console.print(line, soft_wrap=True)
        if broken:
            raise typer.Exit(EXIT_BROKEN)
