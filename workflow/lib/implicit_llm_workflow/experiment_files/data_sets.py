"""Define the data sets of an experiment file: a class for each kind, with its fields, their defaults and its jobs."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.fill import Only, as_config, fill
from implicit_llm_contracts.config.tasks import (
    CATBABI,
    LANGUAGE_MODEL,
    WORD_PROBLEM,
)
from implicit_llm_contracts.config.text import (
    ArchiveText,
    CatbabiConfig,
    CorpusFiles,
    HubCorpus,
    HubTokenizer,
    LibraryCorpus,
    SimulatedText,
    TokenizerFile,
    TokenShardConfig,
    TokenStreamConfig,
    TrainedTokenizer,
)
from implicit_llm_contracts.config.values import (
    DISTINCT,
    SOME,
    Count,
    Fraction,
    Length,
    Name,
    Seed,
    Share,
    Text,
    VocabSize,
)
from implicit_llm_contracts.config.word_problem import WordProblemConfig, product_order
from implicit_llm_contracts.errors import refuse_if
from implicit_llm_contracts.plugins import Kinds, OwnTask, settings_class
from implicit_llm_report.config import VALIDATION
from implicit_llm_workflow.experiment_files.yaml_files import fill_entry, selected
from implicit_llm_workflow.node import Node


class _DataSet:
    """The base of all kinds of data sets; by default, a data set has no source jobs and no validation sets."""

    @property
    def num_train_sequences(self) -> int | None:
        """The number of training sequences, or None if only the data job finds it out."""
        return None

    def sources(self) -> Iterator[Node]:
        yield from ()

    def validation_nodes(self) -> Iterator[Node]:
        yield from ()


@dataclass(frozen=True)
class TrainSplit:
    """The training set. Several hard fractions are mixed: each has an equal share of the sequences."""

    length: Length
    hard_fraction: Fraction | Annotated[tuple[Fraction, ...], DISTINCT]
    num_samples: Count

    @property
    def hard_fractions(self) -> tuple[float, ...]:
        return self.hard_fraction if isinstance(self.hard_fraction, tuple) else (self.hard_fraction,)


@dataclass(frozen=True)
class TestSplit:
    """The test sets, one for every pair of length and hard fraction."""

    lengths: Annotated[tuple[Length, ...], DISTINCT]
    hard_fractions: Annotated[tuple[Fraction, ...], DISTINCT]
    num_samples: Count


@dataclass(frozen=True)
class ValidationSplit(TestSplit):
    """The validation sets, like `test` but from their own `seed`; learning rates and variants are chosen on them."""

    seed: Seed = 1


@dataclass(frozen=True)
class WordProblem(_DataSet):
    """A word problem over a group and, if there is one, a monoid.

    `group`: S<n>, A<n>, Z<n> or a plugin's group. `monoid`: the second factor of the product; "aperiodic" has four
    elements. A hard fraction is the probability that a token's group part is drawn from the whole group; otherwise this
    part is the identity. In the name of a published file, P090 means the hard fraction 0.1. Training and test sets are
    drawn from separate streams of `seed`. `validation`: used instead of `test` by evaluations with `split: validation`.
    `shard_samples`: the sequences in each file; a restarted job resumes after the last complete file. `folder`: a
    folder with files of the authors' generator, such as train_A5_L256_P090.bin and test_A5_L256_P050.bin, which are
    then used instead of drawing sequences.
    """

    name: str
    kind: Literal["word_problem"]
    group: str
    train: TrainSplit
    test: TestSplit
    monoid: Literal["none", "aperiodic"] = "none"
    seed: Seed = 0
    shard_samples: Count = 131_072
    validation: ValidationSplit | None = None
    folder: Text | None = None

    def __post_init__(self) -> None:
        product_order(self.group, self.monoid)  # only for its errors
        refuse_if(
            self.folder is not None and (self.validation is not None or len(self.train.hard_fractions) > 1),
            "folder: its files have one hard fraction each, and none is for validation; remove the others, or folder",
        )
        refuse_if(
            self.validation is not None and self.validation.seed == self.seed,
            f"validation: its seed {self.seed} is that of the test sets too; give another",
        )

    @cached_property
    def vocab_size(self) -> int:
        """The number of tokens, which are the elements of the product."""
        return product_order(self.group, self.monoid)

    @property
    def num_train_sequences(self) -> int:
        return self.train.num_samples

    def train_node(self) -> Node:
        train = self.train
        return self._node("train", self.seed, "train", train.length, train.hard_fractions, train.num_samples)

    def test_nodes(self) -> Iterator[Node]:
        """Yield one job for every length and hard fraction."""
        yield from self._held_out("test", self.seed, self.test)

    def validation_nodes(self) -> Iterator[Node]:
        """Yield one job for every length and hard fraction; the job makes a test set with the validation seed."""
        if self.validation is not None:
            yield from self._held_out(VALIDATION, self.validation.seed, self.validation)

    def _held_out(self, name: str, seed: int, sets: TestSplit) -> Iterator[Node]:
        for length, fraction in itertools.product(sets.lengths, sets.hard_fractions):
            yield self._node("test", seed, f"{name}-L{length}-h{fraction:g}", length, (fraction,), sets.num_samples)

    def _node(
        self,
        split: Literal["train", "test"],
        seed: int,
        name: str,
        length: int,
        hard_fractions: tuple[float, ...],
        num_samples: int,
    ) -> Node:
        fraction = hard_fractions[0] if len(hard_fractions) == 1 else hard_fractions
        job = WordProblemConfig(self.group, self.monoid, fraction, length, num_samples, split, seed, self.shard_samples)
        if self.folder is not None:
            percent = round(100 * (1 - hard_fractions[0]))  # the share of identities
            job = replace(job, file=f"{self.folder}/{split}_{self.group}_L{length}_P{percent:03d}.bin")
        return Node("data", f"{self.name}-{name}", as_config(job))


@dataclass(frozen=True)
class Catbabi(_DataSet):
    """A CatbAbI data set. `text`: the source of the stories. `collection`: a part of this source, by default the first.

    `mode`: training learns the answers to questions (qa) or every token (lm); validation and test sets are evaluated
    for both. `seed` determines the order of the stories. `drop_last_story` omits the last story of each file, as the
    published preparation does.
    """

    name: str
    kind: Literal["catbabi"]
    text: SimulatedText | ArchiveText
    length: Length
    vocab_size: VocabSize
    collection: str | None = None
    mode: Literal["qa", "lm"] = "qa"
    seed: Seed = 0
    drop_last_story: bool = True

    def __post_init__(self) -> None:
        if self.collection not in (None, *self.text.collections):
            raise ValueError(
                f"collection: a text of source {self.text.source} has no {self.collection!r}; give "
                f"{' or '.join(self.text.collections)}, or leave the key out"
            )

    def sources(self) -> Iterator[Node]:
        yield self._text_node()

    def train_node(self) -> Node:
        return self._node("train")

    def test_nodes(self) -> Iterator[Node]:
        """Yield the validation set, by which the report chooses the best of competing runs, and the test set."""
        yield self._node("valid")
        yield self._node("test")

    def _text_node(self) -> Node:
        text = {key: sorted(item) if isinstance(item, list) else item for key, item in as_config(self.text).items()}
        return Node("data", f"{self.name}-text", {"kind": "babi_text", **text})

    def _node(self, split: Literal["train", "valid", "test"]) -> Node:
        collection = self.collection or self.text.collections[0]
        mode = self.mode if split == "train" else "lm"  # the evaluation finds the questions itself
        job = CatbabiConfig(collection, split, mode, self.length, self.vocab_size, self.seed, self.drop_last_story)
        return Node("data", f"{self.name}-{split}", as_config(job), {"text": self._text_node().key})


@dataclass(frozen=True)
class TrainText:
    """The training text. `length`: tokens of a training sequence.

    `tokens`: the number of tokens in the training set, whose sequences are spread evenly over the text; by default all
    tokens. A longer training run repeats these sequences, each time in another order.
    """

    length: Length
    tokens: Count | None = None

    def __post_init__(self) -> None:
        nearest_multiple = max(1, round((self.tokens or 0) / self.length)) * self.length
        refuse_if(
            self.tokens is not None and self.tokens % self.length > 0,
            f"tokens: {self.tokens} is not a multiple of length, {self.length}; give {nearest_multiple}",
        )


@dataclass(frozen=True)
class TestLengths:
    """The lengths of the sequences into which the test stream is cut."""

    lengths: Annotated[tuple[Length, ...], DISTINCT]


@dataclass(frozen=True)
class ValidationText(TestLengths):
    """The validation text, like `test` but from its own documents; learning rates and variants are chosen on it.

    `fraction`: the share of all documents that it gets.
    """

    fraction: Share = 0.01


@dataclass(frozen=True)
class LanguageModel(_DataSet):
    """A text as one stream of tokens, in which an end-of-text token separates the documents.

    `num_shards`: the number n of jobs that share the corpus. Each job reads every n-th file of the corpus and writes a
    file for each split. `test_fraction`: the share of documents in the test split. A hash of `seed` and a document's
    text selects them; if the corpus sets `split_by`, the value of that field replaces the text. Evaluations with
    `split: validation` use `validation` instead of `test`. The test documents do not depend on `validation`.
    """

    name: str
    kind: Literal["language_model"]
    corpus: LibraryCorpus | CorpusFiles | HubCorpus
    tokenizer: TokenizerFile | HubTokenizer | TrainedTokenizer
    num_shards: Annotated[int, Only(lambda value: 1 <= value <= 100_000, "an integer from 1 to 100000")]
    vocab_size: VocabSize
    train: TrainText
    test: TestLengths
    test_fraction: Share = 0.001  # the share that the paper holds out of the deduplicated Pile
    seed: Seed = 0
    validation: ValidationText | None = None

    def __post_init__(self) -> None:
        is_trained = isinstance(self.tokenizer, TrainedTokenizer)
        refuse_if(
            is_trained and self.vocab_size < 257,
            f"vocab_size: {self.vocab_size} is too small to train a tokenizer; bytes and end of text need 257",
        )
        refuse_if(
            self.test_fraction + self.validation_fraction >= 1,
            f"validation: fraction {self.validation_fraction} and test_fraction {self.test_fraction} leave no text for "
            "training; give smaller ones",
        )

    @property
    def validation_fraction(self) -> float:
        return 0.0 if self.validation is None else self.validation.fraction

    @property
    def num_train_sequences(self) -> int | None:
        return None if self.train.tokens is None else self.train.tokens // self.train.length

    def train_node(self) -> Node:
        return self._stream_node("train", self.train.length, self.train.tokens)

    def test_nodes(self) -> Iterator[Node]:
        """Yield one stream, which evaluations cut at each length; the stream's index names only the shortest length."""
        yield self._stream_node("test", min(self.test.lengths))

    def validation_nodes(self) -> Iterator[Node]:
        if self.validation is not None:
            yield self._stream_node("validation", min(self.validation.lengths))

    def lengths(self, split: str) -> tuple[int, ...]:
        """Return the sequence lengths for evaluations of a held-out split."""
        return self.validation.lengths if split == VALIDATION and self.validation is not None else self.test.lengths

    def tokenizer_node(self) -> Node:
        config = {"kind": "tokenizer", **as_config(self.tokenizer), "vocab_size": self.vocab_size}
        if isinstance(self.tokenizer, TrainedTokenizer):  # these keys determine the tokenizer's training text
            config |= {"corpus": as_config(self.corpus), "test_fraction": self.test_fraction, "seed": self.seed}
            config |= {} if self.validation is None else {"validation_fraction": self.validation_fraction}
        return Node("data", f"{self.name}-tokenizer", config)

    def sources(self) -> Iterator[Node]:
        tokenizer = self.tokenizer_node()
        yield tokenizer
        upstream = {"tokenizer": tokenizer.key}
        about = (self.vocab_size, self.test_fraction, self.seed, self.validation_fraction)
        first = as_config(TokenShardConfig(self.corpus, 0, self.num_shards, *about))
        for shard, role in enumerate(self._shards):
            yield Node("data", f"{self.name}-{role}", {**first, "shard": shard}, upstream)

    @cached_property  # every stream has thousands of shards as inputs
    def _shards(self) -> dict[str, str]:
        """The keys of the jobs that tokenise the shards of the text, by their roles as inputs."""
        roles = (f"shard-{shard:05d}" for shard in range(self.num_shards))
        return {role: f"data/{self.name}-{role}" for role in roles}

    def _stream_node(
        self, split: Literal["train", "test", "validation"], length: int, tokens: int | None = None
    ) -> Node:
        return Node("data", f"{self.name}-{split}", as_config(TokenStreamConfig(split, length, tokens)), self._shards)


