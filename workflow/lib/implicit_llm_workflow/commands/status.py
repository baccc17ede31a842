"""The command `status`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from implicit_llm_workflow.commands import options

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from implicit_llm_workflow.results.status import Snapshot


def status(
    targets: Annotated[
        list[str] | None,
        options.targets(
            "Jobs, such as evaluate/a5-implicit-s1/free/word-problem, their run directories, fingerprints or "
            "MLflow runs, with all that they are made from. The whole experiment if none is given."
        ),
    ] = None,
    config: options.Config = options.DEFAULT_CONFIG,
    jobs: Annotated[
        bool, options.flag("--jobs", "List every job with its fingerprint, and why it is not done.")
    ] = False,
    watch: Annotated[bool, options.flag("--watch", "Refresh until all jobs finish or nothing changes.")] = False,
    every_s: Annotated[
        float, typer.Option(help="Seconds between two refreshes of --watch.", metavar="SECONDS", min=0.1)
    ] = 5.0,
    lines: Annotated[int, typer.Option(help="Log lines to show for each failed job.", metavar="N", min=0)] = 8,
    results: options.Results = options.DEFAULT_RESULTS,
    submitit_folder: options.SubmititFolder = None,
    as_json: Annotated[bool, options.as_json()] = False,
) -> None:
    """Show how far an experiment is: its stages, what runs, what failed and why, and what to type next.

    A done job was made from the current settings and code, a stale one from others. A queued job is submitted, or next
    in turn of a driver. A waiting job waits for other jobs, or for a driver. The next snakemake resumes a stopped job.
    The driver is the snakemake that starts the jobs.

    The option --watch redraws on a terminal. Into a file or a pipe it writes a line for each change, then the whole.

    **Example**

        implicit-llm status
        implicit-llm status --jobs --config demo
        implicit-llm status train/a5-implicit-s1/free --config demo --watch
        implicit-llm status --config paper --json | jq .stages
    """
    from implicit_llm_workflow.results import status as view
    from implicit_llm_workflow.results.explain import upstream_closure

    plan, console = options.make_plan(config, results), options.wide_console()
    wanted = tuple(plan.find(target).key for target in targets or ())
    keys = upstream_closure(plan, wanted or plan.wanted)

    def look() -> view.Snapshot:
        return view.Snapshot.take(plan, keys, wanted, lines, submitit_folder)

    if as_json:
        options.print_json(view.as_json(look()))
    elif jobs:
        snapshot = look()
        console.print(view.headline(snapshot), soft_wrap=True)
        console.print(view.job_table(snapshot))
    else:
        snapshot = _watched(look, console, every_s) if watch else look()
        console.print(view.view(snapshot, console.width))
        console.print(view.last_words(snapshot), soft_wrap=True)  # a command that is broken cannot be copied


def _watched(look: Callable[[], Snapshot], console: Console, every_s: float) -> Snapshot:
    """Look until nothing moves, or Ctrl-C. Returns: the last look."""
    import time
    from contextlib import nullcontext, suppress

    from rich.console import Group
    from rich.live import Live

    from implicit_llm_workflow.results import status as view

    snapshot, printed = look(), ""
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with live or nullcontext(), suppress(KeyboardInterrupt):
        while snapshot.is_moving:
            if live is not None:
                live.update(Group(view.view(snapshot, console.width), view.last_words(snapshot)), refresh=True)
            elif (text := view.counts_text(snapshot.jobs.values())) != printed:
                printed = text
                console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False)
            time.sleep(every_s)
            snapshot = look()
    return snapshot
