"""Shards of rows and of tokens, and the streams over them."""

import gzip
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from implicit_llm_contracts.config.text import CorpusFiles
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.fetched_files import Fetched, HubFiles
from implicit_llm_contracts.runs.manifest import MANIFEST, sha256_of
from implicit_llm_data.shard_writer import write_shards
from implicit_llm_data.shards import DatasetError, DatasetSpec, LengthError, TokenDataset, open_dataset, token_dtype
from implicit_llm_data.stages import token_shard, token_stream
from implicit_llm_data.stages.token_stream import StreamError
from implicit_llm_data.text.corpus import DocumentSplit, open_share
from tests.limits import file_size_limit
from tests.refusals import refused
from tests.unit.data.text_samples import (
    BOOKS,
    NEOX,
    Project,
    contents,
    context_in,
    real_file,
    shard_config,
    write_corpus,
    write_jsonl,
)

CORPUS = {"source": "files", "files": ["part-*.jsonl.gz"]}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """With a tokenizer; two shards of the corpus can be made."""
    monkeypatch.setattr(token_shard, "BATCH_BYTES", 500)  # several batches in the small corpus
    project = Project(tmp_path)
    corpus = write_corpus(project.downloads)
    trained = {"kind": "tokenizer", "source": "trained", "vocab_size": 300, "corpus": corpus, "test_fraction": 0.2}
    project.run("x-tokenizer", {**trained, "seed": 1})
    return project


def shard(number: int = 0, num_shards: int = 2, **changes: Any) -> tuple[str, dict[str, Any], dict[str, str]]:
    """What a project runs for a shard of the corpus."""
    config = {**shard_config(CORPUS, number, num_shards), **changes}
    return f"x-shard-{number:05d}", config, {"tokenizer": "x-tokenizer"}


def check_refused(project: Project, message: str, error: type[Exception] = UserError, **changes: Any) -> None:
    """The shard is not made, for this reason, and leaves no file but its journal."""
    context = project.context(*shard(**changes))
    with refused(message, error):
        token_shard.run(context)
    assert contents(context.work).keys() <= {"journal.jsonl"}


def documents_in(path: Path, end_of_text: int) -> list[list[int]]:
    """The ids of each document in a stream."""
    ids = np.fromfile(path, dtype="<u2")
    *documents, rest = np.split(ids, np.flatnonzero(ids == end_of_text) + 1)
    assert not len(rest)
    return [ids.tolist() for ids in documents]


def test_a_shard_holds_its_documents_each_with_an_end_of_text(project: Project) -> None:
    project.context(*shard()).journal.metrics(1, {"tokens": 5})  # of an attempt that was cut off
    work = project.run(*shard())
    tokenizer = Tokenizer.from_file(str(project.input("x-tokenizer").work / "tokenizer.json"))
    split = DocumentSplit(0.2, 1)
    expected = {"train": [], "test": []}
    for document in open_share(CorpusFiles("files", files=("part-*.jsonl.gz",)), project.downloads, 0, 2).documents():
        expected[split.of(document.utf8)].append([*tokenizer.encode(document.text).ids, 0])
    assert len(expected["test"]) > 3
    for name in ("train", "test"):
        assert documents_in(work / f"{name}.bin", 0) == expected[name]
    record = json.loads((work / "shard.json").read_text())
    summary = json.loads((work / MANIFEST).read_text())["summary"]
    counts = {name: summary[f"{name}_documents"] for name in ("train", "test", "empty")}
    assert counts == {"train": len(expected["train"]), "test": len(expected["test"]), "empty": 0}
    assert summary["train_tokens"] * 2 == (work / "train.bin").stat().st_size
    (point,) = journal.read(work / "journal.jsonl")
    assert (point.step, point.values["tokens"]) == (80, summary["train_tokens"] + summary["test_tokens"])
    assert [file["name"] for file in record["source"]["files"]] == ["part-0.jsonl.gz", "part-2.jsonl.gz"]
    assert str(project.root) not in (work / "shard.json").read_text()


def test_the_split_does_not_depend_on_how_documents_are_spread(project: Project, tmp_path: Path) -> None:
    def all_documents(num_shards: int, name: str) -> list[list[int]]:
        works = [project.run(*shard(number, num_shards)) for number in range(num_shards)]
        return sorted(document for work in works for document in documents_in(work / f"{name}.bin", 0))

    for name in ("train", "test"):
        assert all_documents(1, name) == all_documents(3, name)
    assert all_documents(1, "test") != all_documents(1, "train")


