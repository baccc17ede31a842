"""Define the sources of text, its tokenizers, and the jobs that make data sets from it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from implicit_llm_contracts.config.fill import UNLESS_DEFAULT, Only
from implicit_llm_contracts.config.values import (
    DISTINCT,
    BelowOne,
    Count,
    Digest,
    Length,
    Names,
    Number,
    Seed,
    Text,
    VocabSize,
    integer,
    matching,
)
from implicit_llm_contracts.errors import refuse_if

END_OF_TEXT = "<|endoftext|>"  # of a tokenizer that names no other token


@dataclass(frozen=True)
class LibraryCorpus:
    """The documentation and sources of the standard library of the running Python."""

    source: Literal["python_library"]
    # A longer document stops the job. None means the data job's default limit.
    max_document_bytes: Annotated[Count | None, UNLESS_DEFAULT] = None


@dataclass(frozen=True)
class CorpusFiles:
    """Files of parquet, jsonl or plain text in the downloads folder or working directory.

    jsonl and plain text may be compressed (gz, zst). `files`: names or patterns. `field`: the key of the text in a
    record. `split_by`: the key of another field, such as a directory; documents with the same value are all in the same
    split.
    """

    source: Literal["files"]
    files: Names
    field: Text = "text"
    split_by: Annotated[Text | None, UNLESS_DEFAULT] = None
    max_document_bytes: Annotated[Count | None, UNLESS_DEFAULT] = None


@dataclass(frozen=True)
class HubCorpus:
    """A prefetched data set of the Hugging Face hub. `revision`: commit or tag; null means the newest."""

    source: Literal["hub"]
    dataset: Text
    revision: str | None = None
    split: Text = "train"
    field: Text = "text"
    max_document_bytes: Annotated[Count | None, UNLESS_DEFAULT] = None


Corpus = LibraryCorpus | CorpusFiles | HubCorpus


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json in the downloads folder or working directory. `sha256`: its digest; null skips the check."""

    source: Literal["file"]
    file: Text
    sha256: Digest | None = None
    end_of_text: Text = END_OF_TEXT


@dataclass(frozen=True)
class HubTokenizer:
    """The tokenizer of a model of the Hugging Face hub. `revision`: commit or tag; null means the newest."""

    source: Literal["hub"]
    name: Text
    revision: str | None = None
    end_of_text: Text = END_OF_TEXT


@dataclass(frozen=True)
class TrainedTokenizer:
    """A byte-level BPE tokenizer, trained on the first documents of the training split, about `max_bytes` in total."""

    source: Literal["trained"]
    max_bytes: Annotated[int, integer(1000)] = 100_000_000
    end_of_text: Text = END_OF_TEXT


# The bAbI tasks that the simulator can generate.
SIMULATED_FAMILIES = (1, 2, 3, 6, 7, 8, 11, 12, 15, 18, 19)
_Family = Annotated[
    int,
    Only(SIMULATED_FAMILIES.__contains__, f"some of {', '.join(map(str, SIMULATED_FAMILIES))}, numbers of bAbI tasks"),
]
_BabiFile = Annotated[
    str,
    matching(
        r"en-valid(-10k)?/qa([1-9]|1[0-9]|20)_(train|valid|test)[.]txt", "a name such as en-valid-10k/qa3_train.txt"
    ),
]


@dataclass(frozen=True)
class Stories:
    """The number of stories in each split, for each family (bAbI task)."""

    train: Count
    valid: Count
    test: Count


@dataclass(frozen=True)
class SimulatedText:
    """Simulated stories in the format of bAbI. `story_length`: the approximate number of statements in a story.

    A story of family 11 can be one statement longer, and a very short story has at least the statements that its first
    question needs. Each story has its own random stream, so the splits are independent, and a larger set begins with
    the same stories. Very short stories can still be equal by chance.
    """

    source: Literal["simulated"]
    families: Annotated[tuple[_Family, ...], DISTINCT]
    stories: Stories
    seed: Seed = 0
    story_length: Count = 10  # similar to the original stories of most families

    collections = ("simulated",)


@dataclass(frozen=True)
class ArchiveText:
    """The bAbI v1.2 archive in the downloads folder.

    `missing_files`: files that are not used and may be missing; any other missing file is an error.
    """

    source: Literal["archive"]
    missing_files: tuple[_BabiFile, ...] = ()

    collections = ("en-valid-10k", "en-valid")


@dataclass(frozen=True)
class CatbabiConfig:
    """One split of CatbAbI. Every field is part of its identity.

    collection: "simulated", "en-valid" (1k) or "en-valid-10k". mode: "qa" labels answers alone, "lm" every token.
    length: tokens per sequence. vocab_size: the model's vocabulary, at least as large as that of the text.
    drop_last_story: drop the last story of every file, as the published preprocessing does.
    """

    collection: str
    split: Literal["train", "valid", "test"]
    mode: Literal["qa", "lm"]
    length: Length
    vocab_size: VocabSize
    seed: Number
    drop_last_story: bool
    kind: Literal["catbabi"] = "catbabi"


@dataclass(frozen=True)
class TokenShardConfig:
    """The shard `shard` of a text that is divided into `num_shards`. Every field is part of its identity.

    corpus_sha256: a digest of all files of a corpus of files. file_sha256: the digests of this shard's files by name.
    Both are None for other kinds of corpus, and if the files were missing when the job was first planned.
    """

    corpus: Corpus
    shard: Number
    num_shards: Count
    vocab_size: VocabSize
    test_fraction: BelowOne
    seed: Seed
    validation_fraction: Annotated[BelowOne, UNLESS_DEFAULT] = 0.0
    corpus_sha256: Annotated[str | None, UNLESS_DEFAULT] = None
    file_sha256: Annotated[dict[str, str] | None, UNLESS_DEFAULT] = None
    kind: Literal["token_shard"] = "token_shard"

    def __post_init__(self) -> None:
        shard, count = self.shard, self.num_shards
        refuse_if(shard >= count, f"shard: {shard} is out of range; give less than num_shards, {count}")


@dataclass(frozen=True)
class TokenStreamConfig:
    """One split of a text, from all its shards.

    length: tokens per sequence, unless a reader requests another length. tokens: the number of tokens to use, in
    sequences that are spread evenly over the split; None for all.
    """

    split: Literal["train", "test", "validation"]
    length: Count
    tokens: Annotated[Count | None, UNLESS_DEFAULT] = None
    kind: Literal["token_stream"] = "token_stream"
