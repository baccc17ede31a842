"""A file written piece by piece under a temporary name; its digest is there when it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import replace_file, storage_errors, temporary_name
from implicit_llm_data.shard_format import ShardFile


class HashedFile:
    """`path` appears with `commit`; leaving the `with` block without it leaves nothing behind.

    Raises: StorageError when the disk is full or not writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._digest = hashlib.sha256()
        self._temporary = temporary_name(path)
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            faults.point("hashed_file.before_open")
            self._file = self._temporary.open("xb")

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()  # also writes what is buffered
        except OSError:
            pass  # the error that ended the block says it already
        finally:
            self._temporary.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        with storage_errors(self.path, len(data)):
            faults.point("hashed_file.before_write")
            self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    def commit(self) -> ShardFile:
        """Give the file its name; return its record, with the path relative to its directory."""
        with storage_errors(self.path):
            self._file.close()
        replace_file(self._temporary, self.path)
        return ShardFile(self.path.name, self.size, self._digest.hexdigest())