KEYS = [str(number).encode() for number in range(20_000)]


@pytest.mark.parametrize(("name", "share"), [("test", 0.1), ("validation", 0.05)])
def test_the_share_of_held_out_documents_is_as_asked_for(name: str, share: float) -> None:
    split = DocumentSplit(0.1, 7, 0.05)
    count = sum(split.of(key) == name for key in KEYS)
    assert abs(count - 20_000 * share) < 5 * np.sqrt(20_000 * share * (1 - share))
    assert DocumentSplit(0.0, 7).of(b"any") == "train"
    assert [DocumentSplit(0.5, seed).of(b"x") for seed in range(20)] != [split.of(b"x")] * 20


def test_validation_documents_are_taken_from_those_of_training_and_the_test_documents_stay() -> None:
    without, split = DocumentSplit(0.1, 7), DocumentSplit(0.1, 7, 0.05)
    assert [split.of(key) == "test" for key in KEYS] == [without.of(key) == "test" for key in KEYS]


def test_a_shard_with_a_validation_split_has_its_documents_in_a_stream_of_their_own(project: Project) -> None:
    before = project.run(*shard())
    train, test = (documents_in(before / f"{name}.bin", 0) for name in ("train", "test"))
    work = project.run(*shard(validation_fraction=0.3))
    validation = documents_in(work / "validation.bin", 0)
    assert documents_in(work / "test.bin", 0) == test
    assert len(validation) > 3
    assert sorted(documents_in(work / "train.bin", 0) + validation) == sorted(train)
    summary = json.loads((work / MANIFEST).read_text())["summary"]
    assert summary["validation_documents"] == len(validation)


def test_the_tokenizer_is_trained_without_documents_that_are_held_out(project: Project) -> None:
    corpus = write_corpus(project.downloads)
    split = DocumentSplit(0.2, 1, 0.7)
    share = open_share(CorpusFiles("files", files=("part-*.jsonl.gz",)), project.downloads)
    documents = [document.text for document in share.documents()]
    kept = [text for text in documents if split.of(text.encode()) == "train"]
    assert 0 < len(kept) < len(documents) / 4
    trained = {"kind": "tokenizer", "source": "trained", "vocab_size": 300, "seed": 1}
    split_config = {"corpus": corpus, "test_fraction": 0.2, "validation_fraction": 0.7}
    held_out = project.run("y-tokenizer", {**trained, **split_config}) / "tokenizer.json"
    write_jsonl(project.downloads / "kept.jsonl.gz", kept)
    alone = {"corpus": {"source": "files", "files": ["kept.jsonl.gz"]}, "test_fraction": 0.0}
    assert held_out.read_bytes() == (project.run("z-tokenizer", {**trained, **alone}) / "tokenizer.json").read_bytes()


