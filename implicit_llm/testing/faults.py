"""Named points at which a test can kill a process, signal it, or make it fail.

`FAULT=journal.mid_append:kill9@2` kills the process when it passes that point for the second time. Kinds: kill9,
sigterm, raise, enospc. With `FAULT_TRACE=file` every point that is passed adds its name to that file. Without
these variables a point does nothing.
"""

from __future__ import annotations

import ast
import errno
import os
import signal
from collections import Counter
from pathlib import Path

KINDS = ("kill9", "sigterm", "raise", "enospc")
_hits: Counter[str] = Counter()


class FaultInjected(Exception):
    """Raised by a fault point of the kind `raise`."""


def point(name: str) -> None:
    """Mark a place where a fault can be injected; `name` must be a literal, so that `registered` finds it."""
    fault, trace = os.environ.get("FAULT"), os.environ.get("FAULT_TRACE")
    if fault is None and trace is None:
        return
    _hits[name] += 1
    if trace:
        with open(trace, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    if fault:
        wanted, kind, hit = _parse(fault)
        if wanted == name and _hits[name] == hit:
            _inject(name, kind)


def reset() -> None:
    """Count hits from zero again."""
    _hits.clear()


def registered(root: Path | None = None) -> tuple[str, ...]:
    """Names of all fault points in the source below `root` (default: the whole package), sorted.

    Raises: ValueError for a point whose name is not a literal.
    """
    names = set()
    for path in sorted((root or Path(__file__).parents[1]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.point"):
                continue
            argument = node.args[0] if node.args else None
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise ValueError(f"{path}:{node.lineno}: the name of a fault point must be a literal string")
            names.add(argument.value)
    return tuple(sorted(names))


def _parse(fault: str) -> tuple[str, str, int]:
    name, _, rest = fault.partition(":")
    kind, _, hit = rest.partition("@")
    if kind not in KINDS or not (hit or "1").isdecimal():
        raise ValueError(f"FAULT={fault}: expected NAME:KIND or NAME:KIND@N with KIND one of {', '.join(KINDS)}")
    return name, kind, int(hit or "1")


def _inject(name: str, kind: str) -> None:
    if kind == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "enospc":
        raise OSError(errno.ENOSPC, f"injected at {name}")
    else:
        raise FaultInjected(name)
