"""A corpus: many documents in many files, shared out to shards by whole files and read in constant memory.

{"source": "python_library"}
{"source": "files", "files": ["books.jsonl.gz", "more/*.txt"], "field": "text"}
{"source": "hub", "dataset": "EleutherAI/the_pile_deduplicated", "split": "train", "field": "text"}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from implicit_llm_data.text.corpus_file import CorpusError, CorpusFile, Document, TextFormat
from implicit_llm_data.text.corpus_hub import open_hub
from implicit_llm_data.text.corpus_library import library_files
from implicit_llm_data.text.corpus_paths import find_files

# With its copies, chunks and tokens a document takes about six times its size in memory (measured on 34 MiB of prose),
# so that this one, a hundred long novels, keeps a job below 2 GiB.
MAX_DOCUMENT_BYTES = 1 << 27


@dataclass(frozen=True)
class CorpusConfig:
    """Which documents. Every field is part of the identity of what is made of them.

    files: names and patterns (source `files`); field: the text's name in JSON lines and tables; dataset, revision,
    split: of the hub; max_document_bytes: of a document as it is stored (a line of JSON, a text file), at least 1.
    Raises: ValueError, naming the key.
    """

    source: Literal["python_library", "files", "hub"]
    files: tuple[str, ...] = ()
    dataset: str | None = None
    revision: str | None = None
    split: str = "train"
    field: str = "text"
    max_document_bytes: int = MAX_DOCUMENT_BYTES

    def __post_init__(self) -> None:
        if self.max_document_bytes < 1:
            raise ValueError(f"max_document_bytes: {self.max_document_bytes} is out of range; use at least 1")
        if (self.source == "files") != bool(self.files):
            raise ValueError("files: give the list of file names together with `source: files`, and only with it")
        if (self.source == "hub") != bool(self.dataset):
            raise ValueError("dataset: give the data set's name together with `source: hub`, and only with it")

    @property
    def text_format(self) -> TextFormat:
        return TextFormat(self.field, self.max_document_bytes)


@dataclass(frozen=True)
class Listing:
    """All files of a corpus in brief: what shards that make up one data set must agree on.

    sha256: of names and sizes in their order.
    """

    num_files: int
    sha256: str

    @classmethod
    def of(cls, files: Sequence[CorpusFile]) -> Listing:
        lines = json.dumps([[file.name, file.size] for file in files])
        return cls(len(files), hashlib.sha256(lines.encode("ascii")).hexdigest())


@dataclass(frozen=True)
class Share:
    """The files of one shard; listing: of those of all shards."""

    files: Sequence[CorpusFile]
    listing: Listing

    @property
    def size(self) -> int | None:
        """Bytes of the files as they are stored; None when they are not here."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def documents(self) -> Iterator[Document]:
        """Every document, in a fixed order; `position` counts over all files. Raises: CorpusError."""
        before = 0
        for file in self.files:
            for document in file.read():
                yield document._replace(position=before + document.position)
            before += file.size or 0


def open_share(config: CorpusConfig, downloads: Path, shard: int = 0, num_shards: int = 1) -> Share:
    """The files number `shard`, `shard + num_shards`, ... of the corpus; `downloads` is the folder of fetched files.

    Raises: CorpusError when there are none, or fewer than shards.
    """
    if not 0 <= shard < num_shards:
        raise CorpusError(f"shard: {shard} is not one of the {num_shards} shards, which count from 0")
    files: Sequence[CorpusFile]
    if config.source == "python_library":
        files = library_files(config.text_format)
    elif config.source == "files":
        files = find_files(config.files, downloads, config.text_format)
    else:
        assert config.dataset is not None
        files = open_hub((config.dataset, config.revision, config.split), downloads, config.text_format)
    if num_shards > len(files):
        raise CorpusError(
            f"num_shards: {num_shards} shards are more than the corpus has files, {len(files)}; "
            f"use at most {len(files)}, or cut the corpus into more files"
        )
    return Share(files[shard::num_shards], Listing.of(files))
