"""The commands that show results: report, runs side by side, lineage, and whether files are whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from implicit_llm_contracts.runs import without_password
from implicit_llm_workflow.commands import options
from implicit_llm_workflow.commands.jobs import run_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from implicit_llm_report.config import MissingResult


EXIT_MISSING, EXIT_BROKEN = 2, 1
_STYLE = {"failed": "red", "stale": "yellow", "missing": "dim"}


def report(
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
    only: Annotated[
        str | None,
        typer.Option(help="A figure or table of the paper instead of all, such as figure_1_right.", metavar="NAME"),
    ] = None,
    missing: Annotated[
        bool, options.flag("--missing", "Make a report from the fresh results; it lists the others.")
    ] = False,
    numbers: Annotated[
        bool, options.flag("--numbers", "Print the main numbers so far, and where report and MLflow are.")
    ] = False,
) -> None:
    """List the results that a report lacks, or make the report without them.

    Snakemake makes the report: one HTML page, its figures, and the verdict on every claim. This command lists the
    results that are missing, stale or failed, and prints the command that makes them. The exit code is 2 if the report
    is missing or stale. With `--missing` it makes a report without these results, in a folder of its own.

    **Example**

        implicit-llm report --config demo --numbers
        implicit-llm report --config miniature --missing
        implicit-llm report --config paper --only figure_1_right --missing
    """
    from implicit_llm_workflow.experiment_files.excerpts import STAGE as EXCERPT
    from implicit_llm_workflow.results.missing import find_missing, report_with_missing

    plan = options.make_plan(config, results)
    if numbers:
        from implicit_llm_workflow.results.compare import main_numbers, where_to_look

        options.show(*main_numbers(plan))
        typer.echo("\n".join(where_to_look(plan)))
        return
    page = plan.find(f"{EXCERPT}/{only.removeprefix(f'{EXCERPT}/')}" if only else "report")
    found = find_missing(plan, page)
    _show(found, len(page.upstream))
    if missing:
        if len(found) == len(page.upstream):
            raise options.OptionError(f"--missing: no result is fresh; type: {plan.command_for([page])}")
        wanted, inputs = report_with_missing(plan, page, found)
        folder = plan.run_dir(page).with_name(wanted.name)
        run_job(folder, wanted.to_json(inputs), None, {})
        typer.echo(f"{len(found)} of {len(page.upstream)} results are not in it")
        typer.echo(str(folder / "index.html"))
    elif found or plan.statuses[page.key].state != "fresh":
        more = ", or add --missing for a report without them" if found else ""
        state = "is not whole" if found else "is not there"
        typer.echo(f"the report {state}; type: {plan.command_for([page])}{more}")
        raise typer.Exit(EXIT_MISSING)
    else:
        typer.echo(f"the report is there: {plan.run_dir(page) / 'index.html'}")


def _show(missing: Sequence[MissingResult], number: int) -> None:
    """A line for each of the missing results, which are those of `number` inputs."""
    from rich.markup import escape

    from implicit_llm_workflow.text import plain_table

    if not missing:
        return
    table = plain_table("missing result", "state", "why", whole=("state",))
    for item in missing:
        style = _STYLE[item.state]
        table.add_row(item.job, f"[{style}]{item.state}[/{style}]", escape(item.why))
    typer.echo(f"{len(missing)} of the report's {number} results are missing")
    options.show(table)


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Runs, with or without a phase (a5-implicit-s1/free). Without a "
            "seed (a5-implicit) it compares all seeds. Run directories of finished jobs of any experiment work too.",
            metavar="RUN",
            show_default=False,
        ),
    ],
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
    as_json: Annotated[bool, options.as_json("with every number of every seed")] = False,
) -> None:
    """Compare finished runs: settings, code, inputs and metrics.

    For inputs (the phase before, the data) it shows only what differs. Numbers are from the end of the phase and from
    its evaluations, with mean, lowest and highest of several seeds. Curves are in MLflow and in the report.

    **Example**

        implicit-llm compare a5-implicit a5-explicit --config demo
        implicit-llm compare a5-implicit-s1/unrolled a5-implicit-s1/free --config demo --json
        implicit-llm compare results/demo/train/s3-implicit-s0/free \\
            elsewhere/results/demo/train/s3-implicit-s0/free
    """
    from implicit_llm_workflow.results import compare as results_of

    plan = None if all(results_of.is_folder(name) for name in names) else options.make_plan(config, results)
    columns = results_of.find_columns(names, plan)
    if as_json:
        options.print_json(results_of.as_json(columns))
        return
    options.show(*results_of.view(columns))


MLFLOW_RUN = re.compile("[0-9a-f]{32}")


def lineage(
    artifact: Annotated[
        str,
        typer.Argument(
            help="A file of a finished job (a figure, a table), its run directory or its manifest. Also the id of its "
            "run in MLflow. In the experiment of --config also a job such as report.",
            metavar="ARTIFACT",
            show_default=False,
        ),
    ],
    forward: Annotated[bool, options.flag("--forward", "Show what was made from it instead.")] = False,
    verify: Annotated[bool, options.flag("--verify", "Recompute the sha256 of every file of these runs.")] = False,
    as_json: Annotated[bool, options.as_json("one entry for each run")] = False,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
) -> None:
    """Show where a result came from: the runs behind it, back to the data; or what was made from it.

    It prints the fingerprint, MLflow run, commit, device and time of each run, and whether it was accepted although
    its code changed. With --verify the exit code is 1 if a file is missing or changed.

    **Example**

        implicit-llm lineage results/demo/report/tables/accuracy.csv --verify
        implicit-llm lineage train/a5-implicit-s1/free --config demo --json
        implicit-llm lineage results/demo/data/a5-train --forward
    """
    from implicit_llm_workflow.results.lineage import NoLineage, of_mlflow_run, trace, tree_of
    from implicit_llm_workflow.results.lineage import as_json as lineage_json
    from implicit_llm_workflow.results.verify import check_files, check_lines

    path = Path(artifact)
    if not path.exists() and MLFLOW_RUN.fullmatch(artifact):
        path = of_mlflow_run(artifact, results)
    elif not path.exists():
        plan = options.make_plan(config, results)
        node = plan.find(artifact)
        recorded = plan.recorded(node)
        if recorded is None:
            raise NoLineage(f"{node.key}: has not finished; type: {plan.command_for([node])}")
        path = recorded
    found = trace(path, is_forward=forward)
    if as_json:
        options.print_json(lineage_json(found))
    else:
        options.show(tree_of(found))
    if verify:
        files, damaged = found.files()
        broken = [*damaged, *check_files(files)]
        for line in check_lines(f"{len(found.runs)} runs", files, broken):
            typer.echo(line, err=as_json)
        if broken:
            raise typer.Exit(EXIT_BROKEN)


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

    It lists each file that is missing or changed, and the commands that rebuild them. The exit code is 1 if there are
    any.

    **Example**

        implicit-llm verify --config demo
        implicit-llm verify data/a5-train train/a5-implicit-s1/free --config demo
    """
    from implicit_llm_workflow.results.verify import (
        check_files,
        check_lines,
        rebuild_commands,
        recorded_files,
        with_shards,
    )

    plan = options.make_plan(config, results)
    nodes = with_shards(plan, targets) if targets else list(plan.nodes.values())
    manifests = {node.key: path for node in nodes if (path := plan.recorded(node)) is not None}
    files, damaged = recorded_files(manifests.items())
    broken = [*damaged, *check_files(files)]
    if unfinished := len(nodes) - len(manifests):
        typer.echo(f"not made yet: {unfinished} of {len(nodes)} jobs")
    for line in check_lines(f"{len(manifests)} jobs", files, broken):
        typer.echo(line)
    if broken:
        typer.echo("To make them again:")
        jobs = [item.job for item in broken]
        for command in rebuild_commands(plan, jobs, jobs):
            typer.echo(f"    {command}")
        raise typer.Exit(EXIT_BROKEN)


mlflow = typer.Typer(
    name="mlflow",
    help="Rebuild MLflow's store of runs.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@mlflow.command("rebuild")
def mlflow_rebuild(
    results: Annotated[
        Path, typer.Option(help="Folder of the SQLite store, unless MLFLOW_TRACKING_URI is set.", metavar="DIR")
    ] = options.DEFAULT_RESULTS,
) -> None:
    """Add to MLflow's store whatever it lacks of the results, after an outage or a loss.

    Runs in the store keep their ids; others get new ids with the same tags, parameters and points. It refuses a damaged
    file and prints the command that replaces it. Jobs may run at the same time.

    **Example**

        implicit-llm mlflow rebuild
        mlflow ui --backend-store-uri sqlite:///results/mlflow.db
    """
    from implicit_llm_jobs.tracking.mlflow_writer import rebuild

    done = rebuild(results)
    typer.echo(f"{without_password(done.uri)}: {done.num_runs} runs are there")
    if done.failed:
        typer.echo(f"not brought: {', '.join(done.failed)}; the log says why", err=True)
        raise typer.Exit(1)
