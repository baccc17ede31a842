"""The stage `data` of kind `token_shard`: some files of a corpus as two streams of tokens, and a record of them.

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
from tqdm import tqdm

from implicit_llm_contracts.config.text import Corpus
from implicit_llm_contracts.config.values import BelowOne, Count, Number, Seed, VocabSize
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.errors import UserError, require
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shard_format import TOKEN_TYPE, ShardFile, rebuild_hint
from implicit_llm_data.shard_writer import HashedFile
from implicit_llm_data.stages.tokenizer import FILE_NAME as TOKENIZER_NAME
from implicit_llm_data.stages.tokenizer import load_tokenizer, require_ids_below
from implicit_llm_data.text.corpus import SPLITS, CorpusShare, DocumentSplit, Listing, Split, open_share
from implicit_llm_data.text.corpus_file import Document
from implicit_llm_data.text.encoding import Encoder, encoder_for

RECORD_NAME = "shard.json"
FORMAT = 2  # 1 had no listing of the corpus
BATCH_BYTES = 1 << 22  # of text encoded at once: enough for all cores, and small beside the memory of one core
TOKENIZER_ROLE = "tokenizer"
REPORT_S = 10.0  # between two points in the journal


class TokenShardError(UserError):
    """A shard's record is missing or damaged, or its job was not given a tokenizer; the message says which."""


@dataclass(frozen=True)
class TokenShardConfig:
    """Shard `shard` of `num_shards`. Every field is part of its identity."""

    corpus: Corpus
    shard: Number
    num_shards: Count
    vocab_size: VocabSize
    test_fraction: BelowOne = 0.001
    seed: Seed = 0

    def __post_init__(self) -> None:
        require("shard", self.shard, self.shard < self.num_shards, f"give less than num_shards, {self.num_shards}")

    @property
    def split(self) -> DocumentSplit:
        return DocumentSplit(self.test_fraction, self.seed)


def run(context: StageContext) -> StageResult:
    """Encode the documents of the shard's files; what it writes depends on configuration and text alone.

    Raises: ConfigError, CorpusError, TokenizerError, StorageError.
    """
    config = context.settings(TokenShardConfig)
    share = open_share(config.corpus, context.downloads, config.shard, config.num_shards)
    encoder, end_of_text = _encoder(context, config)
    writer = TokenShardWriter(context.work, encoder, end_of_text, config.split)
    files = [{"name": file.name, "size": file.size} for file in share.files]
    listing = asdict(share.listing)
    source = {**{key: value for key, value in context.config.items() if key != "kind"}, "files": files}
    about = {"vocab_size": config.vocab_size, "source": source, "listing": listing}
    _report(context, share, writer.write(share.documents(), about))
    record = read_record(context.work)
    summary = {
        **{f"{split}_tokens": count for split, count in record["tokens"].items()},
        **{f"{name}_documents": count for name, count in record["documents"].items()},
        "text_bytes": record["text"]["bytes"],
        "text_sha256": record["text"]["sha256"],
    }
    return StageResult(["train.bin", "test.bin", RECORD_NAME], summary)


def _encoder(context: StageContext, config: TokenShardConfig) -> tuple[Encoder, int]:
    """The encoder of the given tokenizer, and the id of its end-of-text token."""
    given = context.inputs.get(TOKENIZER_ROLE)
    if given is None:
        raise TokenShardError(f"{context.name}: no tokenizer given; add --input {TOKENIZER_ROLE}=DIR")
    path = given.work / TOKENIZER_NAME
    tokenizer = load_tokenizer(path.read_text(encoding="utf-8"), str(path))
    require_ids_below(tokenizer, config.vocab_size)
    return encoder_for(tokenizer), int(given.manifest.summary["end_of_text_id"])


def _report(context: StageContext, share: CorpusShare, steps: Iterable[Progress]) -> None:
    """Take all steps; tell how far they are and how fast."""
    context.journal.rewind(0)  # points of an interrupted attempt do not count
    last: Progress | None = None
    reported_s = 0.0
    total = share.size
    with tqdm(total=total, desc=context.name, unit="B", unit_scale=True, disable=None) as bar:
        for step in steps:
            done = step.text_bytes if total is None else step.position
            bar.set_postfix_str(f"{step.tokens_per_s / 1e6:.2f}M tokens/s", refresh=False)
            bar.update(done - bar.n)
            if step.elapsed_s - reported_s >= REPORT_S:
                reported_s = step.elapsed_s
                _to_journal(context, step)
            last = step
    if last is None:
        context.log.warning("no documents in %s", ", ".join(file.name for file in share.files)[:300])
        return
    _to_journal(context, last)
    context.log.info(
        "encoded %d documents, %.1f MB of text, %d tokens in %.1f s: %.2f million tokens/s",
        *(last.num_documents, last.text_bytes / 1e6, last.num_tokens, last.elapsed_s, last.tokens_per_s / 1e6),
    )


def _to_journal(context: StageContext, step: Progress) -> None:
    metrics = {"tokens": step.num_tokens, "text_bytes": step.text_bytes, "tokens_per_s": step.tokens_per_s}
    context.journal.metrics(step.num_documents, metrics)


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
            split = self._split.of(document.split_key)
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
