"""The data sets of an experiment file, one dataclass for each kind, with the defaults of what a file leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_contracts.config.evaluation_kinds import CATBABI, LANGUAGE_MODEL, WORD_PROBLEM
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.experiment_files.groups import vocabulary_size

DEFAULT_SEED = 0
DEFAULT_SHARD_SAMPLES = 131_072
DEFAULT_STORY_LENGTH = 10  # statements, about as many as in the original stories of most families
DEFAULT_END_OF_TEXT = "<|endoftext|>"
DEFAULT_TEST_FRACTION = 0.001  # the published test split of the deduplicated Pile
DEFAULT_TOKENIZER_BYTES = 100_000_000  # a vocabulary changes little beyond; training reads so much and no more


@dataclass(frozen=True)
class TrainSplit:
    """Several hard fractions are mixed in equal shares of the sequences."""

    length: int
    hard_fractions: tuple[float, ...]
    num_samples: int


@dataclass(frozen=True)
class TestSplit:
    """One test set for every pair of length and hard fraction."""

    lengths: tuple[int, ...]
    hard_fractions: tuple[float, ...]
    num_samples: int


@dataclass(frozen=True)
class WordProblem:
    name: str
    kind: str
    group: str
    monoid: str
    seed: int
    shard_samples: int
    vocab_size: int
    train: TrainSplit
    test: TestSplit


@dataclass(frozen=True)
class Catbabi:
    """The stories of the bAbI families, concatenated. `text`: where the stories come from, as its job is told.

    `mode` is that of the training set; validation and test sets are read for both modes.
    """

    name: str
    kind: str
    text: Mapping[str, Any]
    collection: str
    mode: str
    length: int
    vocab_size: int
    seed: int
    drop_last_story: bool


@dataclass(frozen=True)
class LanguageModel:
    """Text as one stream of tokens. `corpus` and `tokenizer`: where they come from, as their jobs are told."""

    name: str
    kind: str
    corpus: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    num_shards: int
    vocab_size: int
    test_fraction: float
    seed: int
    train_length: int
    test_lengths: tuple[int, ...]


DataSet = WordProblem | Catbabi | LanguageModel


def build_data_set(name: str, item: Mapping[str, Any], source: str) -> DataSet:
    """A data set from validated values. Raises: ConfigError that starts with `source`, the file."""
    return _BUILDERS[item["kind"]](name, item, source)


def _word_problem(name: str, item: Mapping[str, Any], source: str) -> WordProblem:
    monoid = item.get("monoid", "none")
    hard = item["train"]["hard_fraction"]
    train = TrainSplit(
        length=int(item["train"]["length"]),
        hard_fractions=tuple(float(value) for value in (hard if isinstance(hard, list) else [hard])),
        num_samples=int(item["train"]["num_samples"]),
    )
    test = TestSplit(
        lengths=tuple(int(length) for length in item["test"]["lengths"]),
        hard_fractions=tuple(float(value) for value in item["test"]["hard_fractions"]),
        num_samples=int(item["test"]["num_samples"]),
    )
    return WordProblem(
        name=name,
        kind=item["kind"],
        group=item["group"],
        monoid=monoid,
        seed=int(item.get("seed", DEFAULT_SEED)),
        shard_samples=int(item.get("shard_samples", DEFAULT_SHARD_SAMPLES)),
        vocab_size=vocabulary_size(item["group"], monoid, f"{source}: data.{name}.group"),
        train=train,
        test=test,
    )


def _catbabi(name: str, item: Mapping[str, Any], source: str) -> Catbabi:
    is_simulated = item["text"]["source"] == "simulated"
    collections = ("simulated",) if is_simulated else ("en-valid-10k", "en-valid")
    collection = item.get("collection", collections[0])
    if collection not in collections:
        raise ConfigError(
            f"{source}: data.{name}.collection: a text that is {'simulated' if is_simulated else 'an archive'} "
            f"has no {collection!r}; give {' or '.join(collections)}, or leave the key out"
        )
    return Catbabi(
        name=name,
        kind=item["kind"],
        text=_simulated_text(item["text"]) if is_simulated else _archive_text(item["text"]),
        collection=collection,
        mode=item.get("mode", "qa"),
        length=int(item["length"]),
        vocab_size=int(item["vocab_size"]),
        seed=int(item.get("seed", DEFAULT_SEED)),
        drop_last_story=item.get("drop_last_story", True),
    )


def _simulated_text(text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "source": "simulated",
        "seed": int(text.get("seed", DEFAULT_SEED)),
        "families": sorted(int(family) for family in text["families"]),
        "stories": {split: int(text["stories"][split]) for split in ("train", "valid", "test")},
        "story_length": int(text.get("story_length", DEFAULT_STORY_LENGTH)),
    }


def _archive_text(text: Mapping[str, Any]) -> dict[str, Any]:
    return {"source": "archive", "missing_files": sorted(text.get("missing_files", []))}


def _language_model(name: str, item: Mapping[str, Any], source: str) -> LanguageModel:
    corpus = _corpus(item["corpus"])
    test_fraction = float(item.get("test_fraction", DEFAULT_TEST_FRACTION))
    seed = int(item.get("seed", DEFAULT_SEED))
    tokenizer = _tokenizer(item["tokenizer"], int(item["vocab_size"]))
    if tokenizer["source"] == "trained":  # on what is not in the test split, so it must know the split
        tokenizer |= {"corpus": corpus, "test_fraction": test_fraction, "seed": seed}
    return LanguageModel(
        name=name,
        kind=item["kind"],
        corpus=corpus,
        tokenizer=tokenizer,
        num_shards=int(item["num_shards"]),
        vocab_size=int(item["vocab_size"]),
        test_fraction=test_fraction,
        seed=seed,
        train_length=int(item["train"]["length"]),
        test_lengths=tuple(int(length) for length in item["test"]["lengths"]),
    )


def _corpus(corpus: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    match corpus["source"]:
        case "files":
            given = {"files": list(corpus["files"]), "field": corpus.get("field", "text")}
        case "hub":
            given = {
                "dataset": corpus["dataset"],
                "revision": corpus.get("revision"),
                "split": corpus.get("split", "train"),
                "field": corpus.get("field", "text"),
            }
    if "max_document_bytes" in corpus:
        given["max_document_bytes"] = int(corpus["max_document_bytes"])
    return {"source": corpus["source"], **given}


def _tokenizer(tokenizer: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    given: dict[str, Any]
    match tokenizer["source"]:
        case "file":
            given = {"file": tokenizer["file"], "sha256": tokenizer.get("sha256")}
        case "hub":
            given = {"name": tokenizer["name"], "revision": tokenizer.get("revision")}
        case _:
            given = {"max_bytes": int(tokenizer.get("max_bytes", DEFAULT_TOKENIZER_BYTES))}
    end_of_text = tokenizer.get("end_of_text", DEFAULT_END_OF_TEXT)
    return {"source": tokenizer["source"], **given, "end_of_text": end_of_text, "vocab_size": vocab_size}


_BUILDERS: dict[str, Callable[[str, Mapping[str, Any], str], DataSet]] = {
    WORD_PROBLEM: _word_problem,
    CATBABI: _catbabi,
    LANGUAGE_MODEL: _language_model,
}
