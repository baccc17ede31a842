"""Files and directories that appear under their final name whole or not at all."""

from __future__ import annotations

from pathlib import Path

from implicit_llm.runs.errors import UserError


class StorageError(UserError, OSError):
    """The disk is full, read-only or not writable; has `errno` and `filename` of the OSError behind it."""


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path`: temporary file beside it, fsync, rename, fsync of the directory.

    Raises: StorageError, with nothing left behind.
    """
    raise NotImplementedError


def replace_file(source: Path, target: Path) -> None:
    """Move the finished file `source` to `target`, also from another file system."""
    raise NotImplementedError


def commit_directory(tmp_dir: Path, final_dir: Path) -> None:
    """Move the finished directory `tmp_dir` to `final_dir`, after fsync of all it contains.

    An existing `final_dir` is replaced: it is moved aside, then deleted; between the two renames there is none, never half of one.
    """
    raise NotImplementedError
