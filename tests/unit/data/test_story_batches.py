from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from implicit_llm_data.babi.catbabi import COLUMNS, PAD_ID, STORIES_NAME, shuffled
from implicit_llm_data.babi.story_batches import StoryBatcher, StoryStream
from implicit_llm_data.shard_writer import write_shards
from implicit_llm_data.shards import DatasetError, DatasetSpec
from tests.refusals import refused
from tests.unit.data.text_samples import context_in

IGNORED = -100


def made_stream(lengths: list[int], seed: int = 0) -> StoryStream:
    """Stories of which every token is unique, so that it tells where it is from."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(1, bounds[-1] + 1, dtype=np.int32)
    labels = np.where(np.random.default_rng(seed).random(len(tokens)) < 0.5, tokens + 1, IGNORED).astype(np.int32)
    task = np.repeat(np.arange(len(lengths)) % 20 + 1, lengths).astype(np.int32)
    return StoryStream({"input_ids": tokens, "labels": labels, "task": task}, bounds)


def by_the_rule(stream: StoryStream, batch_size: int, length: int, order: np.ndarray) -> Iterator[dict[str, Any]]:
    """The published rule, step by step: buffers that are filled until each holds four batches, then emptied by one."""
    buffers: list[list[int]] = [[] for _ in range(batch_size)]
    stories = iter(order.tolist())
    while True:
        while min(map(len, buffers)) < 4 * length:
            story = next(stories, None)
            if story is None:
                break
            sizes = [len(buffer) for buffer in buffers]
            buffers[sizes.index(min(sizes))] += range(stream.bounds[story], stream.bounds[story + 1])
        if not any(buffers):
            return
        taken = [buffer[:length] for buffer in buffers]
        buffers = [buffer[length:] for buffer in buffers]
        batch = {
            name: [[int(values_T[at]) for at in row] + [fill] * (length - len(row)) for row in taken]
            for (name, values_T), fill in zip(stream.columns.items(), (0, IGNORED, 0), strict=True)
        }
        yield {**batch, "num_tokens_B": [len(row) for row in taken], "has_ended_B": [not rest for rest in buffers]}


def random_lengths(count: int, longest: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(1, longest + 1, count).tolist()


SHAPES = [
    # stories, the longest, rows, length of a batch
    (60, 30, 4, 7),
    (60, 30, 1, 7),
    (200, 12, 8, 3),
    (50, 100, 5, 10),
    (40, 9, 16, 20),
    (3, 20, 5, 6),
    (1, 1, 1, 1),
    (100, 1, 3, 4),
]


@pytest.mark.parametrize(("count", "longest", "batch_size", "length"), SHAPES)
@pytest.mark.parametrize("order", ["file", "shuffled"])
def test_batches_equal_those_of_the_published_rule(
    count: int, longest: int, batch_size: int, length: int, order: Literal["shuffled", "file"]
) -> None:
    stream = made_stream(random_lengths(count, longest))
    batcher = StoryBatcher(stream, batch_size, length, order, seed=3)
    for epoch in range(3):
        places = shuffled(count, 3, epoch) if order == "shuffled" else np.arange(count)
        expected = list(by_the_rule(stream, batch_size, length, places))
        found = [batcher.batch(epoch, number) for number in range(batcher.num_batches(epoch))]
        assert [{name: values.tolist() for name, values in vars(batch).items()} for batch in found] == expected


def test_any_step_can_be_read_without_those_before_it() -> None:
    stream = made_stream(random_lengths(40, 30))
    in_turn = StoryBatcher(stream, 4, 7, "shuffled", seed=5)
    places = [(epoch, number) for epoch in range(4) for number in range(in_turn.num_batches(epoch))]
    assert [in_turn.locate(step) for step in range(len(places))] == places
    batches = [in_turn.batch(*place) for place in places]
    for step in np.random.default_rng(0).permutation(len(batches)).tolist():
        read = StoryBatcher(stream, 4, 7, "shuffled", seed=5).at_step(step)
        np.testing.assert_equal(vars(read), vars(batches[step]))
    again = StoryBatcher(stream, 4, 7, "shuffled", seed=5)
    for step in (len(batches) - 1, 0, 17, 3):  # back and forth with one batcher
        np.testing.assert_array_equal(again.at_step(step).input_ids, batches[step].input_ids)


@pytest.mark.parametrize("number", [-1, 1_000_000])
def test_a_batch_outside_of_the_epoch_is_refused(number: int) -> None:
    with pytest.raises(IndexError, match="batches"):
        StoryBatcher(made_stream([5, 6]), 2, 3, "file").batch(0, number)


def write_dataset(directory: Path) -> dict[str, np.ndarray]:
    values = {"input_ids": [1, 5, 6, 1, 7, 8, 9], "labels": [0, 6, 0, 0, 8, 0, 1], "task": [2, 2, 2, 3, 3, 3, 3]}
    columns = {name: np.array([*row, 0, 0], dtype=np.uint8).reshape(3, 3) for name, row in values.items()}
    parts = [{name: rows[start : start + 2] for name, rows in columns.items()} for start in (0, 2)]
    write_shards(context_in(directory, {}), DatasetSpec(20, 3, COLUMNS, {}, ignored_id=PAD_ID), 2, parts.__getitem__)
    np.save(directory / STORIES_NAME, np.array([[0, 2], [3, 3]]), allow_pickle=False)
    return columns


def test_the_stream_of_a_data_set_on_disk_ends_before_its_padding(tmp_path: Path) -> None:
    columns = write_dataset(tmp_path)
    stream = StoryStream.open(tmp_path)
    assert stream.bounds.tolist() == [0, 3, 7]
    assert stream.columns["input_ids"].tolist() == columns["input_ids"].ravel()[:7].tolist()
    assert stream.columns["labels"].tolist() == [IGNORED, 6, IGNORED, IGNORED, 8, IGNORED, 1]
    assert stream.columns["task"].tolist() == [2, 2, 2, 3, 3, 3, 3]
    assert StoryBatcher(stream, 2, 4, "file").at_step(0).input_ids.tolist() == [[1, 5, 6, 0], [1, 7, 8, 9]]


PICKLED = np.array([[0, 2], [3, 3]], dtype=object)  # which would be right, but what is pickled can run code


@pytest.mark.parametrize(
    "content", [None, b"", b"\x93NUMPY broken", [[0, 2], [9, 3]], [[1, 2], [3, 3]], [0, 3], PICKLED]
)
def test_a_damaged_list_of_stories_is_named(tmp_path: Path, content: bytes | list | np.ndarray | None) -> None:
    write_dataset(tmp_path)
    if content is None:
        (tmp_path / STORIES_NAME).unlink()
    elif isinstance(content, bytes):
        (tmp_path / STORIES_NAME).write_bytes(content)
    else:
        np.save(tmp_path / STORIES_NAME, np.array(content), allow_pickle=True)
    with refused(f"{STORIES_NAME}: cannot be read", DatasetError):
        StoryStream.open(tmp_path)
