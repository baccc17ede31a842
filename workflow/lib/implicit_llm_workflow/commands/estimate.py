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
        typer.Option(help="Card of all training jobs instead of the assigned one, such as h200.", metavar="NAME"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each training job instead of the assigned.", metavar="N")
    ] = None,
    as_json: Annotated[bool, options.as_json()] = False,
) -> None:
    """Print what an experiment will take: FLOPs, GPU-hours on each card, memory of a GPU, disk, tokenisation.

    The numbers come from the operations that the models need and from measured training steps; what is assumed is
    marked.

    **Example**

        implicit-llm estimate --config paper
        implicit-llm estimate --config h200 --hardware h200 --gpus 1 --json
    """
    from implicit_llm_workflow.estimates import estimate_table
    from implicit_llm_workflow.estimates.data_estimate import data_estimates, tokenisation_rate
    from implicit_llm_workflow.estimates.estimate import Choice, TrainingEstimator
    from implicit_llm_workflow.estimates.evaluation_estimate import evaluation_estimates
    from implicit_llm_workflow.estimates.hardware import read_hardware

    plan = options.make_plan(config, results)
    facts = read_hardware()
    rate = tokenisation_rate(facts)
    found = estimate_table.Estimate(
        training=TrainingEstimator(plan, facts, Choice(hardware, gpus)).all(),
        evaluation=evaluation_estimates(plan, facts),
        data=data_estimates(plan, facts, rate),
    )
    if as_json:
        values = {"experiment": plan.experiment.name, **estimate_table.as_json(found, facts, rate)}
        options.print_json(values)
        return
    console = options.wide_console()
    console.print(estimate_table.training_table(found.training, facts))
    console.print(estimate_table.evaluation_table(found.evaluation, facts))
    console.print(estimate_table.data_table(found.data))
    for line in estimate_table.notes(found.training, facts, rate):
        console.print(line)
