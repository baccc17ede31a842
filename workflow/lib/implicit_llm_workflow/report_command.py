"""The sub-command `report`: as a job of the workflow, or from what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from implicit_llm_workflow.evaluate_command import JobDir, JobIdentity, JobInputs
from implicit_llm_workflow.job import Job, Log, OptionError, run_job
from implicit_llm_workflow.plan_commands import (
    DEFAULT_CONFIG,
    DEFAULT_RESULTS,
    Config,
    Results,
    make_plan,
    wide_console,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from implicit_llm_workflow.holes import Hole

EXIT_HOLES = 2
_STYLE = {"failed": "red", "stale": "yellow", "missing": "dim"}


def report(
    run_dir: JobDir = None,
    identity: JobIdentity = None,
    inputs: JobInputs = None,
    log: Log = None,
    config: Config = DEFAULT_CONFIG,
    results: Results = DEFAULT_RESULTS,
    holes: Annotated[
        bool, typer.Option("--holes", help="Make the report from the fresh results, and name in it those that are not.")
    ] = False,
) -> None:
    """Make the report of an experiment: one HTML page, its figures, and the verdict on every claim.

    With `--config` alone it says which of its results are missing, stale or failed, and what makes them (exit code 2 if
    there are any). With `--holes` as well it makes the report without them, in a folder of its own.

    **Example**

        implicit-llm report --config miniature
        implicit-llm report --config miniature --holes
    """
    if run_dir is not None and identity is not None:
        run_job(Job("report", run_dir, identity, inputs, log))
        return
    if run_dir is not None or identity is not None or inputs:
        raise OptionError("--run-dir and --identity: belong together; give both, or --config instead")
    from implicit_llm_workflow.holes import find_holes, report_with_holes

    plan = make_plan(config, results)
    found = find_holes(plan)
    _show(found)
    if not holes:
        made = plan.run_dir(plan.nodes["report"]) / "index.html"
        if found or plan.statuses["report"].state != "fresh":
            command = plan.command_for([plan.nodes["report"]])
            more = ", or add --holes for a report without them" if found else ""
            wide_console().print(f"the report is not there; type: {command}{more}", soft_wrap=True)
            raise typer.Exit(EXIT_HOLES)
        wide_console().print(f"the report is there: {made}", soft_wrap=True)
        return
    if len(found) == len(plan.nodes["report"].upstream):
        raise OptionError(f"--holes: no result is fresh; type: {plan.command_for([plan.nodes['report']])}")
    folder = plan.root / "report-with-holes"
    wanted, options = report_with_holes(plan, found)
    run_job(Job("report", folder, wanted.to_json(), options, log))
    wide_console().print(f"{len(found)} of {len(plan.nodes['report'].upstream)} results are not in it", soft_wrap=True)
    wide_console().print(str(folder / "index.html"), soft_wrap=True)


def _show(holes: Sequence[Hole]) -> None:
    """A line for each, and the command that makes it."""
    from rich.markup import escape
    from rich.table import Table

    if not holes:
        return
    table = Table("result", "state", "why", "made by", box=None, pad_edge=False)
    for hole in holes:
        style = _STYLE[hole.state]
        table.add_row(hole.job, f"[{style}]{hole.state}[/{style}]", escape(hole.why), escape(hole.command))
    wide_console().print(table)
