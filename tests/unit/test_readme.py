"""The Python in the documents runs as it stands there."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_llm_data.groups import load_group
from tests.pages import PAGES, ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_blocks(document: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the Python blocks of a document one after another as one script, in `folder`; return its names."""
    blocks = BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))
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
    path = ROOT / document
    links = re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing, f"{document} links to {', '.join(missing)}"
