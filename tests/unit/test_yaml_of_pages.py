"""An experiment takes the YAML on the pages; tests/workflow/test_experiments_page.py runs that of experiments.md."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml
from tests.pages import PAGES, ROOT

BLOCKS = [
    (page, block)
    for page in PAGES
    if page not in ("docs/experiments.md", "docs/extending.md") and not page.startswith("workflow/plugins")
    for block in re.findall(
        r"^```yaml\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
]
PLACEHOLDERS = {"COMMIT": "a" * 40, "DIGEST": "a" * 64, ", ...}": "}"}


@pytest.mark.parametrize(("page", "block"), BLOCKS)
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
