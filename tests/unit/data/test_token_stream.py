import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from implicit_llm_data.shards import DatasetError, TokenDataset, open_dataset
from implicit_llm_data.stages import token_stream as stage
from tests.refusals import refused
from tests.unit.data.text_samples import Project, shard_config, write_corpus, write_jsonl

LENGTH = 16
ROLES = {f"shard-{shard:05d}": f"x-shard-{shard:05d}" for shard in range(3)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished project of three shards, which tests must not change."""
    project = Project(tmp_path_factory.mktemp("made"))
    project.run_all(write_corpus(project.downloads))
    return project.root


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Iterator[Project]:
    """A copy elsewhere; what it was copied from is not there any more."""
    shutil.copytree(made, tmp_path / "copy")
    made.rename(made.with_name("away"))
    yield Project(tmp_path / "copy")
    made.with_name("away").rename(made)


def stream_of(project: Project, split: str, length: int | None = None) -> TokenDataset:
    return open_dataset(project.work(f"x-{split}"), length)


def tokens_of(project: Project, split: str) -> list[np.ndarray]:
    """The tokens of the shards."""
    return [np.fromfile(project.work(name) / f"{split}.bin", dtype="<u2") for name in ROLES.values()]


@pytest.mark.parametrize("length", [None, 16, 7, 100])
def test_training_rows_are_the_shards_cut_without_their_ends(project: Project, length: int | None) -> None:
    stream = stream_of(project, "train", length)
    width = length or LENGTH
    rows = [part[: len(part) // width * width].reshape(-1, width) for part in tokens_of(project, "train")]
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
def test_test_rows_of_any_length_run_on_over_the_shards(project: Project, length: int) -> None:
    stream = stream_of(project, "test", length)
    tokens = np.concatenate(tokens_of(project, "test"))
    assert len(stream) == len(tokens) // length
    assert project.input("x-test").manifest.summary["num_tokens"] == len(tokens)
    np.testing.assert_array_equal(
        stream.fetch(np.arange(len(stream)))["input_ids"].ravel(), tokens[: len(stream) * length]
    )


CORPUS = {"source": "files", "files": ["part-*.jsonl.gz"]}


def make_again(project: Project, shard: int) -> None:
    project.run(f"x-shard-{shard:05d}", shard_config(CORPUS, shard, 3), {"tokenizer": "x-tokenizer"})


def test_for_a_shard_made_anew_with_other_content_the_stream_is_to_be_made_again(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    before = len(stream_of(project, "train"))
    write_jsonl(project.downloads / "part-1.jsonl.gz", ["another text than before " * 20] * 99)
    for shard in range(3):
        make_again(project, shard)
    message = r"shard 1 \(.*\) has \d+ bytes instead of \d+; type `rm -f .* results/data/x-train/manifest.json` and run"
    with pytest.raises(DatasetError, match=message):
        stream_of(project, "train")
    project.run("x-train", {"kind": "token_stream", "split": "train", "length": LENGTH}, ROLES)  # as it says
    assert len(stream_of(project, "train")) > before


def test_shards_that_saw_different_files_do_not_make_a_stream(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    write_jsonl(project.downloads / "part-3.jsonl.gz", ["came later"])
    make_again(project, 2)  # whose own file is as before
    message = refusal(project)
    assert "y: shard-00000 and shard-00002 saw different files of the corpus (3 with digest " in message
    assert ", 4 with " in message
    assert "type `rm -f results/data/x-shard-*/manifest.json` and run the workflow again" in message
    for shard in range(3):
        make_again(project, shard)
    stage.run(project.context("y", {"kind": "token_stream", "split": "train", "length": LENGTH}, ROLES))


def test_a_length_below_one_is_refused(project: Project) -> None:
    with pytest.raises(ValueError, match=r"length: 0 is out of range"):
        stream_of(project, "train", 0)


def refusal(project: Project, split: str = "train", length: int = LENGTH) -> str:
    config = {"kind": "token_stream", "split": split, "length": length}
    with refused("") as caught:
        stage.run(project.context("y", config, ROLES))
    return str(caught.value)


def test_what_cannot_be_made_is_refused_in_one_line(project: Project) -> None:
    assert "not one row of 100000; add text, choose a shorter length" in refusal(project, length=100_000)
    assert "or raise test_fraction" in refusal(project, split="test", length=100_000)
    assert "y.split: the text 'valid' is not one of train, test" in refusal(project, split="valid")


def test_a_shard_without_documents_of_the_split_is_left_out(tmp_path: Path) -> None:
    project = Project(tmp_path)
    corpus = write_corpus(project.downloads, num_files=2)
    write_jsonl(project.downloads / "part-1.jsonl.gz", [])
    project.run_all(corpus, num_shards=2)
    stream = stream_of(project, "train")
    tokens = np.fromfile(project.work("x-shard-00000") / "train.bin", dtype="<u2")
    rows = stream.fetch(np.arange(len(stream)))["input_ids"]
    np.testing.assert_array_equal(rows.ravel(), tokens[: len(stream) * LENGTH])
