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
    from implicit_llm_workflow.results import explain_table
    from implicit_llm_workflow.results.explain import explain as explained

    plan = options.make_plan(config, results)
    if identity:
        if len(targets or ()) != 1:
            raise OneJobNeeded("--identity: needs one job; name it, for example `explain --identity data/a5-train`")
        typer.echo(plan.identities[plan.find((targets or [])[0]).key].to_json())
        return
    found = explained(plan, targets or ())
    if as_json:
        values = {"experiment": plan.experiment.name, **explain_table.as_json(found)}
        options.print_json(values)
        return
    console = options.wide_console()
    if found.running:
        console.print(explain_table.running_table(found.running))
    code = list(explain_table.code_lines(found.running))
    if code:
        console.print("Code that changed:")
    for line in [*code, *explain_table.summary_lines(found)]:
        console.print(line, markup=False, soft_wrap=True)
