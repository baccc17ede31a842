"""Where the text of language models comes from, and their tokenizer: in experiment files and in the jobs alike."""

from dataclasses import dataclass
from typing import Annotated, Literal

from implicit_llm_contracts.config.values import Count, Digest, Names, Text
from implicit_llm_contracts.runs import Only


@dataclass(frozen=True)
class LibraryCorpus:
    """Documentation and sources of the standard library of the running Python."""

    source: Literal["python_library"]
    max_document_bytes: Count | None = None  # a longer document stops the job; the job has a default


@dataclass(frozen=True)
class CorpusFiles:
    """Files of jsonl, parquet or plain text, also compressed (gz, zst), below the downloads or the working directory.

    `files`: names or patterns. `field`: key of the text in a record. `split_by`: key of another field, such as a
    directory, whose documents are all held out or all trained on.
    """

    source: Literal["files"]
    files: Names
    field: Text = "text"
    split_by: Text | None = None
    max_document_bytes: Count | None = None


@dataclass(frozen=True)
class HubCorpus:
    """A data set of the Hugging Face hub, as it was prefetched. `revision`: commit or tag; null takes the newest."""

    source: Literal["hub"]
    dataset: Text
    revision: str | None = None
    split: Text = "train"
    field: Text = "text"
    max_document_bytes: Count | None = None


Corpus = LibraryCorpus | CorpusFiles | HubCorpus


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json below the downloads or the working directory; `sha256` null checks nothing."""

    source: Literal["file"]
    file: Text
    sha256: Digest | None = None
    end_of_text: Text = "<|endoftext|>"


@dataclass(frozen=True)
class HubTokenizer:
    """The tokenizer of a model of the Hugging Face hub. `revision`: commit or tag; null takes the newest."""

    source: Literal["hub"]
    name: Text
    revision: str | None = None
    end_of_text: Text = "<|endoftext|>"


@dataclass(frozen=True)
class TrainedTokenizer:
    """Byte-level BPE, trained on the documents that are not in the test split, on at most `max_bytes` of text."""

    source: Literal["trained"]
    max_bytes: Annotated[int, Only(lambda value: value >= 1000, "an integer of at least 1000")] = 100_000_000
    end_of_text: Text = "<|endoftext|>"
