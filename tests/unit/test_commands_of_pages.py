"""Each command that a page tells to type is one that its program takes; what it does is tested elsewhere.

Nothing is done: the real parsers read the words, and what is named by them is looked up.
"""

import re
import shlex
import subprocess
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from snakemake.cli import get_argument_parser

from implicit_llm_workflow.commands.experiments import write_project
from implicit_llm_workflow.console import app
from implicit_llm_workflow.experiment_files.yaml_files import (
    DEFAULT_EXPERIMENT,
    experiment_names,
    experiment_path,
    read_yaml,
)
from tests.pages import PAGES, ROOT, commands_of

COMMANDS = [(page, shlex.join(words)) for page in PAGES for words in commands_of(page)]
OWN_FILE = re.compile(r"^# workflow/config/([a-z0-9-]+)\.yaml$", re.MULTILINE)  # that a page has its reader write


class Refused(Exception):
    """The program does not take the words, or what they name is not there."""


def check(words: list[str], own_configs: Iterable[str] = ()) -> None:
    """Raises: Refused. `own_configs`: names of experiments besides those of the project."""
    program, *arguments = words
    given = {"implicit-llm": read_by_console, "snakemake": read_by_snakemake, "make": read_by_make}[program](arguments)
    names = {Path(config).stem for config in given if not (ROOT / config).is_file()}
    require(names, {*experiment_names(), *own_configs})


def read_by_console(arguments: list[str]) -> list[str]:
    """The experiments that a command of `implicit-llm` names."""
    console = typer.main.get_command(app)
    do_nothing(console)
    try:
        console.main(list(arguments), "implicit-llm", standalone_mode=False)
    except Exception as error:  # of click, which Typer brings along in some releases
        raise Refused(error) from error
    return [value for option, value in pairwise(arguments) if option == "--config"]


def do_nothing(command: Any) -> None:
    """Have the command read its words and end."""
    command.callback = None
    for below in getattr(command, "commands", {}).values():
        do_nothing(below)


def read_by_snakemake(arguments: list[str]) -> list[str]:
    """The config files that a call of Snakemake names."""
    try:
        options = get_argument_parser().parse_args(arguments)
    except SystemExit as error:
        raise Refused(arguments) from error
    require((Path(name).name for name in options.profile or []), {path.name for path in (ROOT / "profiles").iterdir()})
    configs = [str(path) for path in options.configfile or []]
    if options.targets:
        values = read_yaml(ROOT / (configs or [experiment_path(DEFAULT_EXPERIMENT)])[-1])
        require(options.targets, {values["name"], *values["excerpts"]})
    return configs


def read_by_make(arguments: list[str]) -> list[str]:
    done = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return []


def require(found: Iterable[str], known: Iterable[str]) -> None:
    unknown = set(found).difference(known)
    if unknown:
        raise Refused(unknown)


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_on_a_page_is_taken(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check(shlex.split(command), OWN_FILE.findall((ROOT / page).read_text(encoding="utf-8")))


def test_the_commands_in_a_folder_of_ones_own_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = commands_of(str(tmp_path / "README.md"))
    assert {words[0] for words in commands} == {"implicit-llm", "snakemake"}
    for words in commands:
        check(words)


def test_the_demo_ends_with_the_page_the_activation_and_a_command_that_is_taken() -> None:
    make = ["make", "--dry-run", "--no-print-directory", "demo", "VENV=.venv"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    page, shell, following = (shlex.split(line)[1].split(":", 1)[1].strip() for line in done.stdout.splitlines()[-3:])
    assert page == (ROOT / "results" / "demo" / "report" / "index.html").as_uri()
    assert shell == "source .venv/bin/activate"
    check(shlex.split(following))


@pytest.mark.parametrize(
    "command",
    [
        "implicit-llm estimat --config paper",
        "implicit-llm estimate --confg paper",
        "implicit-llm estimate --config papr",
        "implicit-llm evaluate word-problem --model a --data b --max-itr 3",
        "implicit-llm mlflow rebild",
        "snakemake --profle cluster paper",
        "snakemake --profile clster paper",
        "snakemake --profile cluster figure_9",
        "snakemake --profile cluster demo",
        "snakemake --profile cluster --configfile workflow/config/papr.yaml",
        "snakemake --executor submitit --submitit-clster local",
        "make dmo",
    ],
)
def test_a_misspelt_command_is_noticed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(Refused):
        check(shlex.split(command))
