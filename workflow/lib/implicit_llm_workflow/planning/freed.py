"""Results whose larger files were deleted to free the disk: they count as done until a job needs the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from implicit_llm_contracts.runs.run_directory import DECLARED, FREED, work_directory
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.staleness import Status

PAGES = ("report", "excerpt")  # stages that read the small files of a result alone, which are kept
_SMALL = (".json", ".jsonl")


def payload(work: Path) -> list[Path]:
    """The files of a result that can be freed: models, shards and checkpoints, not records and pages."""
    kept = {DECLARED, *(path.name for path in work.glob("*") if path.suffix in _SMALL or path.name.startswith("."))}
    return sorted(path for path in work.rglob("*") if path.is_file() and path.relative_to(work).parts[0] not in kept)


def is_freed(run_dir: Path, fingerprint: str) -> bool:
    return (work_directory(run_dir, fingerprint) / FREED).exists()


def readers(nodes: Mapping[str, Node], key: str) -> list[str]:
    """The jobs that read the larger files of a job; for a shard also the readers of its stream, which points to it."""
    direct = [name for name, node in nodes.items() if key in node.upstream.values() and node.stage not in PAGES]
    streams = direct if nodes[key].config.get("kind") == "token_shard" else []
    return [*direct, *(name for stream in streams for name in readers(nodes, stream))]


def needed_again(nodes: Mapping[str, Node], statuses: Mapping[str, Status], root: Path) -> dict[str, Status]:
    """The statuses, but stale for freed results that a job will read, directly or through a stream."""
    found = dict(statuses)
    for key in reversed(list(nodes)):  # a node comes after those that it reads from
        node = nodes[key]
        if found[key].state == "fresh" or node.stage in PAGES:
            continue
        for name in node.upstream.values():
            status = found[name]
            if status.state == "fresh" and any(
                _is_freed(found[item], root / item) for item in (name, *_pointed_to(nodes, name))
            ):
                found[name] = replace(status, state="stale", why=f"its files were freed, and {key} needs them")
    return found


def _pointed_to(nodes: Mapping[str, Node], key: str) -> list[str]:
    """Inputs whose files a data set points to instead of having a copy."""
    return [name for name in nodes[key].upstream.values() if nodes[name].config.get("kind") == "token_shard"]


def _is_freed(status: Status, run_dir: Path) -> bool:
    return status.recorded is not None and is_freed(run_dir, status.recorded.fingerprint)
