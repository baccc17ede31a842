"""A test without an assertion cannot fail."""

import ast

from tests.pages import ROOT

FOLDERS = (ROOT / "tests", ROOT / "workflow" / "plugins" / "submitit" / "tests")


def calls_of(function: ast.FunctionDef) -> set[str]:
    """Names of what the function calls, "assert" for a statement or a function of a library that asserts."""
    nodes = list(ast.walk(function))
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
    return {"assert" if name.startswith("assert_") else name for name in names} | {
        "assert" for node in nodes if isinstance(node, ast.Assert)
    }


def test_each_test_asserts_itself_or_calls_a_helper_that_does() -> None:
    functions = {
        (path, node.name): calls_of(node)
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    tests = {it for it in functions if it[1].startswith("test_") and it[0].name.startswith("test_")}
    asserting, size = {"assert", "raises", "warns", "fail"}, 0
    while len(asserting) > size:
        size = len(asserting)
        asserting |= {it[1] for it, calls in functions.items() if it not in tests and calls & asserting}
    assert [it for it in tests if not functions[it] & asserting] == []
