"""How a data set of equally long token sequences lies on disk: columns of .npy shards and an index.

    index.json                      what is there, written last: readers start here
    shards/<column>-00000.npy       (samples of the shard, length), uint8 or uint16 by vocabulary
    shards/00000.json               record of a finished shard, so that a restart keeps it

Every file appears atomically, and equal data sets are equal byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from implicit_llm_contracts.runs.errors import UserError

INDEX_NAME = "index.json"
FORMAT = 1
IGNORED_LABEL = -100  # of a position that does not count, as in torch's cross entropy
STREAM = "stream"  # the layout of a stream of tokens; see shards.py
TOKEN_TYPE = np.dtype("<u2")  # of a stream of tokens, whatever the vocabulary


class DatasetError(UserError):
    """A data set on disk is missing, incomplete or damaged; the message names the file and how to rebuild it."""


class LengthError(UserError, ValueError):
    """The data set has no rows of the wanted length."""


class VocabularyTooLarge(UserError, ValueError):
    """Token ids do not fit the largest storage type."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest storage type for ids below `vocab_size`.

    Raises: VocabularyTooLarge above 65,536.
    """
    if vocab_size > 1 << 16:
        raise VocabularyTooLarge(
            f"vocab_size: {vocab_size} tokens do not fit uint16, at most {1 << 16} do; use a smaller vocabulary"
        )
    return np.dtype(np.uint8 if vocab_size <= 1 << 8 else np.uint16)


class Sequences(Protocol):
    """What training and evaluation need of a data set: rows of at most `length` tokens, as columns of integers (B, L).

    `fetch` may give fewer rows than it was asked for, the first ones, where those after them have another length.
    """

    vocab_size: int
    length: int

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True)
class DatasetSpec:
    """What a data set holds; `source` (plain JSON values) says what it was made from.

    ignored_id: the token that stands in the column `labels` where there is nothing to learn, None if there is none.
    """

    vocab_size: int
    length: int
    columns: tuple[str, ...]
    source: Mapping[str, Any]
    ignored_id: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values; `ignored_id` only where there is one."""
        fields = json.loads(json.dumps(asdict(self)))  # tuples become lists, as in what is read back
        if self.ignored_id is None:
            del fields["ignored_id"]
        return fields


@dataclass(frozen=True)
class ShardFile:
    """One column of one shard; `path` is relative to the data set's directory."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard; `files` has one entry per column."""

    num_samples: int
    files: Mapping[str, ShardFile]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ShardRecord:
        """Invert `dataclasses.asdict`. Raises: KeyError, TypeError or AttributeError for anything else."""
        files = {column: ShardFile(**file) for column, file in fields["files"].items()}
        return cls(int(fields["num_samples"]), files)


def damage_of(directory: Path, file: ShardFile, is_deep: bool) -> str | None:
    """Say what is wrong with a file, None if nothing is; only `is_deep` reads its bytes."""
    path = directory / file.path
    try:
        size = path.stat().st_size
        if size != file.size:
            return f"has {size} bytes instead of {file.size}"
        if is_deep:
            with path.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != file.sha256:
                return f"is damaged: sha256 is {digest[:12]}..., expected {file.sha256[:12]}..."
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def rebuild_hint(directory: Path) -> str:
    """Name the command that makes what is missing and keeps the rest."""
    if directory.parent.name != "work":  # not below a run directory
        return "write the data set again"
    manifest = os.path.relpath(directory.parent.parent / "manifest.json")
    return f"type `rm -f {manifest}` and run the workflow again: it rebuilds what is damaged and keeps the rest"
