"""Log files of a rule, kept over the attempts of a job: Snakemake deletes them before each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path


def put_aside(logs: Sequence[str], folder: Path) -> None:
    """Add the lines of earlier attempts, before Snakemake deletes them, to what is kept in `folder`."""
    for log in logs:
        lines = _read(Path(log))
        if lines:
            kept = _read(_kept(log, folder))
            # a crash right after `put_back` leaves the kept lines in both places
            _write(_kept(log, folder), lines if lines.startswith(kept) else kept + lines)


def put_back(logs: Sequence[str], folder: Path) -> None:
    """Put the kept lines in front of those of the attempt that has ended."""
    for log in logs:
        kept = _read(_kept(log, folder))
        if kept:
            lines = _read(Path(log))
            if not lines.startswith(kept):
                Path(log).parent.mkdir(parents=True, exist_ok=True)
                _write(Path(log), kept + lines)
            _kept(log, folder).unlink(missing_ok=True)


def _kept(log: str, folder: Path) -> Path:
    return folder / hashlib.sha256(log.encode()).hexdigest()[:16]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _write(path: Path, lines: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_bytes(lines)
    os.replace(tmp, path)
