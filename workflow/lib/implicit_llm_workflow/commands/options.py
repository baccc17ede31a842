"""What commands that look at an experiment have in common: their options, its plan, and the console they print to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.experiment_files.config_files import DEFAULT_EXPERIMENT, experiment_path
from implicit_llm_workflow.project_dirs import SNAKEFILE, nearest_with

if TYPE_CHECKING:
    from rich.console import Console

    from implicit_llm_workflow.planning.plan import Plan

Config = Annotated[
    str, typer.Option(help="Experiment: a file, or the name of one of workflow/config/.", metavar="FILE")
]
Results = Annotated[Path, typer.Option(help="Folder of all results.", metavar="DIR")]
DEFAULT_CONFIG = DEFAULT_EXPERIMENT
DEFAULT_RESULTS = Path("results")


def targets(help_text: str) -> Any:
    """The argument of a command that takes jobs."""
    return typer.Argument(help=help_text, metavar="TARGET", show_default=False)


def flag(name: str, help_text: str) -> Any:
    """An option that takes no value; Typer would show one, `<bool>`."""
    return typer.Option(name, help=help_text, metavar="")


def as_json(what: str = "one entry for each job") -> Any:
    """The option --json; `what` is printed."""
    return flag("--json", f"Print JSON, {what}.")


def print_json(values: Any) -> None:
    typer.echo(json.dumps(values, indent=1, ensure_ascii=False))


def wide_console(is_error: bool = False) -> Console:
    """As wide as the terminal; into a file or a pipe wide enough for whole lines. `is_error`: on stderr."""
    from rich.console import Console

    console = Console(highlight=False, stderr=is_error)
    return console if console.is_terminal else Console(width=240, highlight=False, stderr=is_error)


class OptionError(UserError):
    """A command-line option or argument cannot be understood."""


class NoResults(UserError):
    """There is no such folder of results."""


def make_plan(config: str, results: Path) -> Plan:
    """The plan of an experiment. Raises: NoResults rather than show a mistyped folder as one where nothing was done."""
    from implicit_llm_workflow.experiment_files.experiment import load_experiment
    from implicit_llm_workflow.planning.plan import Plan

    _require_results(results)
    return Plan(load_experiment(experiment_path(config)), results)


def _require_results(results: Path) -> None:
    """A folder of results is there, or its place before the first run: beside a Snakefile. Raises: NoResults."""
    is_before_first_run = results.name == DEFAULT_RESULTS.name and (results.parent / SNAKEFILE).is_file()
    if results.is_dir() or is_before_first_run:
        return
    root = nearest_with(SNAKEFILE, Path.cwd())
    if root is None:
        advice = "work in the folder of the Snakefile, or name its results by --results DIR"
    else:
        advice = f"the results of {root} are in {root / DEFAULT_RESULTS}: type `cd {root}` and leave out --results"
    raise NoResults(f"{results}: there is no such folder of results; {advice}")
