"""The command `status`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from implicit_llm_workflow.commands import options

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from implicit_llm_workflow.results.status_view import Snapshot


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
    from implicit_llm_workflow.results import status_view
    from implicit_llm_workflow.results.explain import upstream_closure
    from implicit_llm_workflow.results.observed import Observer

    plan = options.make_plan(config, results)
    wanted = tuple(plan.find(target).key for target in targets or ())
    keys, observer = upstream_closure(plan, wanted or plan.wanted), Observer(plan, submitit_folder)

    def look() -> Snapshot:
        return status_view.Snapshot(
            plan, observer.observe(keys), observer.driver(), wanted, lines, observer.failed_preflights()
        )

    console = options.wide_console()
    if as_json:
        options.print_json(status_view.as_json(look()))
    elif jobs:
        console.print(status_view.job_table(look()))
        console.print(status_view.one_line(look()))
    elif watch:
        _watch(look, console, every_s)
    else:
        _show(look(), console)


def _show(snapshot: Snapshot, console: Console) -> None:
    from implicit_llm_workflow.results.status_view import last_words, view

    console.print(view(snapshot, console.width))
    console.print(last_words(snapshot), soft_wrap=True)  # a command that is broken cannot be copied


def _watch(look: Callable[[], Snapshot], console: Console, every_s: float) -> None:
    """Until nothing moves, or Ctrl-C; then the whole once more."""
    import time
    from contextlib import nullcontext, suppress

    from rich.console import Group
    from rich.live import Live

    from implicit_llm_workflow.results.status_view import last_words, one_line, view

    snapshot, told = look(), ""
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with live or nullcontext(), suppress(KeyboardInterrupt):
        while snapshot.is_moving:
            if live is not None:
                live.update(Group(view(snapshot, console.width), last_words(snapshot)), refresh=True)
            elif one_line(snapshot) != told:
                told = one_line(snapshot)
                console.print(f"{time.strftime('%H:%M:%S')} {told}", markup=False)
            time.sleep(every_s)
            snapshot = look()
    _show(snapshot, console)
