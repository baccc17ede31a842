"""Read a memory-mapped data set: shards of equally long sequences, or a stream of tokens cut to any length.

    index.json                      the list of all files, written last: readers start here
    shards/<column>-00000.npy       (samples of the shard, length), in the smallest type that fits the vocabulary
    shards/00000.json               the record of a finished shard, which a restarted job reuses

The index of a stream lists parts. A part is a file of little-endian uint16, with a path relative to the index. The path
may lead to other run directories; a copy of the whole results folder works like the original. Each part is cut into its
own sequences, and the rest at its end is dropped. Another length therefore needs no copy, and separate jobs can write
the parts at the same time.

Every file appears atomically, and equal data sets are equal byte for byte.
"""

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.errors import UserError, refuse_if
from implicit_llm_contracts.runs.atomic import size_difference
from implicit_llm_contracts.runs.manifest import FileRecord

INDEX_NAME = "index.json"
FORMAT = 2
IGNORED_LABEL = -100  # the label of a position that does not count, as in torch's cross entropy
TOKEN_TYPE = np.dtype("<u2")  # the type of a stream's tokens, for every vocabulary


class DatasetError(UserError):
    """A data set on disk is missing, incomplete or damaged; the message names the file and how to rebuild it."""


class LengthError(UserError, ValueError):
    """The data set has no sequences of the wanted length."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest storage type for ids below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


class Sequences(Protocol):
    """The interface of a data set for training and evaluation, with sequences of at most `length` tokens.

    `fetch` returns the sequences at `indices` (B,) as integer columns (B, L). If these differ in length, it may return
    only the first ones, which have equal lengths.
    """

    vocab_size: int
    length: int

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True)
class DatasetSpec:
    """The description of a data set; `source` (plain JSON values) describes its origin.

    ignored_id: the token in the column `labels` at positions without a target; None if every position has a target.
    """

    vocab_size: int
    length: int
    columns: tuple[str, ...]
    source: Mapping[str, Any]
    ignored_id: int | None = None


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard; `files` has the file of each column, with a path relative to the data set's directory."""

    num_samples: int
    files: Mapping[str, FileRecord]


@dataclass(frozen=True)
class Index:
    """The content of the index: `shards` of sequences, or `parts` of a stream, whose only column is input_ids."""

    spec: DatasetSpec
    shards: tuple[ShardRecord, ...] = ()
    parts: tuple[FileRecord, ...] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        refuse_if(self.format != FORMAT, f"format {self.format} is unknown, expected {FORMAT}")
        refuse_if(not (self.shards or self.parts), "it lists no shards")


