"""Share code between commands: declare their options, find the experiment and its plan, and print results."""

import inspect
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from rich.console import Console, Group, RenderableType

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.errors import ConfigError, UserError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.atomic import read_object
from implicit_llm_workflow.experiment_files.experiment import known_experiment
from implicit_llm_workflow.experiment_files.yaml_files import experiment_names
from implicit_llm_workflow.planning.plan import DRIVER_RECORD, RESULTS, Plan, check_place, check_results
from implicit_llm_workflow.project_dirs import SNAKEFILE, nearest_with

Config = Annotated[
    str | None,
    typer.Option(help="The experiment's file, or its name, in place of the first argument.", metavar="FILE"),
]
Results = Annotated[Path, typer.Option(help="Folder of all results.", metavar="DIR")]
FIRST_EXPERIMENT = "demo"  # the default before the first run; commands that accept or delete results have no default
_GLOB = set("*?[")
_METAVARS: dict[Any, str] = {int: "N", float: "N", str: "NAME", Path: "DIR"}


def words(help_text: str, metavar: str = "[EXPERIMENT] [TARGET]...") -> Any:
    """Return the argument for an experiment and its targets, which the shell completes.

    The experiment is optional if `metavar` has it in brackets.
    """
    default = f"; the one last run here if none is given, else {FIRST_EXPERIMENT}" if metavar.startswith("[") else ""
    text = f"{help_text} EXPERIMENT: its name or file{default}.".strip()
    return typer.Argument(help=text, metavar=metavar, show_default=False, autocompletion=complete)


def flag(name: str, help_text: str) -> Any:
    """Return an option that has no value; its empty metavar keeps Typer from showing `<bool>`."""
    return typer.Option(name, help=help_text, metavar="")


def as_json(what: str = "one entry for each job") -> Any:
    """Return the option --json; `what` describes the output in the help."""
    return flag("--json", f"Print JSON, {what}.")


def field_type(cls: type, field: str) -> Any:
    """Return the type of a dataclass field, without None if the field is optional."""
    hint = get_type_hints(cls)[field]
    is_optional = get_origin(hint) in (Union, UnionType)
    return next(member for member in get_args(hint) if member is not type(None)) if is_optional else hint


