"""The command `accept`."""

from __future__ import annotations

from typing import Annotated

import typer

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.commands import options


class ReasonMissing(UserError):
    """An exception needs a reason."""


def accept(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Jobs, such as train/a5-implicit-s1/free, their run directories or manifests, or a pattern such as "
            "'train/*', which skips fresh results.",
            metavar="TARGET",
            show_default=False,
        ),
    ],
    why: Annotated[str, typer.Option(help="The reason; it stays with the result.", metavar="TEXT")] = "",
    revoke: Annotated[bool, options.flag("--revoke", "Undo acceptances: the results become stale again.")] = False,
    config: options.Config = options.DEFAULT_CONFIG,
    results: options.Results = options.DEFAULT_RESULTS,
) -> None:
    """Keep results although their code changed, and with them what was made from them.

    Only for code that was changed: another config or input makes another result. Holds until the code changes again.
    The manifest does not change. The reason is stored in accepted.json beside it, and shown in the lineage.

    **Example**

        implicit-llm accept 'train/*' --why "only a log line was reworded"
        implicit-llm accept --revoke 'train/*'
    """
    from implicit_llm_workflow.results.accept import chosen_jobs, new_acceptances, save_acceptance
    from implicit_llm_workflow.results.accept import revoke as take_back
    from implicit_llm_workflow.rules.snakemake_driver import hold_lock

    if not revoke and not why.strip():
        raise ReasonMissing("--why: is missing; say why the result holds although its code changed: --why TEXT")
    plan = options.make_plan(config, results)
    console = options.wide_console()
    with hold_lock(plan.root / ".driver.lock"):
        chosen = chosen_jobs(plan, targets)
        if revoke:
            for key in take_back(plan, chosen):
                console.print(f"revoked: {key}", markup=False)
            return
        plan.record_code()
        found = new_acceptances(plan, chosen, why.strip())
        for key, acceptance in found.items():
            save_acceptance(plan.run_dir(plan.nodes[key]), acceptance)
            what = "not recorded" if acceptance.changed is None else ", ".join(acceptance.changed)
            console.print(f"accepted: {key} (code {what})", markup=False, soft_wrap=True)
    stale = [key for key, status in options.make_plan(config, results).statuses.items() if status.state == "stale"]
    explain = f"implicit-llm explain --config {plan.experiment.source}"
    rest = f"{len(stale)} still stale; `{explain}` says why" if stale else "none stale"
    console.print(f"{len(found)} accepted; {rest}", markup=False)
