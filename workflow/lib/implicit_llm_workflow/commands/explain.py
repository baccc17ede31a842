"""The command `explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.commands import options


class OneJobNeeded(UserError):
    """An identity is that of one job."""


def explain(
    targets: Annotated[
        list[str] | None,
        options.targets(
            "Jobs, such as train/a5-implicit-s1/free, their run directories or manifests, fingerprints or MLflow "
            "runs. The whole experiment if none is given."
        ),
    ] = None,
    identity: Annotated[
        bool,
        options.flag("--identity", "Print what the result of one job depends on instead, as the job's own JSON."),
    ] = False,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
    as_json: Annotated[bool, options.as_json()] = False,
) -> None:
    """Show which jobs will run next, why, how long they take, and what stays.

    Why: the settings, the modules and functions, or the inputs that changed. Times are those of earlier runs, or else
    of `implicit-llm estimate`. With --identity: the config, code and input fingerprints from which a job's own
    fingerprint follows. A job that you run manually takes them as its --identity.

    **Example**

        implicit-llm explain
        implicit-llm explain train/a5-implicit-s1/free --config demo --json
        implicit-llm explain --identity data/a5-train --config demo > id.json
    """
    from implicit_llm_workflow.results import explain as why

    plan, wanted = options.make_plan(config, results), targets or []
    if identity:
        if len(wanted) != 1:
            raise OneJobNeeded("--identity: needs one job; name it, for example `explain --identity data/a5-train`")
        typer.echo(plan.identities[plan.find(wanted[0]).key].to_json())
        return
    found = why.explain(plan, wanted)
    if as_json:
        options.print_json({"experiment": plan.experiment.name, **why.as_json(found)})
        return
    console = options.wide_console()
    console.print(why.headline(found), soft_wrap=True)
    if found.running:
        console.print(why.running_table(found.running))
    for line in why.lines_below(found):
        console.print(line, markup=False, soft_wrap=True)
