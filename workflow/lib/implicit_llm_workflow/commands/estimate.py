"""The command `estimate`."""

from __future__ import annotations

from typing import Annotated

import typer

from implicit_llm_workflow.commands import options


def estimate(
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
    hardware: Annotated[
        str | None,
        typer.Option(help="GPU of all training jobs instead of the assigned one, such as h200.", metavar="NAME"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each training job instead of the assigned.", metavar="N")
    ] = None,
    as_json: Annotated[bool, options.as_json()] = False,
) -> None:
    """Estimate what an experiment takes: FLOPs, hours, memory of a GPU, disk, tokenisation.

    A job that ran before, or another seed of it, counts with its time. Other hours come from measured training steps,
    or else from FLOPs and an assumed share of the GPU's peak, which is marked. Evaluations have no estimate.

    **Example**

        implicit-llm estimate --config paper
        implicit-llm estimate --config h200 --hardware h200 --gpus 1 --json
    """
    from implicit_llm_workflow.estimates import table
    from implicit_llm_workflow.estimates.cost import CostModel

    plan = options.make_plan(config, results)
    costs = CostModel(plan, hardware, gpus)
    training, data = table.training_estimates(plan, costs), table.data_estimates(plan, costs)
    if as_json:
        options.print_json({"experiment": plan.experiment.name, **table.as_json(training, data, costs)})
        return
    console = options.wide_console()
    console.print(table.training_table(training))
    if data:
        console.print(table.data_table(data))
    for line in table.notes(training, costs):
        console.print(line)
