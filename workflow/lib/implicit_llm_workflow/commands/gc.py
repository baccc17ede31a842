"""The command `gc`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.commands import options

if TYPE_CHECKING:
    from rich.console import Console

    from implicit_llm_workflow.planning.plan import Plan


class NothingNamed(UserError):
    """--payload lacks jobs, or jobs are named without --payload."""


def gc(
    targets: Annotated[
        list[str] | None,
        options.targets(
            "With --payload: finished jobs of data, train or checkpoint, their run directories, or a pattern such as "
            "'data/text-shard-*', which skips jobs that cannot be freed."
        ),
    ] = None,
    payload: Annotated[
        bool, options.flag("--payload", "Delete the models, shards and checkpoints of the targets.")
    ] = False,
    remove: Annotated[bool, options.flag("--remove", "Delete what is listed; without it nothing is deleted.")] = False,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
) -> None:
    """Free disk space: list what no job of the experiment wants, or delete the larger files of finished jobs.

    It lists run directories that the experiment does not name, and results of former settings or code that no manifest
    refers to. The option --payload keeps the manifest, metrics and journal, so that the job still counts as done. If a
    job needs the files later, they are rebuilt, and `implicit-llm explain` says so beforehand.

    **Example**

        implicit-llm gc
        implicit-llm gc --remove --config demo
        implicit-llm gc --payload train/a5-implicit-s1/unrolled
    """
    from implicit_llm_workflow.rules.snakemake_driver import hold_lock

    if bool(targets) != payload:
        raise NothingNamed(
            "--payload: goes with jobs, and jobs with --payload; type `implicit-llm gc --payload TARGET`"
        )
    plan, console = options.make_plan(config, results), options.wide_console()
    with hold_lock(plan.root / ".driver.lock") if payload or remove else nullcontext():
        if payload:
            _free(plan, targets or [], console)
        else:
            _list(plan, console, removes=remove)


def _list(plan: Plan, console: Console, *, removes: bool) -> None:
    from implicit_llm_workflow.results import garbage
    from implicit_llm_workflow.results.text import size_text

    found = garbage.find_garbage(plan)
    total = f"{len(found)} folders, {size_text(sum(item.size for item in found))}"
    end = "deleted" if removes else "type the same with --remove to delete them"
    for item in found:
        if removes:
            garbage.remove(item)
        console.print(f"{item.path}: {item.why} ({size_text(item.size)})", markup=False, soft_wrap=True)
    console.print(f"{total}: {end}" if found else "nothing to delete", soft_wrap=True)


def _free(plan: Plan, targets: list[str], console: Console) -> None:
    from implicit_llm_workflow.estimates.cost import CostModel
    from implicit_llm_workflow.results import garbage
    from implicit_llm_workflow.results.text import cost_text, size_text

    costs, freed = CostModel(plan), garbage.freeable(plan, targets)
    for key in freed:
        number, size = garbage.free(plan, key)
        took = cost_text(costs.recorded(plan.nodes[key]))
        console.print(f"freed: {key}, {number} files, {size_text(size)} (it took {took})", markup=False)
    console.print(f"{len(freed)} jobs freed; they count as done until a job needs their files", markup=False)
