import gzip
import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from implicit_llm_contracts.config.text import CorpusFiles
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.atomic import StorageError, remove_leftovers
from implicit_llm_contracts.runs.stage_context import StageContext
from implicit_llm_data.stages import token_shard as stage
from implicit_llm_data.text.corpus import DocumentSplit, open_share
from tests.refusals import refused
from tests.unit.data.text_samples import (
    BOOKS,
    NEOX,
    Project,
    contents,
    real_file,
    run_until_killed,
    shard_config,
    write_corpus,
    write_jsonl,
)

POINTS = ("token_shard.before_batch", "token_shard.before_commit", "token_shard.before_record")
SMALL_BATCH = 500  # bytes of text: several batches in the small corpus


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """With a tokenizer; two shards of the corpus can be made."""
    monkeypatch.setattr(stage, "BATCH_BYTES", SMALL_BATCH)
    project = Project(tmp_path)
    corpus = write_corpus(project.downloads)
    trained = {"kind": "tokenizer", "source": "trained", "vocab_size": 300, "corpus": corpus, "test_fraction": 0.2}
    project.run("x-tokenizer", {**trained, "seed": 1})
    return project


CORPUS = {"source": "files", "files": ["part-*.jsonl.gz"]}


def make(project: Project, shard: int = 0, num_shards: int = 2, **changes: Any) -> Path:
    config = {**shard_config(CORPUS, shard, num_shards), **changes}
    return project.run(f"x-shard-{shard:05d}", config, {"tokenizer": "x-tokenizer"})


def context_of(project: Project, shard: int = 0, **changes: Any) -> StageContext:
    config = {**shard_config(CORPUS, shard, 2), **changes}
    return project.context(f"x-shard-{shard:05d}", config, {"tokenizer": "x-tokenizer"})


def results(work: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(work).items() if name != "journal.jsonl"}


def documents_in(path: Path, end_of_text: int) -> list[list[int]]:
    """The ids of each document in a stream."""
    ids = np.fromfile(path, dtype="<u2")
    *documents, rest = np.split(ids, np.flatnonzero(ids == end_of_text) + 1)
    assert not len(rest)
    return [ids.tolist() for ids in documents]


def test_a_shard_holds_its_documents_each_with_an_end_of_text(project: Project) -> None:
    work = make(project)
    tokenizer = Tokenizer.from_file(str(project.work("x-tokenizer") / "tokenizer.json"))
    split = DocumentSplit(0.2, 1)
    expected = {"train": [], "test": []}
    for document in open_share(CorpusFiles("files", files=("part-*.jsonl.gz",)), project.downloads, 0, 2).documents():
        expected[split.of(document.utf8)].append([*tokenizer.encode(document.text).ids, 0])
    assert len(expected["test"]) > 3
    for name in ("train", "test"):
        assert documents_in(work / f"{name}.bin", 0) == expected[name]
    record = json.loads((work / "shard.json").read_text())
    assert record["documents"] == {"train": len(expected["train"]), "test": len(expected["test"]), "empty": 0}
    assert record["tokens"]["train"] * 2 == (work / "train.bin").stat().st_size
    point = journal.read(work / "journal.jsonl")[-1]
    assert (point.step, point.values["tokens"]) == (80, sum(record["tokens"].values()))
    assert [file["name"] for file in record["source"]["files"]] == ["part-0.jsonl.gz", "part-2.jsonl.gz"]
    assert str(project.root) not in (work / "shard.json").read_text()


def test_points_of_an_earlier_attempt_do_not_count(project: Project) -> None:
    context_of(project).journal.metrics(1, {"tokens": 5})
    assert [point.step for point in journal.read(make(project) / "journal.jsonl")] == [80]