def field_options(
    cls: type, sentences: Mapping[str, str], panel: str, *, has_defaults: bool = True
) -> dict[str, inspect.Parameter]:
    """Return an option for each dataclass field that `sentences` describes.

    A boolean is "on" or "off", and several values are one text, such as "1,2". Without `has_defaults`, an unset option
    is None.
    """
    found = {}
    for name, text in sentences.items():
        hint, default = field_type(cls, name), cls.__dataclass_fields__[name].default  # type: ignore[attr-defined]
        metavar: str | None = "SECONDS" if name.endswith("_s") else _METAVARS.get(hint)
        if hint is bool:
            hint, default = Literal["on", "off"], "on" if default else "off"
        elif get_origin(hint) is tuple:
            hint, metavar = str, "A,B"
        about = typer.Option(option_of(name), help=text, metavar=metavar, rich_help_panel=panel)
        option: Any = Annotated[hint | None, about]
        default = None if default is MISSING or not has_defaults else default
        found[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
    return found


def option_of(field: str) -> str:
    """Return the name of a field's option, such as "--max-iter" for `eval_max_iter`."""
    return f"--{field.removeprefix('eval_').replace('_', '-')}"


def given(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options' values by dataclass field, without None and without 0 where a field's default is None.

    The texts "on" and "off" of a boolean field become true and false. Raises: OptionError for a value that is invalid
    for its field.
    """
    defaults = {field.name: field.default for field in fields(cls)}
    found = {
        name: value == "on" if field_type(cls, name) is bool else value
        for name, value in values.items()
        if value is not None and (value != 0 or defaults[name] is not None)
    }
    try:
        fill(cls, found, "options")
    except ConfigError as error:
        field, _, reason = str(error).removeprefix("options.").partition(": ")
        raise OptionError(f"{option_of(field)}: {reason}") from error
    return found


def with_options(command: Callable[..., None], options: Mapping[str, inspect.Parameter]) -> None:
    """Add options to a command's signature, where Typer finds them; the command receives them as `**values`."""
    hints = get_type_hints(command, include_extras=True)
    own = [item for item in inspect.signature(command).parameters.values() if item.kind != item.VAR_KEYWORD]
    parameters = [*(item.replace(annotation=hints[item.name]) for item in own), *options.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def print_json(values: Any) -> None:
    """Print JSON, in which a dataclass is an object of its fields and a path is a string."""

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) else os.fspath(value)  # type: ignore[arg-type]

    typer.echo(json.dumps(values, indent=1, ensure_ascii=False, default=plain))


def show(*parts: RenderableType) -> None:
    """Print tables as wide as the terminal, or 240 characters wide if the output is a file or a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 240
    console.print(Group(*parts))


class OptionError(UserError):
    """A command-line option or argument is invalid."""


def choose(
    given: Sequence[str] | None,
    config: str | None,
    results: Path,
    *,
    has_targets: bool = True,
    must_name: str = "",
    to_stderr: bool = False,
) -> tuple[Plan, list[str]]:
    """Return the plan of the experiment that the arguments name, and the other arguments, which are its targets.

    An argument that is neither the name nor the file of an experiment is a target. must_name: the usage of a command
    that deletes or accepts results, for which an experiment must be named. Otherwise the default is `last_experiment`,
    and its name is printed. to_stderr: print this name to stderr because programs read stdout.
    Raises: OptionError, also for a target if not `has_targets`; all exceptions of `make_plan`.
    """
    named, rest = split(given or (), results)
    named += [] if config is None else [config]
    if len(named) > 1:
        raise OptionError(f"{named[1]}: {named[0]} is named already; give one experiment")
    if not named and must_name:
        raise OptionError(
            f"the experiment is missing; type `{must_name}`, there are {', '.join(sorted(experiments(results)))}"
        )
    plan = make_plan(named[0] if named else last_experiment(results), results)
    if not named:
        typer.echo(f"experiment {plan.experiment.name} (to choose another, name it first)", err=to_stderr)
    elif config is None and (named[0] in plan.nodes or named[0] in plan.experiment.excerpts):
        raise OptionError(
            f"{named[0]}: is an experiment and a target of it; type --config {named[0]} for the experiment"
        )
    if rest and not has_targets:
        raise OptionError(f"{rest[0]}: is no experiment; {nearest(rest[0], experiments(results))}")
    return plan, rest


def split(given: Iterable[str], results: Path) -> tuple[list[str], list[str]]:
    """Split arguments into experiments, which are names of `experiments` or YAML files, and all others."""
    known, words = experiments(results), list(given)
    named = [word for word in words if word in known or (word.endswith((".yaml", ".yml")) and not set(word) & _GLOB)]
    return named, [word for word in words if word not in named]


def experiments(results: Path) -> dict[str, str]:
    """Return, for each name of a known experiment, the argument with which `experiment_path` finds its file.

    For an experiment in workflow/config/, this is the name itself. For another experiment that ran below `results`, it
    is the path of its file; experiments whose file no longer exists are omitted.
    """
    return _files_run(results) | {name: name for name in experiment_names()}


def _files_run(results: Path) -> dict[str, str]:
    """Return the existing files of the experiments that ran below `results`, by name, in order from the last run."""
    found = results.glob(f"*/{DRIVER_RECORD}") if os.path.isdir(results) else ()  # glob raises for too long a name
    records = sorted(found, key=lambda path: -path.stat().st_mtime)
    files = {path.parent.name: read_object(path).get("config") for path in records}
    return {name: file for name, file in files.items() if isinstance(file, str) and os.path.isfile(file)}


def last_experiment(results: Path) -> str:
    """Return the file of the experiment that was last run below `results`, else FIRST_EXPERIMENT."""
    return next(iter(_files_run(results).values()), FIRST_EXPERIMENT)


def complete(context: typer.Context, incomplete: str) -> list[str]:
    """Return the experiments, jobs and excerpts that begin with `incomplete`; no experiments if one is given."""
    results = Path(context.params.get("results") or RESULTS)
    named, _ = split(context.params.get("words") or (), results)
    known = [] if named else sorted(experiments(results))
    try:
        plan = make_plan(named[0] if named else last_experiment(results), results)
    except UserError:  # a completion cannot show an error
        return [name for name in known if name.startswith(incomplete)]
    return [name for name in (*known, *plan.nodes, *plan.experiment.excerpts) if name.startswith(incomplete)]


def make_plan(config: str, results: Path) -> Plan:
    """Return the plan of an experiment. Raises: UserError, also if `results` does not exist and is perhaps mistyped."""
    check_results(results)
    # Before the first run, the folder need not exist if it would be beside a Snakefile.
    is_before_first_run = results.name == RESULTS.name and (results.parent / SNAKEFILE).is_file()
    if not (os.path.isdir(results) or is_before_first_run):
        root = nearest_with(SNAKEFILE, Path.cwd())
        command = None if root is None else f"type `cd {shlex.quote(str(root))}` and leave out --results"
        advice = command or "work in the folder of the Snakefile"
        raise OptionError(
            f"{results}: there is no such folder of results; {advice}, or name the folder by --results DIR"
        )
    experiment = known_experiment(config, experiments(results).get(config, config))
    check_place(experiment, results)
    return Plan(experiment, results)
