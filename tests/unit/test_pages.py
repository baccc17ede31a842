"""Pages of the project: their Python runs, experiments take their YAML, links lead somewhere, quoted messages exist.

tests/workflow/test_experiments_page.py runs the YAML of experiments.md.
"""

import ast
import re
from itertools import accumulate
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import yaml

from implicit_llm_data.groups import load_group
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml
from tests.pages import PAGES, ROOT


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def run_blocks(document: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the Python blocks of a document one after another as one script, in `folder`; return its names."""
    blocks = blocks_of(document, "python")
    assert blocks, f"{document} has no Python block"
    names: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    exec(compile("\n".join(blocks), document, "exec"), names)
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
