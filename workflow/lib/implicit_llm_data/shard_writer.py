"""Writing a data set so that a killed job loses at most the shard that it was at."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import (
    read_object,
    replace_file,
    storage_errors,
    temporary_name,
    write_atomic,
)
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.manifest import FileRecord, sha256_of
from implicit_llm_data.shards import FORMAT, INDEX_NAME, STREAM, DatasetSpec, ShardRecord, token_dtype


class OutOfSpace(UserError):
    """The file system has less room than the data set needs."""


class ShardWriter:
    """Writes a data set into `directory`, shard by shard in any order; shards of an earlier attempt can be kept."""

    def __init__(self, directory: Path, spec: DatasetSpec) -> None:
        self._directory = directory
        self._spec = spec
        (directory / "shards").mkdir(parents=True, exist_ok=True)

    def find(self, shard: int) -> ShardRecord | None:
        """Return the record of a shard that an earlier attempt finished, if its files still have their digests."""
        kept = read_object(self._record_path(shard))
        if kept.pop("spec", None) != self._spec.to_json():
            return None
        record = fill(ShardRecord, kept, f"shard {shard}")
        for file in record.files.values():
            path = self._directory / file.path
            if not path.is_file() or sha256_of(path) != file.sha256:
                return None
        return record

    def write(self, shard: int, columns: Mapping[str, np.ndarray]) -> ShardRecord:
        """Write one shard and then its record; each column is (samples, length) of the vocabulary's token type."""
        dtype = token_dtype(self._spec.vocab_size)
        files = {}
        for column in self._spec.columns:
            array = columns[column]
            if array.dtype != dtype or array.shape[1:] != (self._spec.length,):
                raise TypeError(f"{column}: expected {dtype} (N, {self._spec.length}), got {array.dtype} {array.shape}")
            buffer = io.BytesIO()
            np.save(buffer, array, allow_pickle=False)
            data = buffer.getvalue()
            path = f"shards/{column}-{shard:05d}.npy"
            faults.point("shard.before_file")
            write_atomic(self._directory / path, data)
            files[column] = FileRecord(path, len(data), hashlib.sha256(data).hexdigest())
        record = ShardRecord(len(columns[self._spec.columns[0]]), files)
        faults.point("shard.before_record")
        write_atomic(self._record_path(shard), _to_json({**asdict(record), "spec": self._spec.to_json()}))
        return record

    def finish(self, records: Sequence[ShardRecord]) -> list[Path]:
        """Write the index over all shards; return every file of the data set, the index first."""
        index = self._directory / INDEX_NAME
        faults.point("dataset.before_index")
        write_atomic(
            index, _to_json({"format": FORMAT, **self._spec.to_json(), "shards": [asdict(r) for r in records]})
        )
        return [index, *(self._directory / file.path for record in records for file in record.files.values())]

    def require_space(self, num_samples: int) -> None:
        """Check that samples still to be written fit the file system.

        Raises: OutOfSpace, with both numbers.
        """
        item_bytes = token_dtype(self._spec.vocab_size).itemsize
        needed = num_samples * self._spec.length * len(self._spec.columns) * item_bytes
        free = shutil.disk_usage(self._directory).free
        if needed > free:
            raise OutOfSpace(
                f"{self._directory}: the data set needs {needed / 2**20:.0f} MiB more, {free / 2**20:.0f} are left; "
                f"free some space or lower num_samples"
            )

    def _record_path(self, shard: int) -> Path:
        return self._directory / "shards" / f"{shard:05d}.json"


def write_index(directory: Path, fields: Mapping[str, Any], parts: Sequence[FileRecord]) -> Path:
    """Write the index of a stream, the paths of `parts` being relative to `directory`; return its path.

    fields: vocab_size, length and source.
    """
    index = {"format": FORMAT, "layout": STREAM, **fields, "parts": [asdict(part) for part in parts]}
    write_atomic(directory / INDEX_NAME, _to_json(index))
    return directory / INDEX_NAME


def _to_json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=1, sort_keys=True) + "\n"


class HashedFile:
    """A file written piece by piece under a temporary name, with its digest.

    `path` appears with `commit`; leaving the `with` block without it leaves nothing behind.

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
        with suppress(OSError):  # of writing what is buffered: the error that ended the block says it already
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        with storage_errors(self.path, len(data)):
            faults.point("hashed_file.before_write")
            self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    def commit(self) -> FileRecord:
        """Give the file its name; return its record, with the path relative to its directory."""
        with storage_errors(self.path):
            self._file.close()
        replace_file(self._temporary, self.path)
        return FileRecord(self.path.name, self.size, self._digest.hexdigest())
