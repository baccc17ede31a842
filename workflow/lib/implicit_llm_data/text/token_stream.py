"""Reading a stream of tokens that lies in one or more flat files, in rows of any length, memory-mapped.

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

from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST_NAME
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_data.shard_format import (
    FORMAT,
    INDEX_NAME,
    TOKEN_TYPE,
    DatasetError,
    ShardFile,
    damage_of,
    rebuild_hint,
)

LAYOUT = "stream"


class TokenStream:
    """A finished stream as rows of `length` tokens; parts are opened when first read.

    source: what the stream was made from, as its writer gave it.
    """

    def __init__(
        self, directory: Path, vocab_size: int, length: int, source: Mapping[str, Any], parts: Sequence[ShardFile]
    ):
        if length < 1:
            raise ValueError(f"length: {length} is out of range; use at least 1")
        self.directory = directory
        self.vocab_size = vocab_size
        self.length = length
        self.source = source
        self._parts = parts
        self._ends = np.cumsum([part.size // TOKEN_TYPE.itemsize // length for part in parts])
        self._open: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return open_stream, (self.directory, self.length)  # a worker process maps the files itself

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts, the dropped ends included."""
        return sum(part.size for part in self._parts) // TOKEN_TYPE.itemsize

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Rows at `indices` (B,), in the order asked for: input_ids and labels, equal, int64 (B, length).

        Raises: IndexError outside 0..len-1; DatasetError for a part that cannot be read.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"{self.directory}: row indices must lie in 0..{len(self) - 1}")
        rows_BL = np.empty((len(indices), self.length), dtype=np.int64)
        part_of = np.searchsorted(self._ends, indices, side="right")
        for part in np.unique(part_of):
            chosen = np.flatnonzero(part_of == part)
            rows = self._rows(int(part))
            rows_BL[chosen] = rows[indices[chosen] - (self._ends[part] - len(rows))]
        return {"input_ids": rows_BL, "labels": rows_BL.copy()}

    def verify(self) -> None:
        """Recompute every digest.

        Raises: DatasetError for the first part that differs.
        """
        for part in range(len(self._parts)):
            self._check(part, is_deep=True)

    def check_sizes(self) -> None:
        """Compare the size of every part with the index.

        Raises: DatasetError for the first part that is missing or has another size.
        """
        for part in range(len(self._parts)):
            self._check(part, is_deep=False)

    def _check(self, part: int, is_deep: bool) -> None:
        damage = damage_of(self.directory, self._parts[part], is_deep)
        if damage:
            is_newer = _is_as_made(self._path(part), is_deep)
            raise self._part_error(part, damage, self.directory if is_newer else None)

    def _rows(self, part: int) -> np.ndarray:
        """A view of one part, (rows, length)."""
        if part not in self._open:
            count = int(self._ends[part] - (self._ends[part - 1] if part else 0))
            try:
                tokens = np.memmap(self._path(part), dtype=TOKEN_TYPE, mode="r", shape=(count, self.length))
            except (OSError, ValueError) as error:
                raise self._part_error(part, f"cannot be read ({error})") from error
            self._open[part] = tokens.view(np.ndarray)  # np.memmap's own indexing is several times slower
        return self._open[part]

    def _path(self, part: int) -> Path:
        return Path(os.path.normpath(self.directory / self._parts[part].path))

    def _part_error(self, part: int, damage: str, to_rebuild: Path | None = None) -> DatasetError:
        """to_rebuild: by default the run that the part is of."""
        path = self._path(part)
        return DatasetError(f"shard {part} ({path}) {damage}; {rebuild_hint(to_rebuild or path.parent)}")


def _is_as_made(path: Path, is_deep: bool) -> bool:
    """Whether a part, `<run>/work/<fingerprint>/<file>`, is what its own run's manifest says.

    Then it was made anew after the index, with other content, and not it but the index is to be made again.
    """
    if path.parent.parent.name != "work":  # not below a run directory
        return False
    run_dir = path.parents[2]
    manifest = Manifest.find(run_dir / MANIFEST_NAME)
    name = path.relative_to(run_dir).as_posix()
    found = [] if manifest is None else [record for record in manifest.files if record.path == name]
    return any(
        damage_of(run_dir, ShardFile(record.path, record.size, record.sha256), is_deep) is None for record in found
    )


def write_index(directory: Path, fields: Mapping[str, Any], parts: Sequence[ShardFile]) -> Path:
    """Write the index of a stream, the paths of `parts` being relative to `directory`; return its path.

    fields: vocab_size, length and source.
    """
    records = [{"path": part.path, "size": part.size, "sha256": part.sha256} for part in parts]
    index = {"format": FORMAT, "layout": LAYOUT, **fields, "parts": records}
    write_atomic(directory / INDEX_NAME, json.dumps(index, indent=1, sort_keys=True) + "\n")
    return directory / INDEX_NAME


def open_stream(directory: Path, length: int | None = None) -> TokenStream:
    """Open a stream in rows of `length`, by default as its index says, and check the sizes of its files.

    Raises: DatasetError when the index or a part is missing or damaged; ValueError for a length below 1.
    """
    path = directory / INDEX_NAME
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] != FORMAT or index["layout"] != LAYOUT:
            raise ValueError(f"it is no stream of format {FORMAT}")
        parts = [ShardFile(**part) for part in index["parts"]]
        if not parts:
            raise ValueError("it lists no parts")
        vocab_size, default_length, source = int(index["vocab_size"]), int(index["length"]), index["source"]
    except OSError as error:
        raise DatasetError(f"{path}: no data set here ({error.strerror}); {rebuild_hint(directory)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{path}: the index is damaged ({error}); {rebuild_hint(directory)}") from error
    stream = TokenStream(directory, vocab_size, default_length if length is None else length, source, parts)
    stream.check_sizes()
    return stream
