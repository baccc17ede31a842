"""A test without an assertion cannot fail."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "tests", ROOT / "workflow" / "plugins" / "submitit" / "tests")


def checks_of(function: ast.FunctionDef) -> set[str]:
    """Names of what the function calls, and "assert" where it has an assertion or calls a library's."""
    nodes = list(ast.walk(function))
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
    is_sure = any(isinstance(node, ast.Assert) for node in nodes) or any(name.startswith("assert_") for name in names)
    return names | ({"assert"} if is_sure else set())


def test_each_test_asserts_itself_or_calls_a_helper_that_does() -> None:
    tests, helpers = {}, []
    for path in (path for folder in FOLDERS for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and path.name.startswith("test_") and node.name.startswith("test_"):
                tests[f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"] = checks_of(node)
            elif isinstance(node, ast.FunctionDef):
                helpers.append((node.name, checks_of(node)))
    asserting, size = {"assert", "raises", "warns", "fail"}, 0
    while len(asserting) > size:
        size = len(asserting)
        asserting |= {name for name, checks in helpers if checks & asserting}
    assert [name for name, checks in tests.items() if not checks & asserting] == []