def test_a_shard_whose_file_has_moved_to_another_shard_is_refused(project: Project) -> None:
    """One file fewer before it in the corpus, and this file belongs to the other shard."""
    paths = sorted(project.downloads.glob("part-*.jsonl.gz"))
    planned = {path.name: sha256_of(path) for path in paths[:2]}
    message = f"files: {paths[1].name} is no longer among this job's files, as they were planned; plan it again"
    check_refused(project, re.escape(message), file_sha256={**planned, paths[2].name: sha256_of(paths[2])})


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_encodes_whole_documents(project: Project) -> None:
    expected = (project.run(*shard()) / "train.bin").read_bytes()
    tokenizer = Tokenizer.from_file(str(project.input("x-tokenizer").work / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(project.downloads / "saved.json"))
    project.run("x-tokenizer", {"kind": "tokenizer", "source": "file", "file": "saved.json", "vocab_size": 300})
    assert (project.run(*shard()) / "train.bin").read_bytes() == expected


def test_texts_and_a_tokenizer_of_the_hub_are_recorded_with_their_commit(project: Project) -> None:
    commit, folder = "0123456789abcdef" * 2 + "01234567", project.downloads / "hub" / "who" / "what"
    write_jsonl(folder / "train-0.jsonl", ["one text"])
    shutil.copy(project.input("x-tokenizer").work / "tokenizer.json", folder)
    for wanted, name in (
        (HubFiles("dataset", "who/what", None, "train"), "train-0.jsonl"),
        (HubFiles("tokenizer", "who/what", None), "tokenizer.json"),
    ):
        sizes = {name: (folder / name).stat().st_size}
        Fetched(None, commit, sizes).write(wanted.record(project.downloads))
    project.run("x-tokenizer", {"kind": "tokenizer", "source": "hub", "name": "who/what", "vocab_size": 300})
    project.run(*shard(0, 1, corpus={"source": "hub", "dataset": "who/what"}))
    assert [project.input(name).manifest.summary["commit"] for name in ("x-tokenizer", "x-shard-00000")] == [commit] * 2


def test_a_shard_that_cannot_be_read_is_no_error_of_writing(project: Project) -> None:
    project.run(*shard(0, 1))
    split = project.input("x-shard-00000").work / "test.bin"
    split.unlink()
    split.symlink_to("/proc/self/mem")  # reading its first bytes is an input/output error
    stream = {"kind": "token_stream", "split": "test", "length": 16}
    with refused(f"^{split}: cannot be read \\(Input/output error\\); type `rm -f .*manifest.json`", StreamError):
        project.run("x-test", stream, {"shard-00000": "x-shard-00000"})


def test_a_text_that_cannot_be_read_is_named(project: Project) -> None:
    path = project.downloads / "part-0.jsonl.gz"
    path.unlink()
    path.symlink_to("/proc/self/mem")
    planned = {"part-0.jsonl.gz": "0" * 64}
    with refused(f"Input/output error: '{path}'", OSError):
        token_shard.run(project.context(*shard(file_sha256=planned)))


def test_a_file_that_cannot_grow_is_named_and_leaves_nothing(project: Project) -> None:
    with file_size_limit(1000):
        check_refused(project, r"cannot write .*train.bin.*; raise the limit", StorageError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"file_sha256": {"part-0.jsonl.gz": "0" * 64}},
            "part-0.jsonl.gz: has changed since this job was planned; plan it again",
        ),
        (
            {"file_sha256": {"part-9.jsonl.gz": "0" * 64}},
            "files: part-9.jsonl.gz is gone; restore it",
        ),
        (
            {"file_sha256": {}},
            "files: part-0.jsonl.gz was not among this job's files, as they were planned; plan it again",
        ),
        ({"vocab_size": 299}, "vocab_size: 299 is less than the tokenizer's 300 ids"),
        ({"shard": 2}, ".shard: 2 is out of range; give less than num_shards, 2"),
        ({"shard": -1}, ".shard: -1 is not allowed; give an integer of at least 0"),
        ({"num_shards": 0}, "x-shard-00000.num_shards: 0 is not allowed; give an integer of at least 1"),
        ({"test_fraction": 1.0}, "x-shard-00000.test_fraction: 1.0 is not allowed; give a number from 0 to below 1"),
        ({"num_shards": 9}, "num_shards: 9 shards are more than the corpus has files, 3"),
        ({"corpus": {"source": "files", "files": ["no"]}}, "nothing matches 'no'"),
        ({"corpus": {**CORPUS, "field": "body"}}, "line 1: no field 'body' (found: text)"),
        (
            {"corpus": {**CORPUS, "max_document_bytes": 20}},
            "line 1: the document is longer than max_document_bytes, 20",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(project: Project, changes: dict[str, Any], message: str) -> None:
    check_refused(project, re.escape(message), **changes)


@pytest.mark.parametrize(("texts", "num_documents"), [(["", "a", " \n\t", "b"], 2), ([], 0)])
def test_empty_documents_are_left_out_and_counted(
    project: Project, caplog: pytest.LogCaptureFixture, texts: list[str], num_documents: int
) -> None:
    write_jsonl(project.downloads / "part-3.jsonl.gz", texts)
    work = project.run(*shard(0, 1, corpus={"source": "files", "files": ["part-3.jsonl.gz"]}, test_fraction=0.0))
    assert len(documents_in(work / "train.bin", 0)) == num_documents
    summary = json.loads((work / MANIFEST).read_text())["summary"]
    counts = [summary[f"{name}_documents"] for name in ("train", "test", "empty")]
    assert counts == [num_documents, 0, len(texts) - num_documents]
    assert ("no documents in part-3.jsonl.gz" in caplog.text) is (num_documents == 0)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda data: data[:-30], "(Truncated compressed stream); check or fetch it again"),
        (lambda data: gzip.compress(b'{"text": "a"}\n{"text": "\xff"}\n'), "line 2: invalid UTF-8"),
    ],
)
def test_a_damaged_file_is_named_and_leaves_nothing_half_written(
    project: Project, damaged: Callable[[bytes], bytes], message: str
) -> None:
    path = project.downloads / "part-2.jsonl.gz"
    path.write_bytes(damaged(path.read_bytes()))
    check_refused(project, f"^{path}.*{re.escape(message)}")


