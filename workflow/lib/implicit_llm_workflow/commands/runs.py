"""The command `runs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from implicit_llm_contracts.hints import natural, nearest
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.commands import options

if TYPE_CHECKING:
    from implicit_llm_workflow.planning.plan import Plan
    from implicit_llm_workflow.results.job_states import ObservedJob

SORTED_BY = ("file", "name", "status", "loss", "age")


class UnknownChoice(UserError):
    """A filter that no run can meet, or an order that there is not."""


def runs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Runs, with a phase (a5-implicit-s1/free) or without, or patterns such as '*-s1/free'. All if none is "
            "given.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    config: options.Config = options.DEFAULT_CONFIG,
    status: Annotated[
        list[str] | None,
        typer.Option(
            help="running, queued, failed, stopped, stale, waiting or done. May be given several times.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(help=f"By {', '.join(SORTED_BY)}. `file`: as in the experiment.", metavar="ORDER"),
    ] = "file",
    results: options.Results = options.DEFAULT_RESULTS,
    submitit_folder: options.SubmititFolder = None,
    as_json: Annotated[bool, options.as_json("one entry for each run")] = False,
) -> None:
    """List the models of an experiment, one line for each phase of a run: how far it is, and how healthy.

    Steps count over the whole curriculum. Loss, residual (the largest of a batch), iter (solver iterations a token) and
    unconv (share of the tokens that did not converge) are the last ones in the journal. For a finished phase they are
    means over its last 50 steps. Age is the time since the run last wrote something. The next snakemake resumes a
    stopped run. The command reads files only, so you can use it while jobs write.

    **Example**

        implicit-llm runs
        implicit-llm runs 'a5-*/free' --status running --status failed
        implicit-llm runs --config miniature '*llama3*' --sort loss
        implicit-llm runs --json | jq '.runs[] | select(.status == "failed") | .why'
    """
    from implicit_llm_workflow.results import status as view
    from implicit_llm_workflow.results.job_states import STATES, observe

    if sort not in SORTED_BY:
        raise UnknownChoice(f"--sort {sort}: is not an order; choose one of {', '.join(SORTED_BY)}")
    for state in status or ():
        if state not in STATES:
            raise UnknownChoice(f"--status {state}: is not a status; {nearest(state, STATES)}")
    plan = options.make_plan(config, results)
    chosen = observe(plan, chosen_keys(plan, names or []), submitit_folder).values()
    jobs = _ordered([job for job in chosen if job.state in (status or STATES)], sort)
    if as_json:
        options.print_json({"experiment": plan.experiment.name, "runs": [*map(view.job_json, jobs)]})
        return
    console = options.wide_console()
    console.print(view.counts_text(jobs), markup=False)
    console.print(view.runs_table(jobs, console.width))


def chosen_keys(plan: Plan, patterns: list[str]) -> list[str]:
    """The models that match a pattern; all without one. Raises: UnknownChoice for a pattern that no model matches."""
    from fnmatch import fnmatchcase

    from implicit_llm_workflow.results.job_states import MODEL_STAGES, run_and_phase

    names: dict[str, list[str]] = {}
    for node in plan.nodes.values():
        if node.stage in MODEL_STAGES:
            run, phase = run_and_phase(node.key)
            names[node.key] = [node.key, run, f"{run}/{phase}", *([node.run] if node.run else [])]
    chosen: set[str] = set()
    for pattern in patterns:
        found = {key for key in names if any(fnmatchcase(name, pattern) for name in names[key])}
        if not found:
            hint = nearest(pattern, {run for _, run, *_ in names.values()})
            raise UnknownChoice(f"{pattern}: experiment {plan.experiment.name} has no such run; {hint}")
        chosen |= found
    return [key for key in names if key in chosen or not patterns]


def _ordered(jobs: list[ObservedJob], sort: str) -> list[ObservedJob]:
    from implicit_llm_workflow.results.job_states import STATES

    order: dict[str, Any] = {
        "name": lambda job: natural(job.node.name),
        "status": lambda job: STATES.index(job.state),
        "loss": lambda job: job.metrics.get("loss", float("inf")),
        "age": lambda job: -(job.unix_s or 0.0),
    }
    return sorted(jobs, key=order[sort]) if sort in order else jobs
