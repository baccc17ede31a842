import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from implicit_llm_data.shard_writer import write_shards
from implicit_llm_data.shards import DatasetError, DatasetSpec, LengthError, open_dataset, token_dtype
from tests.refusals import refused
from tests.unit.data.text_samples import context_in

SIZES = (4, 4, 3)
LENGTH = 5


@pytest.fixture
def vocab_size() -> int:
    return 200


@pytest.fixture
def columns(tmp_path: Path, vocab_size: int) -> dict[str, np.ndarray]:
    """Of a data set of three shards in `tmp_path`."""
    spec = DatasetSpec(vocab_size, LENGTH, ("input_ids", "labels"), {"seed": 1})
    random = np.random.default_rng(0)
    columns = {
        column: random.integers(0, vocab_size, (sum(SIZES), LENGTH)).astype(token_dtype(vocab_size))
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
    assert (len(dataset), dataset.vocab_size, dataset.length, dataset.source) == (11, vocab_size, LENGTH, {"seed": 1})
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
    assert open_dataset(tmp_path, LENGTH).length == LENGTH
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
        (lambda path: path.unlink(), "is missing"),
        (lambda path: os.truncate(path, 100), "has 100 bytes instead of 148"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 149 bytes instead of 148"),
    ],
)
def test_a_missing_or_short_shard_is_named_when_the_data_set_is_opened(
    tmp_path: Path, column: str, damage, message: str
) -> None:
    damage(tmp_path / "shards" / f"{column}-00001.npy")
    with refused(rf"shard 1 \(.*{column}-00001.npy\) {message}; ", DatasetError):
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
    with refused(rf"shard 0 \(.*labels-00000.npy\) {message}", DatasetError):
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
    spec = DatasetSpec(200, LENGTH, ("tokens",), {})
    with pytest.raises(TypeError, match=r"tokens: expected uint8 \(N, 5\), got int64 \(2, 5\)"):
        write_shards(context_in(tmp_path, {}), spec, 1, lambda shard: {"tokens": np.zeros((2, LENGTH), dtype=np.int64)})
    assert not list(tmp_path.rglob("*.npy"))
