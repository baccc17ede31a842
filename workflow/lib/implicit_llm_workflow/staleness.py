"""Wanted against recorded: which results are missing, stale or fresh, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from implicit_llm_workflow.canonical import canonical_json
from implicit_llm_workflow.fingerprint import Identity
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.recorded import Damaged, Recorded, read_recorded

SHOWN_DIFFERENCES = 3
_ABSENT = object()


@dataclass(frozen=True)
class Status:
    """`why` is empty for a fresh result."""

    state: Literal["fresh", "stale", "missing"]
    why: str
    recorded: Recorded | None


def status_of(run_dir: Path, wanted: Identity, node: Node) -> Status:
    """Compare a run directory with the wanted identity of its node."""
    try:
        recorded = read_recorded(run_dir)
    except Damaged as error:
        return Status("stale", str(error), None)
    if recorded is None:
        return Status("missing", "never finished", None)
    if recorded.fingerprint == wanted.fingerprint:
        return Status("fresh", "", recorded)
    return Status("stale", "; ".join(_reasons(recorded, wanted, node)), recorded)


def _reasons(recorded: Recorded, wanted: Identity, node: Node) -> Iterator[str]:
    differences = list(config_differences(recorded.config, wanted.config))
    if differences:
        more = len(differences) - SHOWN_DIFFERENCES
        shown = ", ".join(differences[:SHOWN_DIFFERENCES])
        yield f"config: {shown}{f' and {more} more' if more > 0 else ''}"
    if recorded.code != wanted.code:
        yield f"the code of stage {wanted.stage} changed"
    changed = [
        node.upstream[role]
        for role, fingerprint in wanted.upstream.items()
        if recorded.upstream.get(role, fingerprint) != fingerprint
    ]
    if changed:
        yield f"input changed: {', '.join(changed)}"
    added = [node.upstream[role] for role in wanted.upstream if role not in recorded.upstream]
    if added:
        yield f"new input: {', '.join(added)}"
    removed = [role for role in recorded.upstream if role not in wanted.upstream]
    if removed:
        yield f"input no longer used: {', '.join(removed)}"


def config_differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """`phase.solver.tol 0.05 -> 0.1` for each value that differs; "-" stands for a key that is not there."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from config_differences(
                old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}" if path else str(key)
            )
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from config_differences(before, after, f"{path}[{index}]")
    elif _text(old) != _text(new):
        yield f"{path} {_shown(old)} -> {_shown(new)}"


def _text(value: Any) -> str:
    return "-" if value is _ABSENT else canonical_json(value)


def _shown(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
