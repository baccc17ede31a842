"""The Python in the documents runs as it stands there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.pages import PAGES, ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_blocks(document: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the Python blocks of a document one after another as one script, in `folder`; return its names."""
    blocks = BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))
    assert blocks, f"{document} has no Python block"
    script = folder / "example.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    return runpy.run_path(str(script))


def test_the_example_of_the_readme_generates_and_loads_what_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run_blocks("README.md", tmp_path, monkeypatch)
    assert names["tokens"].shape == (1, 16)
    assert names["stats"].f_evaluations.shape == (1,)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small-model")
    assert loaded.solver == names["model"].solver
    assert torch.equal(loaded(names["tokens"]).logits, names["model"](names["tokens"]).logits)


def test_the_blocks_of_the_library_page_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_blocks("docs/library.md", tmp_path, monkeypatch)
    assert names["rest"].past_key_values.get_seq_length() == 12
    assert names["tokens"].shape == (2, 17)
    assert names["converted"].solver.mode == "unrolled"
    assert names["jacobian"].off_diagonal_share() > 0


@pytest.mark.parametrize("document", PAGES)
def test_links_of_a_document_lead_to_files_of_the_project(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing, f"{document} links to {', '.join(missing)}"
