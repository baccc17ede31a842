"""The command `report`: as a job of the workflow, or from the results that are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from implicit_llm_workflow.commands import options
from implicit_llm_workflow.commands.job import Inputs, Job, JobDir, JobIdentity, Log, OptionError, parse_inputs, run_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from implicit_llm_workflow.node import Node
    from implicit_llm_workflow.planning.plan import Plan
    from implicit_llm_workflow.results.missing import MissingResult

EXIT_MISSING = 2
_STYLE = {"failed": "red", "stale": "yellow", "missing": "dim"}


def report(
    run_dir: JobDir = None,
    identity: JobIdentity = None,
    inputs: Inputs = None,
    log: Log = None,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
    only: Annotated[
        str | None,
        typer.Option(help="A figure or table of the paper instead of all, such as figure_1_right.", metavar="NAME"),
    ] = None,
    missing: Annotated[
        bool, options.flag("--missing", "Make the report from the fresh results, and name in it those that are not.")
    ] = False,
    numbers: Annotated[
        bool, options.flag("--numbers", "Print the main numbers that are there, and where report and MLflow are.")
    ] = False,
    lists: Annotated[
        bool, options.flag("--list", "List the figures and tables of the paper, which Snakemake makes by name.")
    ] = False,
    as_json: Annotated[bool, options.as_json("one entry for each figure and table of --list")] = False,
) -> None:
    """Make the report of an experiment: one HTML page, its figures, and the verdict on every claim.

    With `--config` alone it says which of its results are missing, stale or failed, and what makes them (exit code 2 if
    there are any). With `--missing` as well it makes the report without them, in a folder of its own.

    **Example**

        implicit-llm report --config demo --numbers
        implicit-llm report --config miniature --missing
        implicit-llm report --config paper --list
        implicit-llm report --config paper --only figure_1_right --missing
    """
    if run_dir is not None and identity is not None:
        _run(Job("report", run_dir, identity, inputs, log))
        return
    if run_dir is not None or identity is not None or inputs:
        raise OptionError("--run-dir and --identity: belong together; give both, or --config instead")
    from implicit_llm_contracts.hints import nearest
    from implicit_llm_workflow.experiment_files.excerpts import STAGE as EXCERPT
    from implicit_llm_workflow.results.missing import find_missing, report_with_missing

    plan = options.make_plan(config, results)
    if lists or as_json:
        _list(plan, as_json=as_json)
        return
    if numbers:
        _print_numbers(plan)
        return
    name = (only or "").removeprefix(f"{EXCERPT}/")
    if name and name not in plan.experiment.excerpts:
        hint = nearest(name, plan.experiment.excerpts, f"`implicit-llm report --list --config {config}` lists them")
        raise OptionError(f"--only {only}: is no figure or table of the experiment; {hint}")
    page = plan.find(name or "report")
    found = find_missing(plan, page)
    _show(found, len(page.upstream))
    if not missing:
        _say_whether_there(plan, page, found)
        return
    if len(found) == len(page.upstream):
        raise OptionError(f"--missing: no result is fresh; type: {plan.command_for([page])}")
    wanted, inputs = report_with_missing(plan, page, found)
    folder = plan.run_dir(page).with_name(wanted.name)
    run_job(Job("report", folder, wanted.to_json(), inputs, log))
    options.wide_console().print(f"{len(found)} of {len(page.upstream)} results are not in it", soft_wrap=True)
    options.wide_console().print(str(folder / "index.html"), soft_wrap=True)


def _run(job: Job) -> None:
    """Make the page. Raises: StaleNumbers that names all of them, where an input is not what was asked for."""
    try:
        run_job(job)
    except Exception as error:
        # The stage stops at the first input that differs. Its library is not imported here to ask for the class.
        if type(error).__name__ != "ManifestError":
            raise
        from implicit_llm_contracts.runs.identity import Identity
        from implicit_llm_workflow.results.missing import stale_error, stale_numbers

        identity = Identity.parse(job.identity)
        found = stale_numbers(identity.upstream, parse_inputs(job.inputs or []))
        if not found:
            raise
        raise stale_error(found, str(identity.config.get("experiment"))) from error


def _list(plan: Plan, *, as_json: bool) -> None:
    """Each figure and table with the number of jobs behind it and of the fresh ones, and the state of its own page."""
    from collections import Counter
    from dataclasses import asdict

    from rich.table import Table

    from implicit_llm_workflow.experiment_files.excerpts import STAGE
    from implicit_llm_workflow.results.explain import upstream_closure

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
        options.print_json({"experiment": plan.experiment.name, "excerpts": listed})
    else:
        options.wide_console().print(table if listed else "the experiment names no figures or tables of the paper")


def _print_numbers(plan: Plan) -> None:
    from implicit_llm_workflow.results.numbers import number_tables, where_to_look

    console = options.wide_console()
    for table in number_tables(plan):
        console.print(table)
    for line in where_to_look(plan):
        console.print(line)


def _say_whether_there(plan: Plan, page: Node, found: Sequence[MissingResult]) -> None:
    """Raises: Exit where the page is not there or stale."""
    if found or plan.statuses[page.key].state != "fresh":
        more = ", or add --missing for a report without them" if found else ""
        state = "is not whole" if found else "is not there"
        options.wide_console().print(f"the report {state}; type: {plan.command_for([page])}{more}", soft_wrap=True)
        raise typer.Exit(EXIT_MISSING)
    options.wide_console().print(f"the report is there: {plan.run_dir(page) / 'index.html'}", soft_wrap=True)


def _show(missing: Sequence[MissingResult], number: int) -> None:
    """A line for each of the missing results, which are those of `number` inputs."""
    from rich.markup import escape
    from rich.table import Table

    from implicit_llm_workflow.results.missing import numbers_of

    if not missing:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("missing result", "numbers", "state", "why"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "state")
    for item in missing:
        style, numbers = _STYLE[item.state], numbers_of(item.job, item.config.get("kind"))
        table.add_row(item.job, numbers, f"[{style}]{item.state}[/{style}]", escape(item.why))
    options.wide_console().print(f"{len(missing)} of the report's {number} results are missing")
    options.wide_console().print(table)
