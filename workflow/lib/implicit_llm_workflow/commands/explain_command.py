"""The sub-command `explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from implicit_llm_workflow.commands import experiment_options as options


def explain(
    targets: Annotated[
        list[str] | None,
        options.targets(
            "Jobs, such as train/a5-implicit-s1/free, their run directories or manifests, fingerprints or MLflow "
            "runs. The whole experiment if none is given."
        ),
    ] = None,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
    as_json: Annotated[bool, options.as_json()] = False,
) -> None:
    """Say which jobs the next run will do, why each of them, what they take, and what stays.

    Why: the settings, the modules and functions, or the inputs that changed. Times are those of earlier runs, or else
    of `implicit-llm estimate`.

    **Example**

        implicit-llm explain
        implicit-llm explain train/a5-implicit-s1/free --config demo --json
    """
    import json

    from implicit_llm_workflow.results import explain_table
    from implicit_llm_workflow.results.explain import explain as explained

    plan = options.make_plan(config, results)
    found = explained(plan, targets or ())
    if as_json:
        values = {"experiment": plan.experiment.name, **explain_table.as_json(found)}
        typer.echo(json.dumps(values, indent=1, ensure_ascii=False))
        return
    console = options.wide_console()
    if found.running:
        console.print(explain_table.running_table(found.running))
    code = list(explain_table.code_lines(found.running))
    if code:
        console.print("Code that changed:")
    for line in [*code, *explain_table.summary_lines(found)]:
        console.print(line, markup=False, soft_wrap=True)
