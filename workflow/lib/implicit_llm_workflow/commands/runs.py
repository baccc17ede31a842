"""The command `runs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from implicit_llm_contracts.hints import natural
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.commands import options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from implicit_llm_workflow.planning.plan import Plan
    from implicit_llm_workflow.results.job_look import Observed

SORTED_BY = ("file", "name", "status", "loss", "age")


class UnknownChoice(UserError):
    """A filter that no run can meet, or an order that there is not."""


def _filter(what: str, metavar: str = "NAME") -> Any:
    return typer.Option(help=f"{what} May be given several times.", metavar=metavar, show_default=False)


def runs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or patterns such as 'a5-*'. All if none is given.", metavar="NAME", show_default=False
        ),
    ] = None,
    config: options.Config = options.DEFAULT_CONFIG,
    task: Annotated[list[str] | None, _filter("word_problem, catbabi or language_model.")] = None,
    family: Annotated[list[str] | None, _filter("Of the model: mamba2 or llama3.")] = None,
    phase: Annotated[list[str] | None, _filter("Of the curriculum, such as free.")] = None,
    seed: Annotated[list[int] | None, _filter("A number.", "N")] = None,
    status: Annotated[list[str] | None, _filter("running, queued, failed, stopped, stale, waiting or done.")] = None,
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
        implicit-llm runs 'a5-*' --phase free --status running --status failed
        implicit-llm runs --config miniature --task language_model --family llama3 --sort loss
        implicit-llm runs --json | jq '.runs[] | select(.status == "failed") | .why'
    """
    from implicit_llm_workflow.results import runs_table
    from implicit_llm_workflow.results.observed import Observer

    if sort not in SORTED_BY:
        raise UnknownChoice(f"--sort {sort}: is not an order; choose one of {', '.join(SORTED_BY)}")
    plan = options.make_plan(config, results)
    keys = chosen_keys(plan, names or (), {"task": task, "family": family, "phase": phase, "seed": seed})
    jobs = list(Observer(plan, submitit_folder).observe(keys).values())
    jobs = _ordered([job for job in jobs if job.state in _states(status)], sort)
    if as_json:
        values = {"experiment": plan.experiment.name, "runs": [runs_table.as_json(job) for job in jobs]}
        options.print_json(values)
        return
    console = options.wide_console()
    console.print(runs_table.runs_table(jobs, console.width))
    console.print(_counts(jobs), markup=False)


def chosen_keys(plan: Plan, names: Iterable[str], filters: dict[str, Sequence[Any] | None]) -> list[str]:
    """The models that meet all filters. Raises: UnknownChoice for a name or a value that no model has."""
    from implicit_llm_workflow.results.run_names import MODEL_STAGES

    about = {key: _about(key, node.config) for key, node in plan.nodes.items() if node.stage in MODEL_STAGES}
    for option, values in filters.items():
        for value in values or ():
            _require(value, {item[option] for item in about.values()} - {None}, f"--{option}", plan)
    chosen = [
        key
        for key, item in about.items()
        if all(not values or item[option] in values for option, values in filters.items())
    ]
    return _named(plan, chosen, list(names), about)


def _about(key: str, config: Any) -> dict[str, Any]:
    from implicit_llm_workflow.results.run_names import run_and_phase

    run, phase = run_and_phase(key)
    model = config.get("model") or {}
    family = str(model.get("model_type") or "").removeprefix("implicit_") or None
    return {"run": run, "task": config.get("task"), "family": family, "phase": phase, "seed": config.get("seed")}


def _named(plan: Plan, keys: list[str], patterns: list[str], about: dict[str, dict[str, Any]]) -> list[str]:
    from fnmatch import fnmatchcase

    if not patterns:
        return keys

    def names_of(key: str) -> tuple[str, ...]:
        item = about[key]
        return (key, item["run"], f"{item['run']}/{item['phase']}", str(item["run"]).rpartition("-s")[0])

    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for key in about for name in names_of(key)):
            _require(pattern, {item["run"] for item in about.values()}, "name", plan)
    return [key for key in keys if any(fnmatchcase(name, pattern) for name in names_of(key) for pattern in patterns)]


def _require(value: Any, valid: set[Any], option: str, plan: Plan) -> None:
    from implicit_llm_contracts.hints import nearest

    if value not in valid:
        hint = nearest(str(value), map(str, valid))
        raise UnknownChoice(f"{option} {value}: experiment {plan.experiment.name} has no such run; {hint}")


def _states(wanted: Sequence[str] | None) -> Sequence[str]:
    from implicit_llm_contracts.hints import nearest
    from implicit_llm_workflow.results.job_look import STATES

    for state in wanted or ():
        if state not in STATES:
            raise UnknownChoice(f"--status {state}: is not a status; {nearest(state, STATES)}")
    return wanted or STATES


def _ordered(jobs: list[Observed], sort: str) -> list[Observed]:
    from implicit_llm_workflow.results.job_look import STATES

    order: dict[str, Any] = {
        "name": lambda job: natural(job.node.name),
        "status": lambda job: STATES.index(job.state),
        "loss": lambda job: job.metrics.get("loss", float("inf")),
        "age": lambda job: -(job.unix_s or 0.0),
    }
    return sorted(jobs, key=order[sort]) if sort in order else jobs


def _counts(jobs: list[Observed]) -> str:
    from collections import Counter

    from implicit_llm_workflow.results.job_look import STATES

    counts: Counter[str] = Counter(job.state for job in jobs)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "no run"
