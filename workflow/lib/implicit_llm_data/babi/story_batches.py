"""CatbAbI for models that carry their state: rows of stories that go on from batch to batch.

Each story goes to the row that is shortest so far, and a batch is the next `length` tokens of every row; stories run
together and across batch borders. Row r of batch t + 1 continues row r of batch t: a model carries the state of row r
over, and its rows must not be exchanged. At the end of an epoch rows run out at different places and are filled up with
<pad>; `num_tokens_B` says how much of a row is real, so that the state of a row can be taken after its last word. The
next epoch goes on in the same rows.

The published batcher fills buffers of four batches and puts each story into the shortest buffer. As every batch takes
as much from each buffer until the stories end, that is the row with the fewest tokens since the start of the epoch: so
the rows follow from the lengths of the stories alone, and any batch can be read without those before it.

Shapes: B rows, L length, S stories, T tokens of the stream.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from implicit_llm_data.babi.catbabi import PAD_ID, STORIES_NAME, shuffled
from implicit_llm_data.shards import IGNORED_LABEL, DatasetError, open_dataset, rebuild_hint


@dataclass(frozen=True)
class StoryStream:
    """The stories of a data set one after another.

    columns: input_ids, labels (-100 where there is nothing to learn) and task, each int32 (T,); bounds: int64 (S + 1,),
    where each story starts, and the end.
    """

    columns: dict[str, np.ndarray]
    bounds: np.ndarray

    @classmethod
    def open(cls, directory: Path) -> StoryStream:
        """Read the data set that a `catbabi` stage wrote to `directory`, all of it. Raises: DatasetError."""
        dataset = open_dataset(directory)
        rows = dataset.fetch(np.arange(len(dataset)))
        columns = {name: values_NL.astype(np.int32).ravel() for name, values_NL in rows.items()}
        end = int(np.flatnonzero(columns["input_ids"] != PAD_ID)[-1]) + 1
        path = directory / STORIES_NAME
        try:
            bounds = np.append(np.load(path, allow_pickle=False)[:, 0], end)
            if bounds[0] != 0 or not (np.diff(bounds) > 0).all():
                raise ValueError("the stories do not follow one another")
        except (OSError, EOFError, ValueError, IndexError) as error:
            raise DatasetError(f"{path}: cannot be read ({error}); {rebuild_hint(directory)}") from error
        return cls({name: values_T[:end] for name, values_T in columns.items()}, bounds)


@dataclass(frozen=True)
class StoryBatch:
    """input_ids, labels, task: int64 (B, L), filled up with 0, -100 and 0; num_tokens_B: real tokens of each row.

    has_ended_B: the row has no token after this batch until the epoch ends.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    task: np.ndarray
    num_tokens_B: np.ndarray
    has_ended_B: np.ndarray


class StoryBatcher:
    """Batches of `batch_size` rows of `length` tokens, each a pure function of (seed, step).

    order: "shuffled" (training; another order in every epoch) or "file" (evaluation; the same one).
    """

    def __init__(
        self, stream: StoryStream, batch_size: int, length: int, order: Literal["shuffled", "file"], seed: int = 0
    ) -> None:
        self.batch_size = batch_size
        self.length = length
        self._stream = stream
        self._order = order
        self._seed = seed
        self._epoch = -1  # of the rows that are at hand
        self._rows: list[np.ndarray] = []
        self._counts: list[int] = []  # batches of each epoch counted so far

    def num_batches(self, epoch: int) -> int:
        """How many batches the epoch has: it ends when all rows have."""
        return -(-max(map(len, self._rows_of(epoch))) // self.length)

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of a step and the number of its batch there, both from 0."""
        while sum(self._counts) <= step:
            self._counts.append(self.num_batches(len(self._counts)))
        epoch = int(np.searchsorted(np.cumsum(self._counts), step, side="right"))
        return epoch, step - sum(self._counts[:epoch])

    def at_step(self, step: int) -> StoryBatch:
        """The batch of a step that counts on over the epochs, from 0."""
        return self.batch(*self.locate(step))

    def batch(self, epoch: int, number: int) -> StoryBatch:
        """Batch `number` of an epoch. Raises: IndexError when the epoch has fewer."""
        if not 0 <= number < self.num_batches(epoch):
            raise IndexError(f"batch {number} of an epoch of {self.num_batches(epoch)} batches")
        shape, start = (self.batch_size, self.length), number * self.length
        fill = {"input_ids": PAD_ID, "labels": IGNORED_LABEL, "task": 0}
        columns = {name: np.full(shape, value, dtype=np.int64) for name, value in fill.items()}
        rows = self._rows_of(epoch)
        left_B = np.array([len(row) - start for row in rows])
        for number_of_row, row in enumerate(rows):
            sources = row[start : start + self.length]
            for name, values_BL in columns.items():
                values_BL[number_of_row, : len(sources)] = self._stream.columns[name][sources]
        return StoryBatch(**columns, num_tokens_B=np.clip(left_B, 0, self.length), has_ended_B=left_B <= self.length)

    def _rows_of(self, epoch: int) -> list[np.ndarray]:
        """Where in the stream the tokens of each row are.

        Each story goes to the row that is the shortest, the first of them where several are.
        """
        if epoch != self._epoch:
            bounds = self._stream.bounds
            count = len(bounds) - 1
            order = shuffled(count, self._seed, epoch) if self._order == "shuffled" else np.arange(count)
            stories: list[list[np.ndarray]] = [[np.arange(0)] for _ in range(self.batch_size)]
            shortest = [(0, row) for row in range(self.batch_size)]  # a heap: equal lengths in the order of the rows
            for start, end in zip(bounds[order].tolist(), bounds[order + 1].tolist(), strict=True):
                filled, row = shortest[0]
                stories[row].append(np.arange(start, end))
                heapq.heapreplace(shortest, (filled + end - start, row))
            self._epoch, self._rows = epoch, [np.concatenate(of_row) for of_row in stories]
        return self._rows
