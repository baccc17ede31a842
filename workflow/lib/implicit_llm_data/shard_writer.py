"""Write a data set so that a killed job loses at most its current shard."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import read_object, write_atomic, write_json
from implicit_llm_contracts.runs.manifest import FileRecord
from implicit_llm_contracts.runs.stage_context import StageContext
from implicit_llm_data.shards import INDEX_NAME, DatasetSpec, Index, ShardRecord, token_dtype


def write_shards(
    context: StageContext, spec: DatasetSpec, num_shards: int, columns_of: Callable[[int], Mapping[str, np.ndarray]]
) -> list[Path]:
    """Write a data set into `context.work`, shard by shard; return the paths of the index and the column files.

    `columns_of(shard)` returns the columns of a shard, each (samples, length) of the vocabulary's token type. Finished
    shards of an earlier attempt are reused if their files still have their digests.
    Raises: TypeError for a column of another type or shape; StorageError.
    """
    records = {shard: kept for shard in range(num_shards) if (kept := _kept(context.work, shard)) is not None}
    if records:
        context.log.info("kept %d of %d shards of an earlier attempt", len(records), num_shards)
    missing, start_s = [shard for shard in range(num_shards) if shard not in records], time.perf_counter()
    for shard in tqdm(missing, desc=context.name, unit="shard", disable=None):  # None: a bar only on a terminal
        records[shard] = _write(context.work, spec, shard, columns_of(shard))
    num_tokens = sum(records[shard].num_samples for shard in missing) * spec.length
    speed = num_tokens / (time.perf_counter() - start_s) / 1e6
    context.log.info("made %d shards, %d tokens: %.1f million tokens/s", len(missing), num_tokens, speed)
    shards = tuple(records[shard] for shard in range(num_shards))
    faults.point("dataset.before_index")
    index = write_index(context.work, Index(spec, shards))
    return [index, *(context.work / file.path for record in shards for file in record.files.values())]


def _kept(directory: Path, shard: int) -> ShardRecord | None:
    if not (kept := read_object(_record_path(directory, shard))):
        return None
    record = fill(ShardRecord, kept, f"shard {shard}")
    return None if any(file.difference(directory / file.path) for file in record.files.values()) else record


def _write(directory: Path, spec: DatasetSpec, shard: int, columns: Mapping[str, np.ndarray]) -> ShardRecord:
    """Write the files of a shard and then its record."""
    dtype, files = token_dtype(spec.vocab_size), {}
    for column in spec.columns:
        array = columns[column]
        if array.dtype != dtype or array.shape[1:] != (spec.length,):
            raise TypeError(f"{column}: expected {dtype} (N, {spec.length}), got {array.dtype} {array.shape}")
        path = f"shards/{column}-{shard:05d}.npy"
        faults.point("shard.before_file")
        data = write_array(directory / path, array)
        files[column] = FileRecord(path, len(data), hashlib.sha256(data).hexdigest())
    record = ShardRecord(len(columns[spec.columns[0]]), files)
    faults.point("shard.before_record")
    write_json(_record_path(directory, shard), record)
    return record


def _record_path(directory: Path, shard: int) -> Path:
    return directory / "shards" / f"{shard:05d}.json"


def write_array(path: Path, array: np.ndarray) -> bytes:
    """Write an .npy file atomically; return its content."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_atomic(path, buffer.getvalue())
    return buffer.getvalue()


def write_index(directory: Path, index: Index) -> Path:
    """Write the index of the data set in `directory`, to which the paths in `index` are relative; return its path."""
    write_json(directory / INDEX_NAME, index)
    return directory / INDEX_NAME


class HashedFile:
    """A writer that counts and digests the bytes that it writes to an open file."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name, self._size, self._digest = file, name, 0, hashlib.sha256()

    def write(self, data: bytes) -> None:
        faults.point("hashed_file.before_write")
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    @property
    def record(self) -> FileRecord:
        """The record of the bytes written so far; its path is the name that the constructor got."""
        return FileRecord(self._name, self._size, self._digest.hexdigest())