@dataclass(frozen=True)
class OwnData(_DataSet):
    """A data set of a plugin's task; the task defines the settings and their defaults.

    `train`: the settings for the training set. `test`: the settings for each test set, by its name.
    """

    name: str
    kind: str
    vocab_size: VocabSize
    train: Any
    test: Annotated[dict[Name, Any], SOME]
    seed: Seed = 0

    def train_node(self) -> Node:
        return self._node("train", self.train, "train")

    def test_nodes(self) -> Iterator[Node]:
        for name, settings in self.test.items():
            yield self._node("test", settings, f"test-{name}")

    def _node(self, split: str, settings: Any, name: str) -> Node:
        config = {"kind": self.kind, "split": split, "vocab_size": self.vocab_size, "seed": self.seed}
        return Node("data", f"{self.name}-{name}", config | as_config(settings))


# Every data set has these methods. `sources`: the jobs that are inputs of the others. `train_node`: the job of the
# training set. `test_nodes`, `validation_nodes`: the jobs of the held-out sets for `split: test` and `validation`.
DataSet = WordProblem | Catbabi | LanguageModel | OwnData
KINDS: dict[str, type[Any]] = {
    WORD_PROBLEM: WordProblem,
    CATBABI: Catbabi,
    LANGUAGE_MODEL: LanguageModel,
}


def build_data_set(name: str, item: Mapping[str, Any], source: str, kinds: Kinds) -> DataSet:
    """Return a data set from its values. Raises: ConfigError that starts with `source`, the file."""
    at = f"{source}: data.{name}"
    task = selected(kinds.tasks, "kind", item, at)
    if not isinstance(task, OwnTask):
        return fill_entry(KINDS[item["kind"]], name, item, at)
    data, own = fill_entry(OwnData, name, item, at), settings_class(item["kind"], task.settings, [])
    return replace(
        data,
        train=fill(own, data.train, f"{at}.train"),
        test={test: fill(own, settings, f"{at}.test.{test}") for test, settings in data.test.items()},
    )
