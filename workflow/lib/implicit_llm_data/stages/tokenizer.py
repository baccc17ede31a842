"""Run the stage `data` of kind `tokenizer`: copy a local or fetched tokenizer.json, or train one on the corpus."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from implicit_llm_contracts.config.text import END_OF_TEXT, Corpus, CorpusFiles
from implicit_llm_contracts.config.values import BelowOne, Count, Seed, VocabSize
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.fetched_files import FETCH, TOKENIZER_FILE, HubFiles, find_fetched
from implicit_llm_contracts.runs.places import local_files
from implicit_llm_contracts.runs.run_directory import DECLARED
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.text.corpus import DocumentSplit, open_share, require_planned_corpus


class TokenizerError(UserError):
    """A tokenizer is missing, not the expected one, or does not fit the model."""


@dataclass(frozen=True)
class TokenizerConfig:
    """The settings of a tokenizer; `source` determines which of them are used.

    With "file", it is the tokenizer.json `file`, whose `sha256` is checked unless it is None. With "hub", it is that of
    the model `name` at `revision`. With "trained", it is trained on about `max_bytes` of the training documents of
    `corpus`; `corpus_sha256` is the digest of all its files when the job was planned, or None for another source.
    vocab_size: that of the model, at least the tokenizer's number of ids; a trained tokenizer has this many ids, or
    fewer for a short text.
    """

    source: Literal["file", "hub", "trained"]
    vocab_size: VocabSize
    end_of_text: str = END_OF_TEXT
    file: str = ""
    sha256: str | None = None
    name: str = ""
    revision: str | None = None
    corpus: Corpus | None = None
    corpus_sha256: str | None = None
    max_bytes: Count = 100_000_000
    test_fraction: BelowOne = 0.001
    validation_fraction: BelowOne = 0.0
    seed: Seed = 0


def run(context: StageContext) -> StageResult:
    """Write the tokenizer that the configuration names or describes.

    Raises: ConfigError, TokenizerError, CorpusError, FetchedFilesError, StorageError.
    """
    start_s = time.perf_counter()
    data, summary = make_tokenizer(context.settings(TokenizerConfig), context.downloads)
    files = [TOKENIZER_FILE, f"{DECLARED}/{TOKENIZER_FILE}"]  # the second is copied to the run directory, for users
    for path in files:
        write_atomic(context.work / path, data)
    context.log.info("%s: %d ids, %.1f s", TOKENIZER_FILE, summary["num_ids"], time.perf_counter() - start_s)
    return StageResult(files, summary)


def make_tokenizer(config: TokenizerConfig, downloads: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the content of the configured tokenizer.json and the job's summary; `downloads` has the fetched files.

    Raises: TokenizerError, CorpusError, FetchedFilesError.
    """
    wanted = HubFiles("tokenizer", config.name, config.revision)
    fetched = find_fetched(wanted, downloads) if config.source == "hub" else None
    data = {"trained": _train, "hub": _from_hub, "file": _from_file}[config.source](config, downloads)
    tokenizer = load_tokenizer(data, config.file or config.name or "the trained tokenizer")
    end_of_text_id = tokenizer.token_to_id(config.end_of_text)
    if end_of_text_id is None:
        raise TokenizerError(f"end_of_text: the tokenizer has no token '{config.end_of_text}'; name one that it has")
    num_ids = require_ids_below(tokenizer, config.vocab_size)
    summary = {"num_ids": num_ids, "vocab_size": config.vocab_size, "end_of_text_id": end_of_text_id}
    return data, summary if fetched is None else {**summary, "commit": fetched.commit}


def load_tokenizer(data: bytes, where: str) -> Tokenizer:
    """Return the tokenizer from the content of its tokenizer.json, without truncation and padding.

    Raises: TokenizerError that starts with `where`, the name of the source.
    """
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the package `tokenizers` raises nothing more precise
        reason = str(error).splitlines()[0][:200]
        raise TokenizerError(f"{where}: no tokenizer.json that `tokenizers` reads ({reason}); give another") from error
    tokenizer.no_truncation()  # saved tokenizers of fine-tuned models often cut texts to a length, or pad them
    tokenizer.no_padding()
    return tokenizer


def require_ids_below(tokenizer: Tokenizer, vocab_size: int) -> int:
    """Return the tokenizer's largest id plus one, which must be at most `vocab_size`. Raises: TokenizerError."""
    num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if num_ids > vocab_size:
        raise TokenizerError(
            f"vocab_size: {vocab_size} is less than the tokenizer's {num_ids} ids; use at least {num_ids}"
        )
    return num_ids


def _from_file(config: TokenizerConfig, downloads: Path) -> bytes:
    found = local_files(config.file, downloads)
    if not found:
        raise TokenizerError(
            f"tokenizer.file: {config.file} is neither in {downloads.absolute()} nor in {Path.cwd()}; correct the "
            "name, or fetch the file"
        )
    path = found[0][1]
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if config.sha256 is not None and digest != config.sha256.lower():
        raise TokenizerError(
            f"{path}: sha256 is {digest[:16]}..., expected {config.sha256[:16]}...; fetch it again, correct "
            "tokenizer.sha256, or plan the job again if you replaced the file"
        )
    return data


def _from_hub(config: TokenizerConfig, downloads: Path) -> bytes:
    """Return the tokenizer.json in the folder of fetched files. Raises: TokenizerError."""
    path = HubFiles("tokenizer", config.name, config.revision).folder(downloads) / TOKENIZER_FILE
    if not path.is_file():
        raise TokenizerError(f"tokenizer.name: '{config.name}' has not been fetched to {path.parent}; {FETCH}")
    return path.read_bytes()


def _train(config: TokenizerConfig, downloads: Path) -> bytes:
    """Train byte-level BPE that splits text into words as GPT-2 does; return the bytes of its tokenizer.json.

    Equal documents in equal order give equal bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[config.end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(config, downloads), trainer)
    return tokenizer.to_str(pretty=True).encode()


def _training_texts(config: TokenizerConfig, downloads: Path) -> Iterator[str]:
    assert config.corpus is not None
    if isinstance(config.corpus, CorpusFiles) and config.corpus_sha256 is not None:
        require_planned_corpus(config.corpus, config.corpus_sha256, downloads)
    split, num_bytes = DocumentSplit(config.test_fraction, config.seed, config.validation_fraction), 0
    for document in open_share(config.corpus, downloads).documents():
        if split.of(document.split_key) == "train":
            yield document.text
            num_bytes += len(document.utf8)
            if num_bytes >= config.max_bytes:
                return
