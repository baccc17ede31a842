"""The fault points in source code, and which fault strikes at which of them in a short test."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from implicit_llm_contracts.runs.faults import KINDS


def registered(*roots: Path) -> tuple[str, ...]:
    """Names of all fault points in the source below `roots`, sorted.

    Raises: ValueError for a point whose name is not a literal.
    """
    names: set[str] = set()
    for path in (path for root in roots for path in root.rglob("*.py")):
        names.update(points_in(ast.parse(path.read_text(encoding="utf-8"), str(path)), str(path)))
    return tuple(sorted(names))


def sample(points: Sequence[str]) -> list[tuple[str, str]]:
    """Every point with one kind of fault; each point with each kind is among the slow tests."""
    return [(point, KINDS[n % len(KINDS)]) for n, point in enumerate(points)]


def passage(kind: str, hits: int) -> int:
    """Each kind strikes at another of the times that a point is passed, from the first to the last."""
    return 1 + round(KINDS.index(kind) / (len(KINDS) - 1) * (hits - 1))


def points_in(tree: ast.AST, where: str) -> Iterator[str]:
    """Names of the fault points below a node of a syntax tree; `where` is its file.

    Raises: ValueError for a point whose name is not a literal.
    """
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.point"):
            continue
        argument = node.args[0] if node.args else None
        if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
            raise ValueError(f"{where}:{node.lineno}: the name of a fault point must be a literal string")
        yield argument.value
