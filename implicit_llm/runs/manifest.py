"""The manifest: what a finished run vouches for. Equal runs give equal bytes.

    {"format": 1, "stage": "train", "name": "a5-s0/free", "fingerprint": "<sha256>",
     "identity": {"config": {...}, "code": "<sha256>", "upstream": {"data": "<fingerprint>"}},
     "files": [{"path": "work/<first 16 of fingerprint>/model/config.json", "size": 812, "sha256": "..."}],
     "summary": {"loss": 0.01}}

Paths are relative to the run directory. A summary number that is not finite is written as null.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from implicit_llm.runs.errors import UserError

FILE_NAME = "manifest.json"


class ManifestError(UserError):
    """A manifest or a file it vouches for is missing, damaged or not the expected one."""


@dataclass(frozen=True)
class FileRecord:
    """One file; `path` is relative to the run directory, with forward slashes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    stage: str
    name: str
    fingerprint: str
    identity: dict[str, Any]
    files: tuple[FileRecord, ...]
    summary: dict[str, Any]

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        raise NotImplementedError

    def write(self, path: Path) -> None:
        """Write atomically to the file `path`."""
        raise NotImplementedError

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the file `path`.

        Raises: ManifestError when it is missing, damaged, or of another format.
        """
        raise NotImplementedError

    @classmethod
    def find(cls, path: Path) -> Manifest | None:
        """Like `read`, but a missing or damaged file counts as absent."""
        raise NotImplementedError

    def verify(self, run_dir: Path, level: Literal["size", "sha256"] = "size") -> None:
        """Check every file against its record.

        Raises: ManifestError for the first one that differs.
        """
        raise NotImplementedError
