"""Which files of the downloads a job takes for the corpus: those that prefetch recorded, or put there by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.config.text import HubCorpus
from implicit_llm_contracts.runs.fetched_files import Fetched, HubFiles, fetched_files
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_data.stages.tokenizer import TokenizerConfig, make_tokenizer
from implicit_llm_data.text.corpus import open_share
from tests.refusals import refused
from tests.unit.data.text_samples import write_corpus, write_jsonl

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEED = {"kind": "dataset", "name": "who/what", "revision": "v1", "split": "train"}
AGAIN = "type `implicit-llm prefetch --config FILE` with the experiment's FILE where there is a network"


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    """Two files of the split train, as prefetch leaves them, without a record."""
    for number in (1, 0):
        write_jsonl(folder_of(tmp_path) / "data" / f"train-{number}.jsonl", [f"text {number}"])
    (folder_of(tmp_path) / ".cache" / "huggingface").mkdir(parents=True)
    return tmp_path


def folder_of(downloads: Path) -> Path:
    return downloads / "hub" / "who" / "what"


def record(downloads: Path, *names: str, **need: Any) -> Path:
    """The record of a fetch of these files."""
    wanted = HubFiles(**{**NEED, **need})
    sizes = {name: (folder_of(downloads) / name).stat().st_size for name in names}
    Fetched(wanted.revision, COMMIT, sizes).write(wanted.record(downloads))
    return wanted.record(downloads)


def names(downloads: Path, **changes: Any) -> list[str]:
    config = HubCorpus("hub", dataset="who/what", **changes)
    return [file.name for file in open_share(config, downloads).files]


def test_an_unfinished_fetch_is_not_taken_for_the_corpus_and_files_put_there_by_hand_are(downloads: Path) -> None:
    with refused(f"^{folder_of(downloads)}: a fetch into it was not finished; {AGAIN}"):
        names(downloads)
    (folder_of(downloads) / ".cache" / "huggingface").rmdir()
    assert names(downloads) == ["data/train-0.jsonl", "data/train-1.jsonl"]
    assert fetched_files(HubFiles("dataset", "who/nobody", None, "train"), downloads) is None


@pytest.mark.parametrize("revision", [None, "v1", COMMIT, COMMIT[:8]])
def test_only_the_recorded_files_are_read_in_the_order_of_their_names(downloads: Path, revision: str | None) -> None:
    record(downloads, "data/train-1.jsonl", "data/train-0.jsonl")
    write_jsonl(folder_of(downloads) / "data" / "train-2.jsonl", ["of another version"])
    assert names(downloads, revision=revision) == ["data/train-0.jsonl", "data/train-1.jsonl"]


def test_another_revision_than_the_fetched_one_is_refused(downloads: Path) -> None:
    path = record(downloads, "data/train-0.jsonl", revision=None)
    for revision in ("v2", "0123"):  # too short for a commit
        found = rf"^{path}: revision main \(commit 0123456789ab\) was fetched, the config names {revision}; {AGAIN}$"
        with refused(found):
            names(downloads, revision=revision)


def test_each_split_has_its_own_files(downloads: Path) -> None:
    record(downloads, "data/train-0.jsonl")
    with refused("the split 'test' of the dataset is not among what was fetched"):
        names(downloads, split="test")
    write_jsonl(folder_of(downloads) / "data" / "test-0.jsonl", ["t"])
    record(downloads, "data/test-0.jsonl", split="test")
    assert names(downloads, split="test") == ["data/test-0.jsonl"]
    assert names(downloads) == ["data/train-0.jsonl"]


def test_a_file_that_is_gone_or_of_another_size_is_named(downloads: Path) -> None:
    record(downloads, "data/train-0.jsonl", "data/train-1.jsonl")
    path = folder_of(downloads) / "data" / "train-1.jsonl"
    path.write_bytes(b"short")
    with refused(f"^{path}: has 5 bytes instead of 19; {AGAIN}$"):
        names(downloads)
    path.unlink()
    with refused(f"^{path}: is missing; {AGAIN}$"):
        names(downloads)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sizes": [1]}', '{"sizes": {"a": "b"}}', '{"files": []}'])
def test_a_damaged_record_is_named(downloads: Path, text: str) -> None:
    path = record(downloads, "data/train-0.jsonl")
    path.write_text(text)
    with refused(rf"^{path}: no record of a fetch \("):
        names(downloads)


def test_a_fetched_tokenizer_is_of_the_revision_that_the_config_names(tmp_path: Path) -> None:
    trained = fill(TokenizerConfig, {"source": "trained", "vocab_size": 300, "corpus": write_corpus(tmp_path)}, "x")
    text, _ = make_tokenizer(trained, tmp_path)
    folder_of(tmp_path).mkdir(parents=True)
    (folder_of(tmp_path) / "tokenizer.json").write_bytes(text)
    pinned = TokenizerConfig("hub", 300, name="who/what", revision="v2")
    assert make_tokenizer(pinned, tmp_path)[0] == text  # put there by hand
    record(tmp_path, "tokenizer.json", kind="tokenizer", split=None)
    with refused(r"revision v1 \(commit 0123456789ab\) was fetched, the config names v2"):
        make_tokenizer(pinned, tmp_path)
    assert make_tokenizer(TokenizerConfig("hub", 300, name="who/what"), tmp_path)[0] == text
