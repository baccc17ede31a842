"""Define the command `implicit-llm`. Commands import torch, Snakemake and MLflow only when they run."""

import atexit
import shlex
import sys
import traceback
from gc import freeze, set_threshold
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from implicit_llm_contracts import __version__
from implicit_llm_contracts.runs import launched
from implicit_llm_workflow.commands.evaluate import evaluate
from implicit_llm_workflow.commands.experiments import accept, estimate, explain, gc, init, list_, prefetch, run, status
from implicit_llm_workflow.commands.jobs import job, preflight, train
from implicit_llm_workflow.commands.results import compare, lineage, missing, mlflow, report, verify
from implicit_llm_workflow.commands.try_it import try_it
from implicit_llm_workflow.experiment_files.yaml_files import experiment_names
from implicit_llm_workflow.launching.launch import end
from implicit_llm_workflow.project_dirs import LIBRARY, require_known_variables, require_own_package
from implicit_llm_workflow.results.listing import models

EXIT_FAILURE, EXIT_USAGE = 1, 2


class _PlainTypes:
    """A mixin that hides meaningless types in help texts, such as `<bool>` of --help or `<list[str]>` of arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if isinstance(param, TyperArgument):
                param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
            elif param.name in ("help", "install_completion", "show_completion"):
                param.metavar = ""
        return params


class Command(_PlainTypes, TyperCommand):
    """A command with a plain help text."""


class CommandGroup(_PlainTypes, TyperGroup):
    """A group of commands with a plain help text."""


app = typer.Typer(
    cls=CommandGroup,
    help="Implicit language models: run experiments, evaluate models, look at results. "
    "Start with `implicit-llm try`.\n\n"
    "`implicit-llm run demo` trains and evaluates small models, `implicit-llm list` shows what else there is. "
    "An experiment is the first argument of each command that takes one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PANELS: dict[str, dict[str, Any]] = {
    "First steps": {"try": try_it, "list": list_, "init": init},
    "Experiments": {
        "run": run,
        "status": status,
        "explain": explain,
        "estimate": estimate,
        "accept": accept,
        "prefetch": prefetch,
        "gc": gc,
    },
    "Results": {"report": report, "missing": missing, "compare": compare, "lineage": lineage, "verify": verify},
    "Models and machines": {"evaluate": evaluate, "mlflow": mlflow, "preflight": preflight},
    "": {"job": job, "train": train},  # hidden in `--help`; the rules call them for each job
}
for _panel, _commands in _PANELS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, cls=CommandGroup, rich_help_panel=_panel)
            for _inner in _command.registered_commands:
                _inner.cls = Command
        else:
            app.command(_name, cls=Command, rich_help_panel=_panel, hidden=not _panel)(_command)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"implicit-llm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. Works in any position.", metavar="")
    ] = False,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, metavar="", help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Define the options of all commands, and check the installed code and the environment variables before each.

    `main` has already removed --debug from the arguments. Raises: ForeignPackage, ConfigError.
    """
    require_own_package(Path.cwd())
    if context.invoked_subcommand not in _PANELS[""]:  # a job must not fail because of a variable of its node
        require_known_variables()


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and end the process.

    Exit codes: 2 for an error that the user can fix, 75 if the job must be started again, 1 for most other errors. A
    launcher ends with the code of the process that caused the end.
    """
    if arguments is None:  # the command has its own process: rarely scan the million imported objects for garbage
        set_threshold(20_000)
        atexit.register(freeze)  # no last scan at exit
        arguments = sys.argv[1:]
    is_debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]
    try:
        code = app(args=words, prog_name="implicit-llm", standalone_mode=False)
    except typer.Abort:
        sys.exit(EXIT_FAILURE)
    except Exception as error:
        launched.report_failure(error)
        if is_debug:
            traceback.print_exc()
        end(_tell(error, words))
    end(code if isinstance(code, int) else 0)


def _tell(error: Any, words: list[str]) -> int:
    """Print an error in one line and return the exit code; for a wrong command line, also print what to type."""
    code = getattr(error, "exit_code", None)
    message = str(error)
    if hasattr(error, "format_message"):  # a wrong command line; the message is empty if the help was shown
        if not (message := error.format_message().rstrip(".")):
            return EXIT_USAGE
        message += " Or type" if message.endswith("?") else "; type"
        message += f" `{error.ctx.command_path if error.ctx else 'implicit-llm'} --help`"
        message += _instead([word for word in words if not word.startswith("-")]) + _behind_dashes(error, words)
    message = " ".join(message.split())
    if isinstance(error, ModuleNotFoundError) and _is_imported_by_project(error):  # only the library is installed
        message, code = f"{message}; in the project's checkout type: pip install '.[all]'", EXIT_USAGE
    if code is None:
        message = f"{type(error).__name__}: {message}; add --debug for the traceback"
    typer.echo(f"error: {message}", err=True)
    return EXIT_FAILURE if code is None else code


def _is_imported_by_project(error: ModuleNotFoundError) -> bool:
    """Return whether the missing module is an optional package, which the project itself imports, not a plugin."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [name for name in modules if "importlib" not in name][-1].startswith(LIBRARY)


def _behind_dashes(error: Any, words: list[str]) -> str:
    """Return a hint for an unknown option of `run`: how to pass this option to Snakemake; "" for other errors."""
    option = str(getattr(error, "option_name", None) or "")
    is_unknown = option != "" and not getattr(error, "possibilities", None) and words[:1] == ["run"]
    at = next((at for at, word in enumerate(words) if is_unknown and word.startswith(option)), None)
    if at is None or "--" in words[:at]:
        return ""
    return f"; to pass it to Snakemake, type `implicit-llm {shlex.join([*words[:at], '--', *words[at:]])}`"


def _instead(words: list[str]) -> str:
    """Return a hint with the right command if `words` are like `demo` or `train demo`, or end with a model; else ""."""
    command, name = (words[0], words[-1]) if words else ("", "")
    if name in experiment_names() and command in (name, *_PANELS[""]):
        return f"; to run the experiment, type `implicit-llm run {name}`"
    model = next((one for one in models() if one.name == name), None)
    if model is None:
        return ""
    return f"; to evaluate the model, type `implicit-llm evaluate {model.kind.replace('_', '-')} --model {name}`"


if __name__ == "__main__":
    main()
