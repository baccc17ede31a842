"""The tokenizer of a data set: a tokenizer.json taken from a file or the hub, or trained on the corpus itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.fetched_files import FETCH, HubFiles, find_fetched
from implicit_llm_data.shard_format import token_dtype
from implicit_llm_data.text.corpus import CorpusConfig, open_share
from implicit_llm_data.text.corpus_hub import is_offline
from implicit_llm_data.text.document_split import DocumentSplit

FILE_NAME = "tokenizer.json"


class TokenizerError(UserError):
    """A tokenizer is not there, not the expected one, or does not fit the model."""


@dataclass(frozen=True)
class TokenizerConfig:
    """One tokenizer. Every field is part of its identity.

    vocab_size: of the model, at least as many as the tokenizer has ids, at most 65,536; a trained one gets so many,
    unless the text gives fewer. file, with an optional sha256; or name and revision on the hub; or corpus, of which
    about max_bytes are read, without the test documents of the split.
    Raises: ValueError, naming the key.
    """

    source: Literal["file", "hub", "trained"]
    vocab_size: int
    end_of_text: str = "<|endoftext|>"
    file: str | None = None
    sha256: str | None = None
    name: str | None = None
    revision: str | None = None
    corpus: CorpusConfig | None = None
    max_bytes: int = 100_000_000
    test_fraction: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        token_dtype(self.vocab_size)  # for its error
        for source, key in (("file", "file"), ("hub", "name"), ("trained", "corpus")):
            if (self.source == source) != bool(getattr(self, key)):
                raise ValueError(f"{key}: give it together with `source: {source}`, and only with it")
        if self.source == "trained" and self.vocab_size < 257:
            raise ValueError(f"vocab_size: {self.vocab_size} is out of range; bytes and end of text need at least 257")
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes: {self.max_bytes} is out of range; use at least 1")

    @property
    def split(self) -> DocumentSplit:
        return DocumentSplit(self.test_fraction, self.seed)


def make_tokenizer(config: TokenizerConfig, downloads: Path) -> str:
    """The content of tokenizer.json, checked; `downloads` is the folder of fetched files.

    Raises: TokenizerError, CorpusError, FetchedFilesError.
    """
    if config.source == "trained":
        text = _train(config, downloads)
    elif config.source == "hub":
        text = _from_hub(config, downloads)
    else:
        text = _from_file(config, downloads)
    check_tokenizer(load_tokenizer(text, config.file or config.name or "the trained tokenizer"), config)
    return text


def load_tokenizer(text: str, where: str) -> Tokenizer:
    """A tokenizer from the content of its tokenizer.json. Raises: TokenizerError."""
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing more precise
        reason = str(error).splitlines()[0][:200]
        raise TokenizerError(f"{where}: no tokenizer.json that `tokenizers` reads ({reason}); give another") from error


def check_tokenizer(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Check that a model with `vocab_size` tokens can use it. Raises: TokenizerError."""
    if tokenizer.token_to_id(config.end_of_text) is None:
        raise TokenizerError(f"end_of_text: the tokenizer has no token '{config.end_of_text}'; name one that it has")
    require_ids_below(tokenizer, config.vocab_size)


def require_ids_below(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that all ids of the tokenizer are below `vocab_size`. Raises: TokenizerError, VocabularyTooLarge."""
    token_dtype(vocab_size)
    num_ids = num_ids_of(tokenizer)
    if num_ids > vocab_size:
        raise TokenizerError(
            f"vocab_size: {vocab_size} is less than the tokenizer's {num_ids} ids; use at least {num_ids}"
        )


def num_ids_of(tokenizer: Tokenizer) -> int:
    """One more than the largest id."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _from_file(config: TokenizerConfig, downloads: Path) -> str:
    assert config.file is not None
    paths = [downloads / config.file, Path(config.file)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        places = " nor ".join(str(path.absolute()) for path in dict.fromkeys(paths))
        raise TokenizerError(f"tokenizer.file: neither {places} is there; correct the name, or fetch the file")
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if config.sha256 is not None and found != config.sha256.lower():
        raise TokenizerError(
            f"{path}: sha256 is {found[:16]}..., expected {config.sha256[:16]}...; fetch it again, or correct "
            "tokenizer.sha256"
        )
    return _decoded(data, path)


def _from_hub(config: TokenizerConfig, downloads: Path) -> str:
    """From the folder of fetched files, else from the hub's cache or the network. Raises: FetchedFilesError."""
    assert config.name is not None
    wanted = HubFiles("tokenizer", config.name, config.revision)
    fetched = wanted.folder(downloads) / FILE_NAME
    if fetched.is_file():
        find_fetched(wanted, downloads)  # for its errors
    else:
        fetched = _download(config.name, config.revision)
    return _decoded(fetched.read_bytes(), fetched)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, FILE_NAME, revision=revision, local_files_only=is_offline()))
    except LocalEntryNotFoundError as error:
        advice = f"it is not in the cache and the hub is out of reach; {FETCH}, or set HF_HUB_OFFLINE=0"
        raise TokenizerError(f"tokenizer.name: cannot get '{name}': {advice}") from error
    except EntryNotFoundError as error:
        raise TokenizerError(f"tokenizer.name: {name} has no {FILE_NAME}; use another tokenizer") from error
    except (OSError, ValueError, RuntimeError) as error:  # all that the hub raises is one of these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        advice = f"{reason}; correct name or revision, or {FETCH}"
        raise TokenizerError(f"tokenizer.name: cannot get '{name}': {advice}") from error


def _train(config: TokenizerConfig, downloads: Path) -> str:
    """Train byte-level BPE that cuts text as GPT-2 does; equal documents in equal order give equal bytes."""
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
    return tokenizer.to_str(pretty=True)


def _training_texts(config: TokenizerConfig, downloads: Path) -> Iterator[str]:
    assert config.corpus is not None
    num_bytes = 0
    for document in open_share(config.corpus, downloads).documents():
        if config.split.of(document.utf8) == "test":
            continue
        yield document.text
        num_bytes += len(document.utf8)
        if num_bytes >= config.max_bytes:
            return


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: invalid UTF-8 at byte {error.start}; fetch it again") from error
