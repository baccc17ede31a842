"""The command `implicit-llm`. Modules are imported when a command runs, so that `--help` needs no torch."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from implicit_llm_workflow.commands.accept import accept
from implicit_llm_workflow.commands.compare import compare
from implicit_llm_workflow.commands.estimate import estimate
from implicit_llm_workflow.commands.evaluate import evaluate
from implicit_llm_workflow.commands.explain import explain
from implicit_llm_workflow.commands.gc import gc
from implicit_llm_workflow.commands.init import init
from implicit_llm_workflow.commands.lineage import lineage
from implicit_llm_workflow.commands.mlflow import mlflow
from implicit_llm_workflow.commands.prefetch import prefetch
from implicit_llm_workflow.commands.report import report
from implicit_llm_workflow.commands.runs import runs
from implicit_llm_workflow.commands.stages import data, preflight, train
from implicit_llm_workflow.commands.status import status
from implicit_llm_workflow.commands.try_it import try_it
from implicit_llm_workflow.commands.verify import verify
from implicit_llm_workflow.launching.launch import tell_who_started_this
from implicit_llm_workflow.project_dirs import require_own_package

EXIT_FAILURE = 1

app = typer.Typer(
    help="Implicit language models: data sets, training, evaluation and report, one job at a time.\n\n"
    "Whole experiments are run by Snakemake, which calls these commands:\n\n"
    "    snakemake --profile profiles/local --configfile workflow/config/demo.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("try", rich_help_panel="First steps")(try_it)
_PANELS = {
    "First steps": (init,),
    "Experiments": (status, explain, estimate, accept, prefetch, gc),
    "Results": (report, runs, compare, lineage, verify, mlflow),
    "Jobs": (data, train, evaluate, preflight),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, rich_help_panel=_panel)
        else:
            app.command(rich_help_panel=_panel)(_command)


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