class TokenDataset:
    """A finished data set of sequences, or a stream cut into sequences; files are mapped at their first use.

    The sequences of a stream have the column `input_ids`, and `labels` equal to it.
    source: the origin of the data set, as its writer described it.
    """

    def __init__(self, directory: Path, index: Index) -> None:
        self.directory, spec = directory, index.spec
        self.vocab_size, self.length, self.source = spec.vocab_size, spec.length, spec.source
        self.is_stream = bool(index.parts)
        self._columns, self._shards, self._ignored_id = spec.columns, index.shards, spec.ignored_id
        if self.is_stream:
            row_bytes = TOKEN_TYPE.itemsize * self.length
            self._shards = tuple(ShardRecord(part.size // row_bytes, {"input_ids": part}) for part in index.parts)
        self._ends = np.cumsum([shard.num_samples for shard in self._shards])
        self._open: dict[int, dict[str, np.ndarray]] = {}
        self._check_sizes()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return open_dataset, (self.directory, self.length)  # a worker process maps the files itself

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the sequences at `indices` (B,) in this order, as one int64 array (B, length) per column.

        In the column `labels`, the data set's `ignored_id` becomes -100.
        Raises: IndexError outside 0..len-1; DatasetError for a shard that cannot be read.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"{self.directory}: row indices must lie in 0..{len(self) - 1}")
        batch = {column: np.empty((len(indices), self.length), dtype=np.int64) for column in self._columns}
        shard_of = np.searchsorted(self._ends, indices, side="right")
        for shard in np.unique(shard_of):
            chosen = np.flatnonzero(shard_of == shard)
            rows_in_shard = indices[chosen] - (self._ends[shard] - self._shards[shard].num_samples)
            for column, array in self._load(int(shard)).items():
                batch[column][chosen] = array[rows_in_shard]
        if self.is_stream:
            batch["labels"] = batch["input_ids"].copy()
        elif self._ignored_id is not None and "labels" in batch:
            batch["labels"][batch["labels"] == self._ignored_id] = IGNORED_LABEL
        return batch

    def _check_sizes(self) -> None:
        for shard, record in enumerate(self._shards):
            for file in record.files.values():
                if damage := size_difference(self._path(file), file.size):
                    raise self._error(shard, file, damage)

    def _load(self, shard: int) -> dict[str, np.ndarray]:
        if shard not in self._open:
            record = self._shards[shard]
            self._open[shard] = {column: self._map(shard, record.files[column]) for column in self._columns}
        return self._open[shard]

    def _map(self, shard: int, file: FileRecord) -> np.ndarray:
        path, expected = self._path(file), (self._shards[shard].num_samples, self.length)
        array: np.ndarray
        try:
            if self.is_stream:
                array = np.memmap(path, TOKEN_TYPE, "r", shape=expected)
            else:
                array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise self._error(shard, file, f"cannot be read ({error})") from error
        if array.shape != expected:
            raise self._error(shard, file, f"holds {array.dtype} {array.shape}, not {expected}")
        return array.view(np.ndarray)  # np.memmap's own indexing is several times slower

    def _path(self, file: FileRecord) -> Path:
        return Path(os.path.normpath(self.directory / file.path))

    def _error(self, shard: int, file: FileRecord, damage: str) -> DatasetError:
        path = self._path(file)
        # A separate job writes each part of a stream. After it has rebuilt the part, the index must be rebuilt too.
        directories = [path.parent, self.directory] if file.path.startswith("..") else [self.directory]
        return DatasetError(f"{path}: shard {shard}: {damage}; {rebuild_hint(*directories)}")


def open_dataset(directory: Path, length: int | None = None) -> TokenDataset:
    """Open a finished data set and check the sizes of its files.

    length: the sequence length of a stream, by default that of its index; other data sets have a fixed length.
    Raises: DatasetError if the index or a shard is missing or damaged; LengthError for a length that the data set
    cannot have; ValueError for a length below 1.
    """
    path = directory / INDEX_NAME
    try:
        index = fill(Index, json.loads(path.read_bytes()), INDEX_NAME)
    except OSError as error:
        raise DatasetError(f"{path}: no data set here ({error.strerror}); {rebuild_hint(directory)}") from error
    except (ValueError, UserError) as error:
        raise DatasetError(f"{path}: the index is damaged ({error}); {rebuild_hint(directory)}") from error
    if length is None:
        return TokenDataset(directory, index)
    if length < 1:
        raise ValueError(f"length: {length} is out of range; use at least 1")
    if not index.parts and length != index.spec.length:
        raise LengthError(
            f"{directory}: its rows have {index.spec.length} tokens and cannot be cut to {length}; leave the length "
            "out, or make a data set of that length"
        )
    return TokenDataset(directory, replace(index, spec=replace(index.spec, length=length)))


def rebuild_hint(*directories: Path) -> str:
    """Return advice for an error message: how to rebuild the damaged files in `directories` and keep all others."""
    if any(directory.parent.name != "work" for directory in directories):  # not below a run directory
        return "write the data set again"
    manifests = shlex.join(os.path.relpath(directory.parent.parent / "manifest.json") for directory in directories)
    return f"type `rm -f {manifests}` and run the workflow again: it rebuilds what is damaged and keeps the rest"
