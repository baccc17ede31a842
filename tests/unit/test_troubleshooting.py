"""docs/troubleshooting.md quotes messages that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^`([^`]+)`$", PAGE, re.MULTILINE)
SOURCES = ("implicit_llm", "workflow/lib")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every string of the code; of formatted ones the parts between the values."""
    trees = (
        ast.parse(path.read_text(encoding="utf-8")) for folder in SOURCES for path in (ROOT / folder).rglob("*.py")
    )
    return [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_code(message: str, texts: list[str]) -> None:
    assert any(message in text for text in texts)


def test_the_page_has_its_messages() -> None:
    assert len(QUOTED) > 12
