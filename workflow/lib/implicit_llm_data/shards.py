"""Reading a data set, memory-mapped: shards of rows, or streams of tokens that are cut into rows of any length.

The index of a stream is

    index.json      {"format": 1, "layout": "stream", "vocab_size", "length", "source", "parts": [...]}

A part is a file of little-endian uint16, named relative to the index, which may point into other run directories: a
copy of the whole results folder works like the original. Each part is cut into rows of its own, and what is left at
its end is dropped, so that another length needs no copy and a part is never waited for by its neighbour.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST_NAME
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_data.shard_format import (
    FORMAT,
    IGNORED_LABEL,
    INDEX_NAME,
    STREAM,
    TOKEN_TYPE,
    DatasetError,
    DatasetSpec,
    LengthError,
    ShardFile,
    ShardRecord,
    damage_of,
    rebuild_hint,
    token_dtype,
)


class TokenDataset:
    """A finished data set of rows; shards are mapped when first read.

    source: what the data set was made from, as its writer gave it.
    """

    def __init__(self, directory: Path, spec: DatasetSpec, shards: Sequence[ShardRecord]) -> None:
        self.directory = directory
        self.vocab_size = spec.vocab_size
        self.length = spec.length
        self.source = spec.source
        self._columns = spec.columns
        self._ignored_id = spec.ignored_id
        self._shards = shards
        self._ends = np.cumsum([shard.num_samples for shard in shards])
        self._open: dict[int, dict[str, np.ndarray]] = {}
        for shard in range(len(shards)):
            self._check(shard, is_deep=False)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return open_dataset, (self.directory, self.length)  # a worker process maps the files itself

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Rows at `indices` (B,), in the order asked for: one int64 array (B, length) for each column.

        In the column `labels` the data set's `ignored_id` becomes -100.

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
        if self._ignored_id is not None and "labels" in batch:
            labels_BL = batch["labels"]
            labels_BL[labels_BL == self._ignored_id] = IGNORED_LABEL
        return batch

    def verify(self) -> None:
        """Recompute every digest.

        Raises: DatasetError for the first shard that differs.
        """
        for shard in range(len(self._shards)):
            self._check(shard, is_deep=True)

    def _check(self, shard: int, is_deep: bool) -> None:
        for file in self._shards[shard].files.values():
            damage = damage_of(self.directory, file, is_deep)
            if damage:
                raise self._error(shard, file, damage, self._run_to_repeat(file, is_deep))

    def _load(self, shard: int) -> dict[str, np.ndarray]:
        if shard not in self._open:
            record = self._shards[shard]
            self._open[shard] = {column: self._map(shard, record.files[column]) for column in self._columns}
        return self._open[shard]

    def _map(self, shard: int, file: ShardFile) -> np.ndarray:
        expected = (self._shards[shard].num_samples, self.length)
        try:
            array = self._mapped(self._path(file), expected)
        except (OSError, ValueError) as error:
            raise self._error(shard, file, f"cannot be read ({error})", self._home(file)) from error
        if array.shape != expected or array.dtype != self._dtype:
            raise self._error(shard, file, f"holds {array.dtype} {array.shape}, not {expected}", self._home(file))
        return array.view(np.ndarray)  # np.memmap's own indexing is several times slower

    def _mapped(self, path: Path, shape: tuple[int, int]) -> np.ndarray:
        return np.load(path, mmap_mode="r", allow_pickle=False)

    @property
    def _dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)

    def _path(self, file: ShardFile) -> Path:
        return Path(os.path.normpath(self.directory / file.path))

    def _home(self, file: ShardFile) -> Path:
        """The directory whose job wrote the file."""
        return self.directory

    def _run_to_repeat(self, file: ShardFile, is_deep: bool) -> Path:
        """The directory whose job is to run again when the file is not as the index says."""
        return self._home(file)

    def _error(self, shard: int, file: ShardFile, damage: str, to_rebuild: Path) -> DatasetError:
        return DatasetError(f"shard {shard} ({self._path(file)}) {damage}; {rebuild_hint(to_rebuild)}")


class TokenStream(TokenDataset):
    """A finished stream as rows of `length` tokens, whose labels are the rows themselves."""

    def __init__(
        self, directory: Path, vocab_size: int, length: int, source: Mapping[str, Any], parts: Sequence[ShardFile]
    ) -> None:
        if length < 1:
            raise ValueError(f"length: {length} is out of range; use at least 1")
        rows = [ShardRecord(part.size // TOKEN_TYPE.itemsize // length, {"input_ids": part}) for part in parts]
        super().__init__(directory, DatasetSpec(vocab_size, length, ("input_ids",), source), rows)

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Rows at `indices` (B,), in the order asked for: input_ids and labels, equal, int64 (B, length).

        Raises: as of a data set.
        """
        batch = super().fetch(indices)
        return {**batch, "labels": batch["input_ids"].copy()}

    def _mapped(self, path: Path, shape: tuple[int, int]) -> np.ndarray:
        return np.memmap(path, dtype=TOKEN_TYPE, mode="r", shape=shape)

    @property
    def _dtype(self) -> np.dtype:
        return TOKEN_TYPE

    def _home(self, file: ShardFile) -> Path:
        return self._path(file).parent

    def _run_to_repeat(self, file: ShardFile, is_deep: bool) -> Path:
        """A part that is as its own job made it, after the index, is right, and the index is to be made again."""
        path = self._path(file)
        return self.directory if _is_as_made(path, is_deep) else path.parent


