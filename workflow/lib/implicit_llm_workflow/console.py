"""The command `implicit-llm`. Modules are imported when a command runs, so that `--help` needs no torch."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from implicit_llm_workflow.commands import (
    accept_command,
    compare_command,
    estimate_command,
    evaluate_commands,
    excerpts_command,
    explain_command,
    gc_command,
    init_command,
    lineage_command,
    lm_eval_command,
    mlflow_command,
    plan_commands,
    prefetch_command,
    preflight_command,
    report_command,
    runs_command,
    stage_commands,
    status_command,
    verify_command,
)
from implicit_llm_workflow.launching.launch import tell_who_started_this
from implicit_llm_workflow.project_dirs import require_own_package

EXIT_FAILURE = 1

app = typer.Typer(
    help="Implicit language models: data sets, training, evaluation and report, one job at a time.\n\n"
    "Whole experiments are run by Snakemake, which calls these commands:\n\n"
    "    snakemake --profile profiles/local",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(evaluate_commands.evaluate, name="evaluate", rich_help_panel="Jobs")
app.add_typer(mlflow_command.mlflow, name="mlflow", rich_help_panel="Experiments")
_experiments = (
    init_command.init,
    *plan_commands.COMMANDS,
    status_command.status,
    runs_command.runs,
    compare_command.compare,
    excerpts_command.excerpts,
    explain_command.explain,
    accept_command.accept,
    lineage_command.lineage,
    estimate_command.estimate,
    prefetch_command.prefetch,
    verify_command.verify,
    gc_command.gc,
)
for _panel, _commands in (
    ("Experiments", _experiments),
    ("Jobs", (*stage_commands.COMMANDS, report_command.report, preflight_command.preflight)),
):
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
app.command("lm-eval", rich_help_panel="Jobs", context_settings=lm_eval_command.HANDED_OVER)(lm_eval_command.lm_eval)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"implicit-llm {version('implicit-llm')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. Can stand anywhere.", metavar="")
    ] = False,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, metavar="", help="Print the version and end."),
    ] = False,
) -> None:
    """Options of all commands; `main` has already taken --debug out."""
    require_own_package(Path.cwd())


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and end the process.

    Exit codes: 2 for what the user can put right, 75 when the job wants to be started again, 1 for anything else.
    """
    words = sys.argv[1:] if arguments is None else arguments
    is_debug = "--debug" in words
    try:
        app(args=[word for word in words if word != "--debug"], prog_name="implicit-llm")
    except Exception as error:
        tell_who_started_this(error)
        if is_debug:
            raise
        code = getattr(error, "exit_code", None)
        message = " ".join(str(error).split())
        if code is None:
            message = f"{type(error).__name__}: {message}; add --debug for the traceback"
        typer.echo(f"error: {message}", err=True)
        sys.exit(EXIT_FAILURE if code is None else code)
    sys.exit(0)


if __name__ == "__main__":
    main()
