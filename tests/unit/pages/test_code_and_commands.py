"""Code, YAML, commands and links on the pages: they run, or the real parsers take them."""

import ast
import hashlib
import re
import runpy
import shlex
import subprocess
from collections import Counter
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
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2ForCausalLM

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
from implicit_llm_workflow.planning.graph import build_graph
from implicit_llm_workflow.planning.staleness import EXCERPT
from tests.pages import PAGES, ROOT, commands_of
from tests.unit.checkpoint.foreign import mamba2_config, write_original_mamba2
from tests.unit.pages.page_texts import (
    blocks_of,
    read,
)


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
    products = [list(accumulate(word, lambda a, b: int(table[a, b]))) for word in names["tokens"].tolist()]
    assert names["tokens"].shape == (8, 512)
    assert torch.stack(names["products"], dim=1).tolist() == products  # as the page makes them
    assert (names["predictions"] == torch.tensor(products)).float().mean() > 0.99


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


def test_the_page_on_extensions_has_each_file_that_an_experiment_needs_for_them() -> None:
    folder, page = ROOT / "examples/extending", read("docs/extending.md")
    names = [path.relative_to(ROOT).as_posix() for path in folder.rglob("*") if path.suffix in (".py", ".yaml")]
    assert [name for name in names if f"](../{name})" not in page] == []
    written = {
        re.match("# (.*)\n", block)[1]: block for block in blocks_of("docs/extending.md", "yaml") if block[0] == "#"
    }
    assert len(written) == 1
    for name, block in written.items():
        assert yaml.safe_load(block) == read_yaml(folder / name)


def test_messages_that_the_page_of_troubles_quotes_are_in_the_code() -> None:
    quoted = re.findall(r"^`([^`]+)`$", read("docs/troubleshooting.md"), re.MULTILINE)
    sources = [path for folder in ("implicit_llm", "workflow/lib") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    # Of formatted strings the parts between the values.
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [message for message in quoted if not any(message in text for text in texts)] == []
    assert len(quoted) > 12


# Their blocks are experiments, models and sites of their own, which other tests read.
OWN = ("experiments", "extending", "your-text", "your-checkpoint", "your-cluster", "authors-code")
YAML = [
    (page, block)
    for page in PAGES
    if page not in {f"docs/{name}.md" for name in OWN} and not page.startswith("workflow/plugins")
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
    assert {words[0] for words in commands} == {"implicit-llm"}
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


def test_the_shown_numbers_of_jobs_of_the_demo_are_those_of_its_plan() -> None:
    nodes = build_graph(load_experiment(experiment_path("demo")))
    stages = Counter(node.stage for node in nodes.values() if node.stage != EXCERPT)  # made by name only
    page = read("docs/inspect.md")
    rows = re.findall(r"^(\w+) +━* +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", page, re.MULTILINE)
    assert {stage: int(of) for stage, _, of, *_ in rows} == stages
    assert all(int(of) == sum(map(int, (done, *others))) for _, done, of, *others in rows)
    (head,) = re.findall(
        r"^demo: (\d+) of (\d+) jobs done, (\d+) running, (\d+) failed, (\d+) waiting", page, re.MULTILINE
    )
    totals = [sum(int(row[column]) for row in rows) for column in range(1, 6)]
    assert list(map(int, head)) == totals
    (runs,) = re.findall(r"^(\d+) runs, .*: none broken$", page, re.MULTILINE)
    (rerun,) = re.findall(r"^demo: (\d+ of \d+) jobs done, 3 stale", read("docs/reruns.md"), re.MULTILINE)
    assert int(runs) == stages.total()
    assert rerun == f"{stages.total() - 3} of {stages.total()}"


def test_the_lists_of_commands_and_keys_are_those_of_the_program() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "generated_pages.py"))["generated_pages"]()
    assert len(pages) == 3
    for path, content in pages.items():
        assert path.read_text(encoding="utf-8") == content, f"type `python docs/generated_pages.py`: {path}"


@pytest.mark.parametrize(("page", "name"), [("docs/your-text.md", "mytext"), ("docs/authors-code.md", "their-words")])
def test_the_experiment_of_a_page_is_read(page: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.yaml"
    path.write_text("".join(blocks_of(page, "yaml")))
    experiment = load_experiment(path)
    assert experiment.name == name
    assert all(experiment.evaluations_of(run) for run in experiment.models)


def test_the_lines_for_a_checkpoint_of_ones_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, intermediate_size=16)).save_pretrained(
        tmp_path / "models/my-llama"
    )
    folder = tmp_path / "models/mamba2-130m"
    folder.mkdir()
    theirs = Mamba2ForCausalLM(mamba2_config(vocab_size=24))
    write_original_mamba2(theirs, folder, is_pickle=True, vocab_size=24)
    digest = hashlib.sha256((folder / "pytorch_model.bin").read_bytes()).hexdigest()
    code = "\n".join(blocks_of("docs/your-checkpoint.md", "python"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code.replace("DIGEST", digest), names)
    assert (names["model"].solver.max_iter, names["model"].solver.phantom_steps) == (4, 1)
    assert (tmp_path / "models/mamba2-130m-here/model.safetensors").is_file()
    model, rest = blocks_of("docs/your-checkpoint.md", "yaml")
    (tmp_path / "models/my-llama.yaml").write_text(model)
    evaluations = "evaluations:\n  perplexity: {kind: perplexity, modes: [{name: blockwise, eval_mode: blockwise}]}\n"
    (tmp_path / "own.yaml").write_text(f"name: own\n{rest}{evaluations}")
    runs = load_experiment(tmp_path / "own.yaml").runs
    assert {name: run.is_implicit for name, run in runs.items()} == {"implicit": True, "control": False}
