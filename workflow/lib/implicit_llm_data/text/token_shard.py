"""One shard of a tokenised corpus: the documents of some of its files as two streams of tokens, and a record of them.

train.bin, test.bin      little-endian uint16, every document followed by end-of-text
shard.json               what they were made of and their digests, written last
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_data.hashed_file import HashedFile
from implicit_llm_data.shard_format import TOKEN_TYPE, ShardFile, rebuild_hint, token_dtype
from implicit_llm_data.text.corpus import CorpusConfig, Listing
from implicit_llm_data.text.corpus_file import Document
from implicit_llm_data.text.document_split import SPLITS, DocumentSplit, Split
from implicit_llm_data.text.encoding import Encoder

RECORD_NAME = "shard.json"
FORMAT = 2  # 1 had no listing of the corpus
BATCH_BYTES = 1 << 22  # of text encoded at once: enough for all cores, and small beside the memory of one core


class TokenShardError(UserError):
    """A shard's record is missing or damaged; the message names it."""


@dataclass(frozen=True)
class TokenShardConfig:
    """Shard `shard` of `num_shards`. Every field is part of its identity.

    Raises: ValueError, naming the key.
    """

    corpus: CorpusConfig
    shard: int
    num_shards: int
    vocab_size: int
    test_fraction: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        token_dtype(self.vocab_size)  # for its error
        if not 0 <= self.shard < self.num_shards:
            raise ValueError(f"shard: {self.shard} is not one of the {self.num_shards} shards, which count from 0")
        DocumentSplit(self.test_fraction, self.seed)  # for its errors

    @property
    def split(self) -> DocumentSplit:
        return DocumentSplit(self.test_fraction, self.seed)


@dataclass(frozen=True)
class Progress:
    """What is done after a batch; position: bytes of the corpus files as stored."""

    num_documents: int
    num_tokens: int
    text_bytes: int
    position: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.elapsed_s, 1e-9)


class TokenShardWriter:
    """Writes the shard of `directory`; nothing has a final name before everything is written.

    Raises: StorageError; what reading the documents raises.
    """

    def __init__(self, directory: Path, encoder: Encoder, end_of_text: int, split: DocumentSplit) -> None:
        self._directory = directory
        self._encoder = encoder
        self._end_of_text = end_of_text
        self._end = np.array([end_of_text], dtype=TOKEN_TYPE).tobytes()
        self._split = split
        self._documents: Counter[str] = Counter()
        self._text_digest = hashlib.sha256()
        self._text_bytes = 0
        self._num_tokens = 0

    def write(self, documents: Iterable[Document], about: Mapping[str, Any]) -> Iterator[Progress]:
        """Write all documents, with a report after each batch; the files are there when the iterator ends.

        about: further entries of the record, JSON: vocab_size, source, and listing of the corpus.
        """
        start_s = time.perf_counter()
        with ExitStack() as stack:
            files = {split: stack.enter_context(HashedFile(self._directory / f"{split}.bin")) for split in SPLITS}
            for batch in _batches(documents):
                faults.point("token_shard.before_batch")
                self._write_batch(batch, files)
                elapsed_s = time.perf_counter() - start_s
                num_documents = sum(self._documents.values())
                yield Progress(num_documents, self._num_tokens, self._text_bytes, batch[-1].position, elapsed_s)
            faults.point("token_shard.before_commit")
            records = {split: file.commit() for split, file in files.items()}
        faults.point("token_shard.before_record")
        write_atomic(self._directory / RECORD_NAME, self._record(records, about))

    def _write_batch(self, batch: list[Document], files: Mapping[Split, HashedFile]) -> None:
        written = [document for document in batch if not document.text.isspace() and document.text]
        self._documents["empty"] += len(batch) - len(written)
        for document, ids in zip(written, self._encoder.encode([item.text for item in written]), strict=True):
            self._text_digest.update(len(document.utf8).to_bytes(8, "little") + document.utf8)
            self._text_bytes += len(document.utf8)
            split = self._split.of(document.utf8)
            self._documents[split] += 1
            files[split].write(ids + self._end)
            self._num_tokens += len(ids) // TOKEN_TYPE.itemsize + 1

    def _record(self, files: Mapping[Split, ShardFile], about: Mapping[str, Any]) -> str:
        record = {
            "format": FORMAT,
            "dtype": "uint16",
            "end_of_text": self._end_of_text,
            "documents": {name: self._documents[name] for name in (*SPLITS, "empty")},
            "tokens": {split: file.size // TOKEN_TYPE.itemsize for split, file in files.items()},
            "files": {split: asdict(file) for split, file in files.items()},
            "text": {"bytes": self._text_bytes, "sha256": self._text_digest.hexdigest()},
            **about,
        }
        return json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def read_record(directory: Path) -> dict[str, Any]:
    """The record of a finished shard. Raises: TokenShardError."""
    path = directory / RECORD_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']} is unknown")
        Listing(**record["listing"])  # for its errors
        return {**record, "files": {split: ShardFile(**record["files"][split]) for split in SPLITS}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenShardError(f"{path}: no record of a shard ({error}); {rebuild_hint(directory)}") from error


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += len(document.utf8)
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
