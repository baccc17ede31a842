"""The command `lineage`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from implicit_llm_workflow.commands import options

if TYPE_CHECKING:
    from rich.console import Console

    from implicit_llm_workflow.results.lineage import Lineage

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
    ro_crate: Annotated[
        Path | None,
        typer.Option(help="New folder for an RO-Crate of the result and its provenance.", metavar="DIR"),
    ] = None,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
) -> None:
    """Show where a result came from: the runs behind it, back to the data.

    Of each run the fingerprint, the MLflow run, commit, device and time, and whether it was accepted with other code
    than the one wanted. With --verify, ends with exit code 1 if a file is missing or changed. An RO-Crate (profile
    Workflow Run Crate) holds the result itself, the manifest and provenance of every run, and the workflow's rules.

    **Example**

        implicit-llm lineage results/demo/report/tables/accuracy.csv --verify
        implicit-llm lineage train/a5-implicit-s1/free --config demo --ro-crate crate
    """
    from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
    from implicit_llm_workflow.results import lineage_tree
    from implicit_llm_workflow.results.lineage import NoLineage, trace

    path = Path(artifact)
    if not path.exists():
        plan = options.make_plan(config, results)
        node = plan.find(artifact)
        result = plan.result_with(artifact)
        is_finished = result is not None and (result / MANIFEST).is_file()
        path = result if result is not None and is_finished else plan.run_dir(node)
        if not is_finished and plan.statuses[node.key].state == "missing":
            raise NoLineage(f"{node.key}: has not finished; type: {plan.command_for([node])}")
    found = trace(path)
    if as_json:
        options.print_json(lineage_tree.as_json(found))
    console = options.wide_console(is_error=as_json)
    if not as_json:
        console.print(lineage_tree.tree_of(found))
    if ro_crate is not None:
        from implicit_llm_workflow.results.ro_crate import write_crate

        number = write_crate(found, ro_crate)
        console.print(f"RO-Crate: {ro_crate} ({number} files)", markup=False, soft_wrap=True)
    if verify and _find_broken(found, console):
        raise typer.Exit(EXIT_BROKEN)


def _find_broken(found: Lineage, console: Console) -> bool:
    from tqdm import tqdm

    from implicit_llm_workflow.results.lineage_verify import verify_lineage

    size = sum(file.size for run in found.runs.values() for file in run.files)
    with tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc="verify", disable=None) as bar:
        number, broken = verify_lineage(found, bar.update)
    for item in broken:
        console.print(f"[red]broken[/red] {item.path}: {item.why} (job {item.job})", soft_wrap=True)
    total = f"{len(found.runs)} runs, {number} files, {size / 2**20:,.1f} MiB"
    console.print(f"{total}: {len(broken) or 'none'} broken", markup=False)
    return bool(broken)
