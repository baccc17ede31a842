"""Reading a data set, memory-mapped: sharded rows here, streams of tokens in `token_stream`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from implicit_llm_data.shard_format import (
    FORMAT,
    IGNORED_LABEL,
    INDEX_NAME,
    DatasetError,
    DatasetSpec,
    LengthError,
    ShardFile,
    ShardRecord,
    damage_of,
    rebuild_hint,
    token_dtype,
)
from implicit_llm_data.text.token_stream import TokenStream, open_stream


class TokenDataset:
    """A finished data set, memory-mapped; shards are opened when first read.

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

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_rows, (self.directory,)  # a worker process maps the files itself instead of getting their bytes

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the samples at `indices` (B,) as one int64 array (B, length) per column, in the order asked for.

        In the column `labels` the data set's `ignored_id` becomes -100.

        Raises: IndexError outside 0..len-1; DatasetError for a shard that cannot be read.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"{self.directory}: sample indices must lie in 0..{len(self) - 1}")
        batch = {column: np.empty((len(indices), self.length), dtype=np.int64) for column in self._columns}
        shard_of = np.searchsorted(self._ends, indices, side="right")
        for shard in np.unique(shard_of):
            rows = np.flatnonzero(shard_of == shard)
            rows_in_shard = indices[rows] - (self._ends[shard] - self._shards[shard].num_samples)
            for column, array in self._load(int(shard)).items():
                batch[column][rows] = array[rows_in_shard]
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

    def check_sizes(self) -> None:
        """Compare the size of every file with the index.

        Raises: DatasetError for the first shard that is missing or has another size.
        """
        for shard in range(len(self._shards)):
            self._check(shard, is_deep=False)

    def _check(self, shard: int, is_deep: bool) -> None:
        for file in self._shards[shard].files.values():
            damage = damage_of(self.directory, file, is_deep)
            if damage:
                raise self._shard_error(shard, file, damage)

    def _load(self, shard: int) -> dict[str, np.ndarray]:
        if shard not in self._open:
            record = self._shards[shard]
            self._open[shard] = {column: self._map(shard, record.files[column]) for column in self._columns}
        return self._open[shard]

    def _map(self, shard: int, file: ShardFile) -> np.ndarray:
        try:
            array = np.load(self.directory / file.path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise self._shard_error(shard, file, f"cannot be read ({error})") from error
        expected = (self._shards[shard].num_samples, self.length)
        if array.shape != expected or array.dtype != token_dtype(self.vocab_size):
            raise self._shard_error(shard, file, f"holds {array.dtype} {array.shape}, not {expected}")
        return array.view(np.ndarray)  # np.memmap's own indexing is several times slower

    def _shard_error(self, shard: int, file: ShardFile, damage: str) -> DatasetError:
        return DatasetError(f"shard {shard} ({self.directory / file.path}) {damage}; {rebuild_hint(self.directory)}")


def open_dataset(directory: Path, length: int | None = None) -> TokenDataset | TokenStream:
    """Open a finished data set and check the sizes of its files.

    length: of the rows of a stream, which can be cut anew; a data set of rows has the length it was made with.
    Raises: DatasetError when the index or a shard is missing or damaged; LengthError for a length that cannot be had.
    """
    if _layout_of(directory) == "stream":
        return open_stream(directory, length)
    dataset = _open_rows(directory)
    if length not in (None, dataset.length):
        raise LengthError(
            f"{directory}: its rows have {dataset.length} tokens and cannot be cut to {length}; leave the length out, "
            "or make a data set of that length"
        )
    return dataset


def _layout_of(directory: Path) -> str:
    try:
        return json.loads((directory / INDEX_NAME).read_bytes()).get("layout", "rows")
    except (OSError, ValueError, AttributeError):
        return "rows"  # whose reader says what is wrong


def _open_rows(directory: Path) -> TokenDataset:
    path = directory / INDEX_NAME
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise DatasetError(
                f"{path}: format {index['format']} is unknown, expected {FORMAT}; {rebuild_hint(directory)}"
            )
        spec = DatasetSpec(
            *(int(index["vocab_size"]), int(index["length"]), tuple(index["columns"]), index["source"]),
            ignored_id=None if index.get("ignored_id") is None else int(index["ignored_id"]),
        )
        shards = [ShardRecord.from_dict(fields) for fields in index["shards"]]
        if not shards or any(set(shard.files) != set(spec.columns) for shard in shards):
            raise ValueError("it lists no shards, or not every column of each")
    except OSError as error:
        raise DatasetError(f"{path}: no data set here ({error.strerror}); {rebuild_hint(directory)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{path}: the index is damaged ({error}); {rebuild_hint(directory)}") from error
    dataset = TokenDataset(directory, spec, shards)
    dataset.check_sizes()
    return dataset
