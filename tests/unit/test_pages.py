"""Pages of the project: their Python runs, experiments take their YAML, programs their commands, messages exist.

tests/workflow/test_experiments.py runs the YAML of experiments.md.
"""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import typer
import yaml
from snakemake.cli import get_argument_parser

from implicit_llm_data.groups import load_group
from implicit_llm_workflow.commands.experiments import write_project
from implicit_llm_workflow.console import app
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.yaml_files import (
    DEFAULT_EXPERIMENT,
    experiment_names,
    experiment_path,
    read_yaml,
)
from tests.pages import PAGES, ROOT, commands_of


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def run_blocks(document: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the Python blocks of a document one after another as one script, in `folder`; return its names."""
    names: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    exec(compile("\n".join(blocks_of(document, "python")), document, "exec"), names)
    return names


def test_the_model_of_the_readme_multiplies_longer_words_than_it_was_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = run_blocks("README.md", ROOT, monkeypatch)
    table = load_group("S5").table
    products = [list(accumulate(word, lambda a, b: int(table[a, b]))) for word in names["words"].tolist()]
    is_right = names["answers"] == torch.tensor(products)
    assert names["words"].shape == (8, 64)
    assert is_right[:, -10:].float().mean() > 0.9


def test_the_blocks_of_the_library_page_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_blocks("docs/library.md", tmp_path, monkeypatch)
    assert names["rest"].past_key_values.get_seq_length() == 12
    assert names["tokens"].shape == (2, 17)
    assert names["converted"].solver.mode == "unrolled"
    assert names["jacobian"].off_diagonal_share() > 0


@pytest.mark.parametrize("document", PAGES)
def test_links_of_a_document_lead_to_files_of_the_project(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", read(document))
    folder = (ROOT / document).parent
    assert [link for link in links if "://" not in link and not (folder / link).exists()] == []


def test_messages_that_the_page_of_troubles_quotes_are_in_the_code() -> None:
    quoted = re.findall(r"^`([^`]+)`$", read("docs/troubleshooting.md"), re.MULTILINE)
    sources = [path for folder in ("implicit_llm", "workflow/lib") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    # Of formatted strings the parts between the values.
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [message for message in quoted if not any(message in text for text in texts)] == []
    assert len(quoted) > 12


YAML = [
    (page, block)
    for page in PAGES
    if page not in ("docs/experiments.md", "docs/extending.md") and not page.startswith("workflow/plugins")
    for block in blocks_of(page, "yaml")
]
PLACEHOLDERS = {"COMMIT": "a" * 40, "DIGEST": "a" * 64, ", ...}": "}"}


@pytest.mark.parametrize(("page", "block"), YAML)
def test_a_block_of_a_page_fits_into_the_experiment_of_the_paper(page: str, block: str, tmp_path: Path) -> None:
    for placeholder, value in PLACEHOLDERS.items():
        block = block.replace(placeholder, value)
    given = yaml.safe_load(dedent(block))
    experiment = read_yaml(ROOT / "workflow/config/paper.yaml")
    del experiment["excerpts"]
    if "phases" in given:
        (tmp_path / "curricula").mkdir()
        (tmp_path / "curricula" / "own.yaml").write_text(yaml.safe_dump(given))
        experiment["runs"] = {"own": {**experiment["runs"]["mamba2-130m-implicit"], "curriculum": "own"}}
        given = {"evaluations": {}}
    elif not set(given) & set(experiment):
        given = {"evaluations": given}
    if "evaluations" in given:
        experiment |= {"evaluations": {}, "peers": {}}
    experiment |= {name: {**experiment[name], **section} for name, section in given.items()}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(experiment))
    assert load_experiment(tmp_path / "own.yaml").name == "paper"


COMMANDS = [(page, shlex.join(words)) for page in PAGES for words in commands_of(page)]
OWN_FILE = re.compile(r"^# workflow/config/([a-z0-9-]+)\.yaml$", re.MULTILINE)  # that a page has its reader write


def check(words: list[str], own_configs: Iterable[str] = ()) -> None:
    """Have the real parsers read the words, and look up what they name; an error of any kind refuses them.

    `own_configs`: names of experiments besides those of the project.
    """
    program, *arguments = words
    if program == "make":
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, check=True)
        return
    if program == "implicit-llm":
        console = typer.main.get_command(app)
        do_nothing(console)
        console.main(list(arguments), program, standalone_mode=False)
        configs = [value for option, value in pairwise(arguments) if option == "--config"]
    else:
        options = get_argument_parser().parse_args(arguments)
        assert {Path(name).name for name in options.profile or []} <= {it.name for it in (ROOT / "profiles").iterdir()}
        configs = [str(path) for path in options.configfile or []]
        if options.targets:
            values = read_yaml(ROOT / (configs or [experiment_path(DEFAULT_EXPERIMENT)])[-1])
            assert {*options.targets} <= {values["name"], *values["excerpts"]}
    names = {Path(config).stem for config in configs if not (ROOT / config).is_file()}
    assert names <= {*experiment_names(), *own_configs}


def do_nothing(command: Any) -> None:
    """Have the command read its words and end."""
    command.callback = None
    for below in getattr(command, "commands", {}).values():
        do_nothing(below)


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
    with pytest.raises((Exception, SystemExit)):
        check(shlex.split(command))
