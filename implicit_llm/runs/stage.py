"""The frame in which every stage runs: from an identity and input directories to a published manifest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from implicit_llm.runs.manifest import Manifest
from implicit_llm.tracking.journal import Journal


@dataclass(frozen=True)
class StageRequest:
    """What the command line hands to a stage; `identity` is JSON text or `@file`."""

    run_dir: Path
    identity: str
    inputs: dict[str, Path] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    log: Path | None = None
    verify: Literal["size", "sha256"] = "sha256"


@dataclass(frozen=True)
class Input:
    """A finished upstream run."""

    dir: Path
    manifest: Manifest

    @property
    def work(self) -> Path:
        """Where its artifacts lie."""
        raise NotImplementedError

    @property
    def journal(self) -> Path:
        raise NotImplementedError


@dataclass(frozen=True)
class StageContext:
    """What a body works with. All artifacts go below `work`; nothing else is written."""

    stage: str
    name: str
    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, Input]
    run_dir: Path
    work: Path
    journal: Journal
    log: logging.Logger
    runtime: dict[str, Any]
    is_main: bool  # False on the ranks above 0 of a distributed job: their journal writes nothing, their result is ignored


@dataclass(frozen=True)
class StageResult:
    """`files`: files or whole directories below work (absolute, or relative to it); `summary`: a few headline numbers."""

    files: Sequence[Path | str]
    summary: dict[str, Any]


def run_stage(request: StageRequest, body: Callable[[StageContext], StageResult]) -> Manifest:
    """Run `body` unless its result is already there, and publish the manifest.

    Raises: UserError for a wrong identity, input or config; whatever `body` raises, with nothing under a final name.
    """
    raise NotImplementedError
