"""A test without an assertion cannot fail."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]


def called_names(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", ""))


def asserts(function: ast.FunctionDef, checks: set[str]) -> bool:
    """Whether the function asserts itself or calls one of `checks` or of a library's `assert_...`."""
    return any(isinstance(node, ast.Assert) for node in ast.walk(function)) or any(
        name in checks or name.startswith("assert_") for name in called_names(function)
    )


def test_each_test_asserts_itself_or_calls_a_helper_that_does() -> None:
    tests: dict[str, ast.FunctionDef] = {}
    helpers: dict[str, list[ast.FunctionDef]] = defaultdict(list)
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and path.name.startswith("test_") and node.name.startswith("test_"):
                tests[f"{path.relative_to(TESTS)}:{node.lineno}: {node.name}"] = node
            elif isinstance(node, ast.FunctionDef):
                helpers[node.name].append(node)
    checks, found = {"raises", "warns", "fail"}, True
    while found:
        found = {name for name, kin in helpers.items() if name not in checks and any(asserts(f, checks) for f in kin)}
        checks |= found
    assert [name for name, test in tests.items() if not asserts(test, checks)] == []
