"""Define the commands that show results: report, missing results, comparison, lineage, verification, MLflow."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from implicit_llm_contracts.runs.logs import without_password
from implicit_llm_workflow.commands import options
from implicit_llm_workflow.commands.jobs import run_job
from implicit_llm_workflow.planning.plan import UnknownTarget
from implicit_llm_workflow.planning.staleness import PAGES
from implicit_llm_workflow.results import compare as results_of
from implicit_llm_workflow.results import lineage as lineage_of
from implicit_llm_workflow.results.verify import (
    Broken,
    RecordedFile,
    check_files,
    rebuild_commands,
    recorded_files,
    with_shards,
)
from implicit_llm_workflow.text import plain_table, size_text

EXIT_MISSING, EXIT_BROKEN = 2, 1


def report(
    words: Annotated[list[str] | None, options.words("", "[EXPERIMENT]")] = None,
    config: options.Config = None,
    results: options.Results = options.RESULTS,
    numbers: Annotated[
        bool, options.flag("--numbers", "Print the main numbers so far, and where report and MLflow are.")
    ] = False,
) -> None:
    """Print the path of the report: one HTML page with the verdict on every claim.

    Snakemake makes the report. If it is missing or stale, the exit code is 2, and the command that makes it is printed.
    With --numbers, the numbers so far are printed instead, and the exit code is 0.

    **Example**

        implicit-llm report demo
        implicit-llm report demo --numbers
    """
    plan, _ = options.choose(words, config, results, has_targets=False)
    if numbers:
        options.show(*results_of.main_numbers(plan))
        typer.echo("\n".join(results_of.where_to_look(plan)))
        return
    page = plan.nodes["report"]
    if plan.statuses[page.key].state == "fresh":
        typer.echo(str(plan.page(page)))
        return
    lacking = sum(plan.statuses[key].state != "fresh" for key in page.upstream.values())
    typer.echo(f"{lacking} of the report's {len(page.upstream)} results are missing or stale")
    typer.echo(f"the report is not there; {results_of.how_to_make(plan, [page])}")
    typer.echo(f"without them: implicit-llm missing {plan.argument} --report")
    raise typer.Exit(EXIT_MISSING)


def missing(
    words: Annotated[
        list[str] | None,
        options.words("TARGET: a figure or table of the paper, such as figure_1_right, instead of the report."),
    ] = None,
    config: options.Config = None,
    results: options.Results = options.RESULTS,
    make: Annotated[
        bool, options.flag("--report", "Make a report from the fresh results; it lists the others.")
    ] = False,
) -> None:
    """List the results that a report lacks, and why; or make the report without them.

    The exit code is 2 if any is missing, stale or failed. With --report it makes a report without these results, in a
    folder of its own.

    **Example**

        implicit-llm missing miniature
        implicit-llm missing miniature --report
        implicit-llm missing paper figure_1_right --report
    """
    from implicit_llm_workflow.results.job_states import state_text
    from implicit_llm_workflow.results.missing import find_missing, report_with_missing

    plan, targets = options.choose(words, config, results)
    if len(targets) > 1:
        raise options.OptionError(f"{targets[1]}: {targets[0]} is named already; give one figure or table")
    page = plan.find(targets[0] if targets else "report")
    if page.stage not in PAGES:
        raise options.OptionError(
            f"{targets[0]}: is no figure or table; there are {', '.join(plan.experiment.excerpts)}"
        )
    found = find_missing(plan, page)
    if found:
        typer.echo(f"{len(found)} of the report's {len(page.upstream)} results are missing")
        rows = [(item.job, state_text(item.state), item.why) for item in found]
        options.show(plain_table("missing result", "state", "why", rows=rows, whole=("state",)))
    if make:
        if len(found) == len(page.upstream):
            raise options.OptionError(f"--report: no result is fresh; {results_of.how_to_make(plan, [page])}")
        wanted, inputs = report_with_missing(plan, page, found)
        folder = plan.run_dir(page).with_name(wanted.name)
        run_job(folder, wanted.to_json(inputs), None, {})
        typer.echo(f"{len(found)} of {len(page.upstream)} results are not in it")
        typer.echo(str(folder / "index.html"))
    elif found:
        typer.echo(f"the report lacks them; {results_of.how_to_make(plan, [page])}")
        raise typer.Exit(EXIT_MISSING)
    else:
        typer.echo("nothing is missing")


def compare(
    words: Annotated[
        list[str],
        options.words(
            "RUN: with or without a phase (a5-implicit-s1/free); without a seed (a5-implicit) it compares all seeds. "
            "Run directories of finished jobs of any experiment work too.",
            "[EXPERIMENT] RUN...",
        ),
    ],
    config: options.Config = None,
    results: options.Results = options.RESULTS,
    as_json: Annotated[bool, options.as_json("with every number of every seed")] = False,
) -> None:
    """Compare finished runs: settings, code, inputs and metrics.

    It shows which settings, code and inputs (the phase before, the data) differ, and all metrics from the end of the
    phase and from its evaluations. Several seeds have mean, lowest and highest. A column is marked
    as stale if its results were made from former settings or code. Curves are in MLflow and in the report.

    **Example**

        implicit-llm compare demo a5-implicit a5-explicit
        implicit-llm compare demo a5-implicit-s1/unrolled a5-implicit-s1/free --json
        implicit-llm compare results/demo/train/s3-implicit-s0/free \\
            elsewhere/results/demo/train/s3-implicit-s0/free
    """
    if all(results_of.is_folder(word) for word in words):
        plan, names = None, words
    else:
        plan, names = options.choose(words, config, results, to_stderr=as_json)
        if not names:
            runs = ", ".join(plan.experiment.runs)
            raise options.OptionError(f"no run is named; type runs of {plan.experiment.name} to compare: {runs}")
    columns = results_of.find_columns(names, plan)
    if as_json:
        options.print_json(results_of.as_json(columns))
        return
    options.show(*results_of.view(columns))


MLFLOW_RUN = re.compile("[0-9a-f]{32}")


def lineage(
    words: Annotated[
        list[str],
        options.words(
            "ARTIFACT: a file of a finished job (a figure, a table), its run directory or its manifest, the id of its "
            "run in MLflow, or a job such as report.",
            "[EXPERIMENT] ARTIFACT",
        ),
    ],
    forward: Annotated[bool, options.flag("--forward", "Show what was made from it instead.")] = False,
    verify: Annotated[bool, options.flag("--verify", "Recompute the sha256 of every file of these runs.")] = False,
    as_json: Annotated[bool, options.as_json("one entry for each run")] = False,
    config: options.Config = None,
    results: options.Results = options.RESULTS,
) -> None:
    """Show the runs behind a result, back to the data; with --forward, those that were made from it.

    It prints the fingerprint, MLflow run, commit, device and time of each run, and whether it was accepted although
    its code changed. With --verify the exit code is 1 if a file is missing or changed, or if a run is not found.

    **Example**

        implicit-llm lineage results/demo/report/tables/accuracy.csv --verify
        implicit-llm lineage demo train/a5-implicit-s1/free --json
        implicit-llm lineage results/demo/data/a5-train --forward
    """
    _, rest = options.split(words, results)
    if len(rest) != 1:
        raise options.OptionError(
            f"ARTIFACT: give one, not {len(rest)}; for example `implicit-llm lineage demo report`"
        )
    (artifact,) = rest
    path = Path(artifact)
    if not path.exists() and MLFLOW_RUN.fullmatch(artifact):
        path = lineage_of.of_mlflow_run(artifact, results)
    elif not path.exists():
        plan, _ = options.choose(words, config, results, to_stderr=as_json)
        try:
            node = plan.find(artifact)
        except UnknownTarget as error:
            raise lineage_of.NoLineage(
                f"{error}; no file has this path either, so name a moved one by its new path"
            ) from error
        recorded = plan.recorded(node)
        if recorded is None:
            raise lineage_of.NoLineage(f"{node.key}: has not finished; {results_of.how_to_make(plan, [node])}")
        path = recorded
    found = lineage_of.trace(path, is_forward=forward)
    if as_json:
        options.print_json(lineage_of.as_json(found))
    else:
        options.show(lineage_of.tree_of(found))
    if gap := found.gap():
        typer.echo(gap, err=True)
    if verify and _check(f"{len(found.runs)} runs", *found.files(), to_stderr=as_json):
        raise typer.Exit(EXIT_BROKEN)


def verify(
    words: Annotated[
        list[str] | None,
        options.words(
            "TARGET: a job, such as data/a5-train, its run directory or manifest; shards come with their stream. All "
            "jobs if none is given."
        ),
    ] = None,
    config: options.Config = None,
    results: options.Results = options.RESULTS,
) -> None:
    """Recompute the sha256 of every file of an experiment's finished jobs.

    It lists each file that is missing or changed, and the commands that rebuild them. The exit code is 1 if there are
    any.

    **Example**

        implicit-llm verify demo
        implicit-llm verify demo data/a5-train train/a5-implicit-s1/free
    """
    plan, targets = options.choose(words, config, results)
    nodes = with_shards(plan, targets) if targets else [plan.nodes[key] for key in plan.wanted]
    manifests = {node.key: path for node in nodes if (path := plan.recorded(node)) is not None}
    files, damaged = recorded_files(manifests.items())
    if unfinished := len(nodes) - len(manifests):
        typer.echo(f"not made yet: {unfinished} of {len(nodes)} jobs")
    if broken := _check(f"{len(manifests)} jobs", files, damaged):
        if jobs := [item.job for item in broken if not item.is_unreadable]:
            typer.echo("\n    ".join(["To make them again:", *rebuild_commands(plan, jobs, jobs)]))
        raise typer.Exit(EXIT_BROKEN)


def _check(
    what: str, files: Sequence[RecordedFile], damaged: Sequence[Broken], *, to_stderr: bool = False
) -> list[Broken]:
    """Check the files, and print and return the broken ones."""
    broken = [*damaged, *check_files(files)]
    size = size_text(sum(file.record.size for file in files))
    typer.echo(f"{what}, {len(files):,} files, {size}: {len(broken) or 'none'} broken", err=to_stderr)
    for item in broken:
        typer.echo(f"broken {item.path}: {item.why} (job {item.job})", err=to_stderr)
    return broken


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
    ] = options.RESULTS,
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
