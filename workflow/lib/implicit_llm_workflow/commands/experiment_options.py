"""What commands that look at an experiment have in common: their options, its plan, and the console they print to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from implicit_llm_workflow.planning.plan import Plan

Config = Annotated[
    str, typer.Option(help="Experiment: a file, or the name of one of workflow/config/.", metavar="FILE")
]
Results = Annotated[Path, typer.Option(help="Folder of all results.", metavar="DIR")]
SubmititFolder = Annotated[
    Path | None,
    typer.Option(
        help="Where the executor keeps its records, if a profile sets `submitit-folder`.",
        metavar="DIR",
        show_default=False,
    ),
]
DEFAULT_CONFIG = "demo"
DEFAULT_RESULTS = Path("results")


def targets(help_text: str) -> Any:
    """The argument of a command that takes jobs."""
    return typer.Argument(help=help_text, metavar="[TARGET]...", show_default=False)


def as_json(what: str = "one entry for each job") -> Any:
    """The option --json; `what` is printed."""
    return typer.Option("--json", help=f"Print JSON, {what}.")


def wide_console(is_error: bool = False) -> Console:
    """As wide as the terminal; into a file or a pipe wide enough for whole lines. `is_error`: on stderr."""
    from rich.console import Console

    console = Console(highlight=False, stderr=is_error)
    return console if console.is_terminal else Console(width=240, highlight=False, stderr=is_error)


def make_plan(config: str, results: Path) -> Plan:
    from implicit_llm_workflow.experiment_files.config_files import experiment_path
    from implicit_llm_workflow.experiment_files.experiment import load_experiment
    from implicit_llm_workflow.planning.plan import Plan

    return Plan(load_experiment(experiment_path(config)), results)
