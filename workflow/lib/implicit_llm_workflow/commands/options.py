"""What commands that look at an experiment have in common: their options, its plan, and how they print."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from implicit_llm_contracts.runs import ConfigError, UserError, fill
from implicit_llm_workflow.experiment_files.yaml_files import DEFAULT_EXPERIMENT, experiment_path
from implicit_llm_workflow.project_dirs import SNAKEFILE, nearest_with

if TYPE_CHECKING:
    from rich.console import RenderableType

    from implicit_llm_workflow.planning.plan import Plan

Config = Annotated[
    str, typer.Option(help="Experiment: a file, or the name of one of workflow/config/.", metavar="FILE")
]
Results = Annotated[Path, typer.Option(help="Folder of all results.", metavar="DIR")]
DEFAULT_CONFIG = DEFAULT_EXPERIMENT
DEFAULT_RESULTS = Path("results")
_METAVARS: dict[Any, str] = {int: "N", float: "N", str: "NAME", Path: "DIR"}


def targets(help_text: str) -> Any:
    """The argument of a command that takes jobs."""
    return typer.Argument(help=help_text, metavar="TARGET", show_default=False)


def flag(name: str, help_text: str) -> Any:
    """An option that takes no value; Typer would show one, `<bool>`."""
    return typer.Option(name, help=help_text, metavar="")


def as_json(what: str = "one entry for each job") -> Any:
    """The option --json; `what` is printed."""
    return flag("--json", f"Print JSON, {what}.")


def field_type(cls: type, field: str) -> Any:
    """The type of a field of a dataclass, without its None."""
    hint = get_type_hints(cls)[field]
    is_optional = get_origin(hint) in (Union, UnionType)
    return next(member for member in get_args(hint) if member is not type(None)) if is_optional else hint


def field_options(cls: type, sentences: Mapping[str, str], panel: str) -> dict[str, inspect.Parameter]:
    """An option for each field of a dataclass that has a sentence: on or off for a flag, text for several values."""
    found = {}
    for name, text in sentences.items():
        hint, default = field_type(cls, name), cls.__dataclass_fields__[name].default  # type: ignore[attr-defined]
        metavar: str | None = "SECONDS" if name.endswith("_s") else _METAVARS.get(hint)
        if hint is bool:
            hint, default = Literal["on", "off"], "on" if default else "off"
        elif get_origin(hint) is tuple:
            hint, metavar = str, "A,B"
        option: Any = Annotated[hint | None, typer.Option(help=text, metavar=metavar, rich_help_panel=panel)]
        default = None if default is MISSING else default
        found[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
    return found


def given(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a dataclass's fields that were set; 0 sets none where the field has no default.

    Raises: OptionError for a value that the field does not take.
    """
    found = {}
    for name, value in values.items():
        if value is not None and (value != 0 or cls.__dataclass_fields__[name].default is not None):  # type: ignore[attr-defined]
            found[name] = value == "on" if field_type(cls, name) is bool else value
    try:
        fill(cls, found, "options")
    except ConfigError as error:
        field, _, reason = str(error).removeprefix("options.").partition(": ")
        raise OptionError(f"--{field.replace('_', '-')}: {reason}") from error
    return found


def with_options(command: Callable[..., None], options: Mapping[str, inspect.Parameter]) -> None:
    """Give the command these options, as Typer reads them; it takes them as `**values`."""
    hints = get_type_hints(command, include_extras=True)
    own = [item for item in inspect.signature(command).parameters.values() if item.kind != item.VAR_KEYWORD]
    parameters = [*(item.replace(annotation=hints[item.name]) for item in own), *options.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def print_json(values: Any) -> None:
    """Print JSON; of dataclasses their fields."""

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) else os.fspath(value)  # type: ignore[arg-type]

    typer.echo(json.dumps(values, indent=1, ensure_ascii=False, default=plain))


def show(*parts: RenderableType) -> None:
    """Print tables as wide as the terminal; into a file or a pipe wide enough for whole lines."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 240
    for part in parts:
        console.print(part)


class OptionError(UserError):
    """A command-line option or argument cannot be understood."""


class NoResults(UserError):
    """There is no such folder of results."""


def make_plan(config: str, results: Path) -> Plan:
    """The plan of an experiment. Raises: NoResults rather than show a mistyped folder as one where nothing was done."""
    from implicit_llm_workflow.experiment_files.experiment import load_experiment
    from implicit_llm_workflow.planning.plan import Plan

    # A folder of results is there, or its place before the first run: beside a Snakefile.
    is_before_first_run = results.name == DEFAULT_RESULTS.name and (results.parent / SNAKEFILE).is_file()
    if not (results.is_dir() or is_before_first_run):
        root = nearest_with(SNAKEFILE, Path.cwd())
        advice = "work in the folder of the Snakefile" if root is None else f"type `cd {root}` and leave out --results"
        raise NoResults(f"{results}: there is no such folder of results; {advice}, or name the folder by --results DIR")
    return Plan(load_experiment(experiment_path(config)), results)