def test_books_get_the_ids_that_transformers_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gzip.open(real_file(BOOKS), "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for number, line in enumerate(file) if number % 12 == 0]
    write_jsonl(tmp_path / "downloads" / "some.jsonl", texts)
    monkeypatch.setattr(token_shard, "BATCH_BYTES", 1 << 18)
    project = Project(tmp_path)
    neox = {"kind": "tokenizer", "source": "file", "file": str(real_file(NEOX)), "vocab_size": 50_288}
    project.run("x-tokenizer", neox)
    changes = {"vocab_size": 50_288, "test_fraction": 0.0}
    work = project.run(*shard(0, 1, corpus={"source": "files", "files": ["some.jsonl"]}, **changes))
    tokenizer = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_file=str(real_file(NEOX)))
    assert documents_in(work / "train.bin", 0) == [[*tokenizer(text)["input_ids"], 0] for text in texts]


LENGTH = 16
ROLES = {f"shard-{shard:05d}": f"x-shard-{shard:05d}" for shard in range(3)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished project of three shards, which tests must not change."""
    project = Project(tmp_path_factory.mktemp("made"))
    project.run_all(write_corpus(project.downloads))
    return project.root


@pytest.fixture
def finished(made: Path, tmp_path: Path) -> Iterator[Project]:
    """A copy elsewhere; what it was copied from is not there any more."""
    shutil.copytree(made, tmp_path / "copy")
    made.rename(made.with_name("away"))
    yield Project(tmp_path / "copy")
    made.with_name("away").rename(made)


def stream_of(finished: Project, split: str, length: int | None = None) -> TokenDataset:
    return open_dataset(finished.input(f"x-{split}").work, length)


def tokens_of(finished: Project, split: str) -> list[np.ndarray]:
    """The tokens of the shards."""
    return [np.fromfile(finished.input(name).work / f"{split}.bin", dtype="<u2") for name in ROLES.values()]


@pytest.mark.parametrize("length", [None, 16, 7, 100])
def test_training_rows_are_the_shards_cut_without_their_ends(finished: Project, length: int | None) -> None:
    stream = stream_of(finished, "train", length)
    width = length or LENGTH
    rows = [part[: len(part) // width * width].reshape(-1, width) for part in tokens_of(finished, "train")]
    expected = np.concatenate(rows)
    assert stream.is_stream
    assert (len(stream), stream.length, stream.vocab_size) == (len(expected), width, 300)
    order = np.random.default_rng(0).permutation(len(expected))
    batch = stream.fetch(order)
    assert set(batch) == {"input_ids", "labels"}
    for column in batch.values():
        assert column.dtype == np.int64
        np.testing.assert_array_equal(column, expected[order])
    assert batch["labels"] is not batch["input_ids"]
    assert stream.fetch(np.array([], dtype=np.int64))["input_ids"].shape == (0, width)


@pytest.mark.parametrize("length", [16, 33, 128])
def test_test_rows_of_any_length_run_on_over_the_shards(finished: Project, length: int) -> None:
    stream = stream_of(finished, "test", length)
    tokens = np.concatenate(tokens_of(finished, "test"))
    assert len(stream) == len(tokens) // length
    assert finished.input("x-test").manifest.summary["num_tokens"] == len(tokens)
    np.testing.assert_array_equal(
        stream.fetch(np.arange(len(stream)))["input_ids"].ravel(), tokens[: len(stream) * length]
    )


def test_for_a_shard_made_anew_with_other_content_the_stream_is_to_be_made_again(
    finished: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.root)
    before = len(stream_of(finished, "train"))
    write_jsonl(finished.downloads / "part-1.jsonl.gz", ["another text than before " * 20] * 99)
    for number in range(3):
        finished.run(*shard(number, 3))
    message = r"shard 1: expected \d+ bytes, found \d+; type `rm -f .* results/data/x-train/manifest.json` and run"
    with pytest.raises(DatasetError, match=message):
        stream_of(finished, "train")
    finished.run("x-train", {"kind": "token_stream", "split": "train", "length": LENGTH}, ROLES)  # as it says
    assert len(stream_of(finished, "train")) > before


def test_shards_that_saw_different_files_do_not_make_a_stream(
    finished: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.root)
    write_jsonl(finished.downloads / "part-3.jsonl.gz", ["came later"])
    finished.run(*shard(2, 3))  # whose own file is as before
    message = refusal(finished)
    assert "y: shard-00000 and shard-00002 saw different files of the corpus (3 with digest " in message
    assert ", 4 with " in message
    assert "type `rm -f results/data/x-shard-*/manifest.json` and run the workflow again" in message
    for number in range(3):
        finished.run(*shard(number, 3))
    token_stream.run(finished.context("y", {"kind": "token_stream", "split": "train", "length": LENGTH}, ROLES))


def refusal(finished: Project, split: str = "train", length: int = LENGTH, **limit: int) -> str:
    config = {"kind": "token_stream", "split": split, "length": length, **limit}
    with refused("") as caught:
        token_stream.run(finished.context("y", config, ROLES))
    return str(caught.value)


def test_what_cannot_be_made_or_read_is_refused_in_one_line(finished: Project) -> None:
    assert "not one row of 100000; add text, choose a shorter length" in refusal(finished, length=100_000)
    assert "or raise test_fraction" in refusal(finished, split="test", length=100_000)
    assert "y.split: the text 'valid' is not one of train, test, validation" in refusal(finished, split="valid")
    with pytest.raises(ValueError, match=r"length: 0 is out of range"):
        stream_of(finished, "train", 0)


def test_a_limited_stream_has_that_many_tokens_in_rows_spread_evenly_over_all_shards(finished: Project) -> None:
    whole = stream_of(finished, "train")
    rows = [row.tolist() for row in whole.fetch(np.arange(len(whole)))["input_ids"]]
    wanted = len(rows) // 3
    config = {"kind": "token_stream", "split": "train", "length": LENGTH, "tokens": wanted * LENGTH}
    work = finished.run("y-train", config, ROLES)
    limited = open_dataset(work)
    assert len(limited) == wanted
    chosen = limited.fetch(np.arange(wanted))["input_ids"].tolist()
    assert chosen == [rows[number * len(rows) // wanted] for number in range(wanted)]
    summary = json.loads((work / MANIFEST).read_text())["summary"]
    assert (summary["num_tokens"], summary["num_rows"]) == (wanted * LENGTH, wanted)


def test_more_tokens_than_the_text_has_are_refused_with_what_it_has(finished: Project) -> None:
    rows = len(stream_of(finished, "train"))
    message = refusal(finished, tokens=(rows + 1) * LENGTH)
    assert f"y: tokens: {(rows + 1) * LENGTH} are more than the train split has in rows of {LENGTH}" in message
    assert f"give at most {rows * LENGTH}, or add text" in message
    assert "\n" not in message


def test_a_shard_without_documents_of_the_split_is_left_out(tmp_path: Path) -> None:
    project = Project(tmp_path)
    corpus = write_corpus(project.downloads, num_files=2)
    write_jsonl(project.downloads / "part-1.jsonl.gz", [])
    project.run_all(corpus, num_shards=2)
    stream = stream_of(project, "train")
    tokens = np.fromfile(project.input("x-shard-00000").work / "train.bin", dtype="<u2")
    rows = stream.fetch(np.arange(len(stream)))["input_ids"]
    np.testing.assert_array_equal(rows.ravel(), tokens[: len(stream) * LENGTH])


SIZES = (4, 4, 3)
ROW = 5


@pytest.fixture
def vocab_size() -> int:
    return 200


@pytest.fixture
def columns(tmp_path: Path, vocab_size: int) -> dict[str, np.ndarray]:
    """Of a data set of three shards in `tmp_path`."""
    spec = DatasetSpec(vocab_size, ROW, ("input_ids", "labels"), {"seed": 1})
    random = np.random.default_rng(0)
    columns = {
        column: random.integers(0, vocab_size, (sum(SIZES), ROW)).astype(token_dtype(vocab_size))
        for column in spec.columns
    }
    ends = np.cumsum([0, *SIZES])
    write_shards(
        context_in(tmp_path, {}),
        spec,
        len(SIZES),
        lambda shard: {name: array[ends[shard] : ends[shard + 1]] for name, array in columns.items()},
    )
    return columns


@pytest.mark.parametrize("vocab_size", [200, 60_000])
@pytest.mark.parametrize("indices", [range(11), [10], [10, 0, 0, 7, 3, 4], []])
def test_what_was_written_is_read_back_in_the_order_asked_for(
    tmp_path: Path, columns: dict[str, np.ndarray], vocab_size: int, indices: list
) -> None:
    dataset = open_dataset(tmp_path)
    assert (len(dataset), dataset.vocab_size, dataset.length, dataset.source) == (11, vocab_size, ROW, {"seed": 1})
    batch = dataset.fetch(np.array(indices, dtype=np.int64))
    assert set(batch) == set(columns)
    for name, array in batch.items():
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array, columns[name][list(indices)])


@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize("index", [-1, 11])
def test_an_index_outside_the_data_set_is_refused(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=r"0\.\.10"):
        open_dataset(tmp_path).fetch(np.array([0, index]))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_storage_type_follows_the_vocabulary(vocab_size: int, dtype: type) -> None:
    assert token_dtype(vocab_size) == dtype


def test_the_ignored_token_is_read_as_minus_100_in_the_labels_only(tmp_path: Path) -> None:
    spec = DatasetSpec(9, 3, ("input_ids", "labels"), {}, ignored_id=2)
    rows = np.array([[2, 5, 2], [0, 1, 2]], dtype=np.uint8)
    write_shards(context_in(tmp_path, {}), spec, 1, lambda shard: {"input_ids": rows, "labels": rows})
    batch = open_dataset(tmp_path).fetch(np.array([1, 0]))
    np.testing.assert_array_equal(batch["input_ids"], rows[::-1])
    np.testing.assert_array_equal(batch["labels"], [[0, 1, -100], [-100, 5, -100]])


@pytest.mark.usefixtures("columns")
def test_rows_keep_the_length_they_were_made_with(tmp_path: Path) -> None:
    assert open_dataset(tmp_path, ROW).length == ROW
    with pytest.raises(LengthError, match=r"its rows have 5 tokens and cannot be cut to 6; leave the length out"):
        open_dataset(tmp_path, 6)


def test_an_open_data_set_reaches_a_worker_process_as_its_path(tmp_path: Path, columns: dict[str, np.ndarray]) -> None:
    dataset = open_dataset(tmp_path)
    dataset.fetch(np.arange(11))
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000
    np.testing.assert_array_equal(pickle.loads(sent).fetch(np.arange(11))["labels"], columns["labels"])  # noqa: S301


@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "expected 148 bytes, found no file"),
        (lambda path: os.truncate(path, 100), "expected 148 bytes, found 100"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "expected 148 bytes, found 149"),
    ],
)
def test_a_missing_or_short_shard_is_named_when_the_data_set_is_opened(
    tmp_path: Path, column: str, damage, message: str
) -> None:
    damage(tmp_path / "shards" / f"{column}-00001.npy")
    with refused(rf"{column}-00001.npy: shard 1: {message}; ", DatasetError):
        open_dataset(tmp_path)


PICKLE = b"cos\nmkdir\n(Vran\ntR."  # os.mkdir("ran")


@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data.replace(b"NUMPY", b"NUMPI"), "cannot be read"),
        (lambda data: data.replace(b"(4, 5)", b"(5, 4)"), r"holds uint8 \(5, 4\)"),
        (lambda data: PICKLE.ljust(len(data)), "cannot be read"),
    ],
)
def test_a_damaged_shard_is_named_when_it_is_read_and_a_pickle_in_its_place_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "shards" / "labels-00000.npy"
    path.write_bytes(damage(path.read_bytes()))
    dataset = open_dataset(tmp_path)
    dataset.fetch(np.array([4]))
    with refused(rf"labels-00000.npy: shard 0: {message}", DatasetError):
        dataset.fetch(np.array([0]))
    assert not Path("ran").exists()


@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize(
    ("old", "new"), [("^.*$", text) for text in ("", "{", "[]", "{}", "null")] + [('"format": 2', '"format": 7')]
)
def test_a_damaged_index_is_named(tmp_path: Path, old: str, new: str) -> None:
    index = tmp_path / "index.json"
    index.write_text(re.sub(old, new, index.read_text(), count=1, flags=re.DOTALL))
    with refused(r"index.json: the index is damaged \(.*; ", DatasetError):
        open_dataset(tmp_path)


def test_a_directory_without_a_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"index.json: no data set here"):
        open_dataset(tmp_path / "nothing")


def test_a_wrong_array_is_not_written(tmp_path: Path) -> None:
    spec = DatasetSpec(200, ROW, ("tokens",), {})
    with pytest.raises(TypeError, match=r"tokens: expected uint8 \(N, 5\), got int64 \(2, 5\)"):
        write_shards(context_in(tmp_path, {}), spec, 1, lambda shard: {"tokens": np.zeros((2, ROW), dtype=np.int64)})
    assert not list(tmp_path.rglob("*.npy"))
