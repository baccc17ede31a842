from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from implicit_llm_data.shard_writer import OutOfSpace, ShardWriter
from implicit_llm_data.shards import (
    DatasetError,
    DatasetSpec,
    LengthError,
    VocabularyTooLarge,
    open_dataset,
    token_dtype,
)

SIZES = (4, 4, 3)
LENGTH = 5


def write_example(directory: Path, vocab_size: int = 200) -> dict[str, np.ndarray]:
    """Write a data set of three shards; return its columns."""
    spec = DatasetSpec(vocab_size, LENGTH, ("input_ids", "labels"), {"seed": 1})
    random = np.random.default_rng(0)
    writer = ShardWriter(directory, spec)
    columns = {
        column: random.integers(0, vocab_size, (sum(SIZES), LENGTH)).astype(token_dtype(vocab_size))
        for column in spec.columns
    }
    ends = np.cumsum(SIZES)
    records = []
    for shard, (size, end) in enumerate(zip(SIZES, ends, strict=True)):
        records.append(writer.write(shard, {name: array[end - size : end] for name, array in columns.items()}))
    writer.finish(records)
    return columns


def digests(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("vocab_size", [200, 60_000])
@pytest.mark.parametrize("indices", [range(11), [10], [10, 0, 0, 7, 3, 4], []])
def test_what_was_written_is_read_back_in_the_order_asked_for(tmp_path: Path, vocab_size: int, indices: list) -> None:
    columns = write_example(tmp_path, vocab_size)
    dataset = open_dataset(tmp_path)
    assert (len(dataset), dataset.vocab_size, dataset.length, dataset.source) == (11, vocab_size, LENGTH, {"seed": 1})
    batch = dataset.fetch(np.array(indices, dtype=np.int64))
    assert set(batch) == set(columns)
    for name, array in batch.items():
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array, columns[name][list(indices)])


@pytest.mark.parametrize("index", [-1, 11])
def test_an_index_outside_the_data_set_is_refused(tmp_path: Path, index: int) -> None:
    write_example(tmp_path)
    with pytest.raises(IndexError, match=r"0\.\.10"):
        open_dataset(tmp_path).fetch(np.array([0, index]))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16)]
)
def test_storage_type_follows_the_vocabulary(vocab_size: int, dtype: type) -> None:
    assert token_dtype(vocab_size) == dtype


def test_a_vocabulary_larger_than_the_storage_type_is_refused() -> None:
    with pytest.raises(VocabularyTooLarge, match="65537 tokens do not fit uint16") as caught:
        token_dtype(65537)
    assert caught.value.exit_code == 2


def test_shards_are_plain_npy_files_of_the_storage_type(tmp_path: Path) -> None:
    columns = write_example(tmp_path)
    array = np.load(tmp_path / "shards" / "labels-00001.npy", allow_pickle=False)
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, columns["labels"][4:8])


def test_the_ignored_token_is_read_as_minus_100_in_the_labels_only(tmp_path: Path) -> None:
    spec = DatasetSpec(9, 3, ("input_ids", "labels"), {}, ignored_id=2)
    rows = np.array([[2, 5, 2], [0, 1, 2]], dtype=np.uint8)
    writer = ShardWriter(tmp_path, spec)
    writer.finish([writer.write(0, {"input_ids": rows, "labels": rows})])
    batch = open_dataset(tmp_path).fetch(np.array([1, 0]))
    np.testing.assert_array_equal(batch["input_ids"], rows[::-1])
    np.testing.assert_array_equal(batch["labels"], [[0, 1, -100], [-100, 5, -100]])


def test_without_an_ignored_token_the_index_says_nothing_of_it(tmp_path: Path) -> None:
    write_example(tmp_path)
    assert "ignored_id" not in (tmp_path / "index.json").read_text()
    assert (open_dataset(tmp_path).fetch(np.arange(11))["labels"] >= 0).all()


def test_rows_keep_the_length_they_were_made_with(tmp_path: Path) -> None:
    write_example(tmp_path)
    assert open_dataset(tmp_path, LENGTH).length == LENGTH
    with pytest.raises(LengthError, match=r"its rows have 5 tokens and cannot be cut to 6; leave the length out"):
        open_dataset(tmp_path, 6)


def test_equal_data_sets_are_equal_byte_for_byte(tmp_path: Path) -> None:
    write_example(tmp_path / "a")
    write_example(tmp_path / "b")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_an_open_data_set_reaches_a_worker_process_as_its_path(tmp_path: Path) -> None:
    columns = write_example(tmp_path)
    dataset = open_dataset(tmp_path)
    dataset.fetch(np.arange(11))
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000
    np.testing.assert_array_equal(pickle.loads(sent).fetch(np.arange(11))["labels"], columns["labels"])  # noqa: S301


@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: os.truncate(path, 100), "has 100 bytes instead of 148"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 149 bytes instead of 148"),
    ],
)
def test_a_missing_or_short_shard_is_named_when_the_data_set_is_opened(
    tmp_path: Path, column: str, damage, message: str
) -> None:
    write_example(tmp_path)
    damage(tmp_path / "shards" / f"{column}-00001.npy")
    with pytest.raises(DatasetError, match=rf"shard 1 \(.*{column}-00001.npy\) {message}; ") as caught:
        open_dataset(tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def flip_a_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_damaged_header_is_found_when_the_shard_is_read(tmp_path: Path) -> None:
    write_example(tmp_path)
    flip_a_byte(tmp_path / "shards" / "labels-00000.npy", 0)
    dataset = open_dataset(tmp_path)
    dataset.fetch(np.array([4]))
    with pytest.raises(DatasetError, match=r"shard 0 \(.*labels-00000.npy\) cannot be read"):
        dataset.fetch(np.array([0]))


def test_a_shard_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_example(tmp_path)
    path = tmp_path / "shards" / "labels-00000.npy"
    header_and_data = path.read_bytes().replace(b"(4, 5)", b"(5, 4)")
    path.write_bytes(header_and_data)
    with pytest.raises(DatasetError, match=r"shard 0 \(.*holds uint8 \(5, 4\)"):
        open_dataset(tmp_path).fetch(np.array([0]))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', "null"])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    write_example(tmp_path)
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DatasetError, match=r"index.json: the index is damaged \(.*; ") as caught:
        open_dataset(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_index_of_another_format_is_refused(tmp_path: Path) -> None:
    write_example(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "format": 7}))
    with pytest.raises(DatasetError, match="format 7 is unknown"):
        open_dataset(tmp_path)


def test_a_directory_without_a_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"index.json: no data set here"):
        open_dataset(tmp_path / "nothing")


def test_the_error_names_the_command_that_rebuilds_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DatasetError, match=r"type `rm -f results/demo/data/a5-train/manifest.json` and run the workflow"
    ):
        open_dataset(Path("results/demo/data/a5-train/work/0123456789abcdef"))


def test_a_wrong_array_is_not_written(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, DatasetSpec(200, LENGTH, ("tokens",), {}))
    with pytest.raises(TypeError, match=r"tokens: expected uint8 \(N, 5\), got int64 \(2, 5\)"):
        writer.write(0, {"tokens": np.zeros((2, LENGTH), dtype=np.int64)})
    assert not list(tmp_path.rglob("*.npy"))


def test_too_little_room_is_noticed_beforehand(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, DatasetSpec(200, LENGTH, ("tokens",), {}))
    writer.require_space(10)
    with pytest.raises(OutOfSpace, match=r"needs \d+ MiB more, \d+ are left; free some space or lower num_samples"):
        writer.require_space(1 << 60)
