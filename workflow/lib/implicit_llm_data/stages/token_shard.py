"""Run the stage `data` of kind `token_shard`: encode some files of a corpus as one stream of tokens per split.

train.bin, test.bin      little-endian uint16, every document followed by end-of-text
validation.bin           the same, if the data set has that split
shard.json               the sources and digests of these files, written last
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tqdm import tqdm

from implicit_llm_contracts.config.text import CorpusFiles, TokenShardConfig
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import new_file, write_json
from implicit_llm_contracts.runs.fetched_files import TOKENIZER_FILE
from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.manifest import FileRecord
from implicit_llm_contracts.runs.stage_context import TOKENIZER_ROLE, StageContext, StageResult
from implicit_llm_data.shard_writer import HashedFile
from implicit_llm_data.shards import TOKEN_TYPE
from implicit_llm_data.stages.tokenizer import load_tokenizer, require_ids_below
from implicit_llm_data.text.corpus import (
    CorpusShare,
    Document,
    DocumentSplit,
    Split,
    open_share,
    require_planned_files,
)

RECORD_NAME = "shard.json"
BATCH_BYTES = 1 << 22  # text encoded at once: enough for all cores, and small compared with the memory per core
# A text of more characters than this is cut into pieces, if `may_be_cut` allows it, because encoding a text at once
# needs a hundred times its size in memory. Each piece ends at the first white space after this many characters.
PIECE_CHARACTERS = 1 << 20
REPORT_S = 10.0  # the time between two points in the journal


def run(context: StageContext) -> StageResult:
    """Encode the documents of the shard's files; only the configuration, tokenizer and text determine the output.

    Raises: ConfigError, CorpusError, FetchedFilesError, InputMissing, TokenizerError, StorageError.
    """
    config = context.settings(TokenShardConfig)
    share = open_share(config.corpus, context.downloads, config.shard, config.num_shards)
    if isinstance(config.corpus, CorpusFiles) and config.file_sha256 is not None:
        require_planned_files(config.corpus, share, config.file_sha256, context.downloads)
    given = context.given(TOKENIZER_ROLE)
    path, end_of_text = given.work / TOKENIZER_FILE, int(given.manifest.summary["end_of_text_id"])
    tokenizer = load_tokenizer(path.read_bytes(), str(path))
    require_ids_below(tokenizer, config.vocab_size)
    shard = _Shard(tokenizer, end_of_text, DocumentSplit(config.test_fraction, config.seed, config.validation_fraction))
    files = _write(context, share, shard)
    source = {key: value for key, value in context.config.items() if key != "kind"}
    record = {
        "vocab_size": config.vocab_size,
        "end_of_text": end_of_text,
        "source": {**source, "files": [{"name": file.name, "size": file.size} for file in share.files]},
        "listing": share.listing,
        "files": files,
    }
    faults.point("token_shard.before_record")
    write_json(context.work / RECORD_NAME, record)
    summary = {
        **{f"{split}_tokens": file.size // TOKEN_TYPE.itemsize for split, file in files.items()},
        **{f"{name}_documents": shard.documents[name] for name in (*shard.split.names, "empty")},
        "text_bytes": shard.text_bytes,
        "text_sha256": shard.text_digest.hexdigest(),
        **({} if share.commit is None else {"commit": share.commit}),
    }
    return StageResult([*(file.path for file in files.values()), RECORD_NAME], summary)


def _write(context: StageContext, share: CorpusShare, shard: _Shard) -> dict[Split, FileRecord]:
    """Write the stream of each split, report progress, and return the records of the files.

    No file gets its final name before all documents are encoded.
    """
    context.journal.rewind(0)  # points of an interrupted attempt do not count
    reported_s = 0.0
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=share.size, desc=context.name, unit="B", unit_scale=True, disable=None))
        # The stack renames the files in reverse order, so the file of the training split appears first.
        paths = {split: context.work / f"{split}.bin" for split in reversed(shard.split.names)}
        files = {split: HashedFile(stack.enter_context(new_file(path)), path.name) for split, path in paths.items()}
        for batch in _batches(share.documents()):
            faults.point("token_shard.before_batch")
            shard.write(batch, files)
            bar.set_postfix_str(f"{shard.tokens_per_s / 1e6:.2f}M tokens/s", refresh=False)
            bar.update(batch[-1].position - bar.n)
            if shard.elapsed_s - reported_s >= REPORT_S:
                reported_s = shard.elapsed_s
                shard.report(context.journal)
        faults.point("token_shard.before_commit")
    committed = {split: file.record for split, file in files.items()}
    if not shard.documents:
        context.log.warning("no documents in %s", ", ".join(file.name for file in share.files)[:300])
        return committed
    shard.report(context.journal)
    context.log.info(
        "encoded %d documents, %.1f MB of text, %d tokens in %.1f s: %.2f million tokens/s",
        *(shard.documents.total(), shard.text_bytes / 1e6, shard.num_tokens, shard.elapsed_s, shard.tokens_per_s / 1e6),
    )
    return committed


class _Shard:
    """An encoder that writes documents to the files of their splits, and counts documents and tokens."""

    def __init__(self, tokenizer: Tokenizer, end_of_text: int, split: DocumentSplit) -> None:
        self._tokenizer = tokenizer
        self._end = np.array([end_of_text], dtype=TOKEN_TYPE).tobytes()
        self.split = split
        self._start_s = time.perf_counter()
        self.documents: Counter[str] = Counter()
        self.text_digest = hashlib.sha256()
        self.text_bytes = 0
        self.num_tokens = 0

    def write(self, batch: list[Document], files: Mapping[Split, HashedFile]) -> None:
        written = [document for document in batch if not document.text.isspace() and document.text]
        self.documents["empty"] += len(batch) - len(written)
        for document, ids in zip(written, encode(self._tokenizer, [item.text for item in written]), strict=True):
            self.text_digest.update(len(document.utf8).to_bytes(8, "little") + document.utf8)
            self.text_bytes += len(document.utf8)
            split = self.split.of(document.split_key)
            self.documents[split] += 1
            files[split].write(ids + self._end)
            self.num_tokens += len(ids) // TOKEN_TYPE.itemsize + 1

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    def report(self, journal: Journal) -> None:
        values = {"tokens": self.num_tokens, "text_bytes": self.text_bytes, "tokens_per_s": self.tokens_per_s}
        journal.metrics(self.documents.total(), values)


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


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[bytes]:
    """Return the ids of each text as little-endian uint16. Ids must be below 65,536.

    Special tokens in the texts are recognised; none are added. All cores share the texts, unless one is long enough to
    be cut: then all texts are encoded one after another.
    """
    if max(map(len, texts), default=0) <= PIECE_CHARACTERS or not may_be_cut(tokenizer):
        return encode_whole(tokenizer, texts)
    piece = re.compile(rf".{{{PIECE_CHARACTERS}}}.*?\S(?=[ \t\n\r])|.+", re.DOTALL)
    return [b"".join(encode_whole(tokenizer, [found[0]])[0] for found in piece.finditer(text)) for text in texts]


def encode_whole(tokenizer: Tokenizer, texts: Sequence[str]) -> list[bytes]:
    """Return the same as `encode`, without cutting texts."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, TOKEN_TYPE).tobytes() for encoding in encodings]


def may_be_cut(tokenizer: Tokenizer) -> bool:
    """Return whether the ids of a text equal those of its pieces, if it is cut before white space.

    They are equal for a tokenizer that splits text into words as GPT-2 does, such as that of GPT-NeoX, Pythia or OPT,
    or one trained here: such a tokenizer never joins white space to the text before it. Return False for any other.
    """
    cutter = tokenizer.pre_tokenizer
    if not (isinstance(cutter, pre_tokenizers.ByteLevel) and cutter.use_regex and not cutter.add_prefix_space):
        return False
    if not isinstance(tokenizer.normalizer, normalizers.NFC | None) or tokenizer.truncation or tokenizer.padding:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    return not any(token.rstrip or re.search(r"\S[ \t\n\r]", token.content) for token in added)