def _is_as_made(path: Path, is_deep: bool) -> bool:
    """Whether a part, `<run>/work/<fingerprint>/<file>`, is what its own run's manifest says."""
    if path.parent.parent.name != "work":  # not below a run directory
        return False
    run_dir = path.parents[2]
    manifest = Manifest.find(run_dir / MANIFEST_NAME)
    name = path.relative_to(run_dir).as_posix()
    found = [] if manifest is None else [record for record in manifest.files if record.path == name]
    return any(
        damage_of(run_dir, ShardFile(record.path, record.size, record.sha256), is_deep) is None for record in found
    )


def open_dataset(directory: Path, length: int | None = None) -> TokenDataset:
    """Open a finished data set and check the sizes of its files.

    length: of the rows of a stream, which can be cut anew; a data set of rows has the length it was made with.
    Raises: DatasetError when the index or a shard is missing or damaged; LengthError for a length that cannot be had;
    ValueError for a length below 1.
    """
    path = directory / INDEX_NAME
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise DatasetError(
                f"{path}: format {index['format']} is unknown, expected {FORMAT}; {rebuild_hint(directory)}"
            )
        is_stream = index.get("layout") == STREAM
        spec, files = _spec_of(index), index["parts" if is_stream else "shards"]
        parts = [ShardFile(**file) for file in files] if is_stream else []
        shards = [] if is_stream else [ShardRecord.from_dict(fields) for fields in files]
        if not files or any(set(shard.files) != set(spec.columns) for shard in shards):
            raise ValueError("it lists no shards, or not every column of each")
    except OSError as error:
        raise DatasetError(f"{path}: no data set here ({error.strerror}); {rebuild_hint(directory)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{path}: the index is damaged ({error}); {rebuild_hint(directory)}") from error
    if is_stream:
        return TokenStream(directory, spec.vocab_size, spec.length if length is None else length, spec.source, parts)
    if length not in (None, spec.length):
        raise LengthError(
            f"{directory}: its rows have {spec.length} tokens and cannot be cut to {length}; leave the length out, "
            "or make a data set of that length"
        )
    return TokenDataset(directory, spec, shards)


def _spec_of(index: Mapping[str, Any]) -> DatasetSpec:
    ignored_id = index.get("ignored_id")
    columns = tuple(index["columns"]) if "parts" not in index else ()
    fields = (int(index["vocab_size"]), int(index["length"]), columns, index["source"])
    return DatasetSpec(*fields, ignored_id=None if ignored_id is None else int(ignored_id))