def test_the_split_does_not_depend_on_how_documents_are_spread(project: Project, tmp_path: Path) -> None:
    def all_documents(num_shards: int, name: str) -> list[list[int]]:
        works = [make(project, shard, num_shards) for shard in range(num_shards)]
        return sorted(document for work in works for document in documents_in(work / f"{name}.bin", 0))

    for name in ("train", "test"):
        assert all_documents(1, name) == all_documents(3, name)
    assert all_documents(1, "test") != all_documents(1, "train")


def test_the_share_of_test_documents_is_as_asked_for() -> None:
    split = DocumentSplit(0.1, 7)
    count = sum(split.of(str(number).encode()) == "test" for number in range(20_000))
    assert abs(count - 2000) < 5 * np.sqrt(20_000 * 0.1 * 0.9)
    assert DocumentSplit(0.0, 7).of(b"any") == "train"
    assert [DocumentSplit(0.5, seed).of(b"x") for seed in range(20)] != [split.of(b"x")] * 20


@pytest.mark.parametrize("point", [*POINTS, "atomic.before_rename"])
def test_a_killed_shard_is_made_again_with_equal_bytes_and_the_others_stay(project: Project, point: str) -> None:
    works = [make(project, shard) for shard in range(2)]
    undisturbed = [results(work) for work in works]
    other_times = {path: path.stat().st_mtime_ns for path in works[1].rglob("*")}
    for path in works[0].iterdir():
        path.unlink()
    context = context_of(project)
    run_until_killed(stage.run, context, f"{point}:kill9@{3 if point == 'token_shard.before_batch' else 1}")
    assert not (works[0] / "shard.json").exists()
    assert [path for path in works[0].iterdir() if path.name.endswith(".tmp")] or point == "token_shard.before_record"
    remove_leftovers(context.run_dir)  # as a run directory does before a stage starts
    make(project)
    assert results(works[0]) == undisturbed[0]
    assert {path: path.stat().st_mtime_ns for path in works[1].rglob("*")} == other_times


def test_a_file_that_cannot_grow_is_named_and_leaves_nothing(project: Project) -> None:
    context = context_of(project)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # like a quota that is used up
    try:
        with refused(r"cannot write .*train.bin.*; raise the limit", StorageError):
            stage.run(context)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert results(context.work) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    context = context_of(project, **changes)
    with refused(re.escape(message)):
        stage.run(context)
    assert results(context.work) == {}


@pytest.mark.parametrize(("texts", "num_documents"), [(["", "a", " \n\t", "b"], 2), ([], 0)])
def test_empty_documents_are_left_out_and_counted(
    project: Project, caplog: pytest.LogCaptureFixture, texts: list[str], num_documents: int
) -> None:
    write_jsonl(project.downloads / "part-3.jsonl.gz", texts)
    work = make(project, 0, 1, corpus={"source": "files", "files": ["part-3.jsonl.gz"]}, test_fraction=0.0)
    assert len(documents_in(work / "train.bin", 0)) == num_documents
    counts = {"train": num_documents, "test": 0, "empty": len(texts) - num_documents}
    assert json.loads((work / "shard.json").read_text())["documents"] == counts
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
    context = context_of(project)
    with refused(f"^{path}.*{re.escape(message)}"):
        stage.run(context)
    assert results(context.work) == {}


def test_books_get_the_ids_that_transformers_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gzip.open(real_file(BOOKS), "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for number, line in enumerate(file) if number % 12 == 0]
    write_jsonl(tmp_path / "downloads" / "some.jsonl", texts)
    monkeypatch.setattr(stage, "BATCH_BYTES", 1 << 18)
    project = Project(tmp_path)
    neox = {"kind": "tokenizer", "source": "file", "file": str(real_file(NEOX)), "vocab_size": 50_288}
    project.run("x-tokenizer", neox)
    changes = {"vocab_size": 50_288, "test_fraction": 0.0}
    work = make(project, 0, 1, corpus={"source": "files", "files": ["some.jsonl"]}, **changes)
    tokenizer = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_file=str(real_file(NEOX)))
    assert documents_in(work / "train.bin", 0) == [[*tokenizer(text)["input_ids"], 0] for text in texts]
