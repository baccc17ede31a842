"""Named points at which a test can kill a process, signal it, or make it fail.

`FAULT=journal.mid_append:kill9@2` kills the process when it passes that point for the second time, `@2+` also each time
after that; several faults are separated by commas. Kinds: kill9, sigterm, raise, and the errors of the system enospc,
eacces, eio and estale. With `FAULT_TRACE=file` every point that is passed adds its name to that file. Without these
variables a point does nothing.
"""

from __future__ import annotations

import ast
import errno
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

KINDS = ("kill9", "sigterm", "raise", "enospc")  # with which every point is tried
ERRORS = {"enospc": errno.ENOSPC, "eacces": errno.EACCES, "eio": errno.EIO, "estale": errno.ESTALE}
_hits: Counter[str] = Counter()


class FaultInjected(Exception):
    """Raised by a fault point of the kind `raise`."""


def point(name: str) -> None:
    """Mark a place where a fault can be injected; `name` must be a literal, so that `registered` finds it."""
    faults, trace = os.environ.get("FAULT"), os.environ.get("FAULT_TRACE")
    if faults is None and trace is None:
        return
    _hits[name] += 1
    if trace:
        with open(trace, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    for fault in (faults or "").split(","):
        if fault:
            wanted, kind, first, is_lasting = _parse(fault)
            if wanted == name and (_hits[name] == first or (is_lasting and _hits[name] > first)):
                _inject(name, kind)


def reset() -> None:
    """Count hits from zero again."""
    _hits.clear()


def registered(*roots: Path) -> tuple[str, ...]:
    """Names of all fault points in the source below `roots`, sorted.

    Raises: ValueError for a point whose name is not a literal.
    """
    names: set[str] = set()
    for path in (path for root in roots for path in root.rglob("*.py")):
        names.update(points_in(ast.parse(path.read_text(encoding="utf-8"), str(path)), str(path)))
    return tuple(sorted(names))


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


def _parse(fault: str) -> tuple[str, str, int, bool]:
    name, _, rest = fault.partition(":")
    kind, _, hit = rest.partition("@")
    first = hit.removesuffix("+") or "1"
    kinds = dict.fromkeys((*KINDS, *ERRORS))
    if kind not in kinds or not first.isdecimal():
        raise ValueError(f"FAULT={fault}: expected NAME:KIND, @N or @N+ after it, with KIND one of {', '.join(kinds)}")
    return name, kind, int(first), hit.endswith("+")


def _inject(name: str, kind: str) -> None:
    if kind == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind in ERRORS:
        raise OSError(ERRORS[kind], f"injected at {name}")
    else:
        raise FaultInjected(name)
