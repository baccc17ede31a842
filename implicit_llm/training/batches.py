"""Choose the samples of a step from seed and step number alone, and distribute them over processes as micro-batches.

Shapes: `B` batch, `L` length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from implicit_llm_contracts.errors import UserError
from implicit_llm_data.shards import IGNORED_LABEL, Sequences


class BatchSizeError(UserError):
    """The global batch exceeds the training set, or cannot be divided among processes and micro-batches."""


@dataclass(frozen=True)
class BatchLayout:
    """The distribution of a step's samples over micro-steps and, within each micro-step, over ranks."""

    batch_size: int
    world_size: int
    rank: int
    micro_batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size % (self.world_size * self.micro_batch_size):
            raise BatchSizeError(
                f"batch_size: {self.batch_size} sequences cannot be divided among {self.world_size} processes with "
                f"micro-batches of {self.micro_batch_size}; choose another micro_batch_size or number of processes"
            )

    @classmethod
    def choose(cls, batch_size: int, world_size: int, rank: int, micro_batch_size: int | None) -> BatchLayout:
        """Return the layout for this micro-batch size; None means all samples of a process. Raises: BatchSizeError."""
        micro = micro_batch_size or max(1, batch_size // world_size)
        return cls(batch_size, world_size, rank, min(micro, batch_size))

    @property
    def accumulation_steps(self) -> int:
        return self.batch_size // (self.world_size * self.micro_batch_size)

    def own(self, indices: np.ndarray) -> np.ndarray:
        """Return this rank's part of the indices of a step, in the order of its micro-steps."""
        by_micro_step = indices.reshape(self.accumulation_steps, self.world_size, self.micro_batch_size)
        return by_micro_step[:, self.rank].reshape(-1)


def micro_batches(
    dataset: Sequences, indices: np.ndarray, layout: BatchLayout, labels: str, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield this rank's micro-batches of a step's samples `indices`: input_ids (B, L), labels (B, L), num_labels.

    num_labels: how many labels are not IGNORED_LABEL. Each label is at the position whose logits are scored on it; for
    this, `labels="next_token"` moves the labels of the data set one position to the left.
    There is no DataLoader, because it would draw from the random state that a checkpoint restores.
    """
    rows = dataset.fetch(layout.own(indices))
    labels_BL = rows["labels"] if labels == "aligned" else _next_token(rows["labels"])
    for start in range(0, len(labels_BL), layout.micro_batch_size):
        part = slice(start, start + layout.micro_batch_size)
        yield {
            "input_ids": _on_device(rows["input_ids"][part], device),
            "labels": _on_device(labels_BL[part], device),
            "num_labels": int(np.count_nonzero(labels_BL[part] != IGNORED_LABEL)),
        }


def _on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    # From pageable memory, the copy to a GPU would wait for all work in its queue.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _next_token(labels_BL: np.ndarray) -> np.ndarray:
    moved_BL = np.full_like(labels_BL, IGNORED_LABEL)
    moved_BL[:, :-1] = labels_BL[:, 1:]
    return moved_BL


_ROUNDS = 4
_CACHED_SAMPLES = 4096  # permuted together, because permuting for each step would slow down steps of milliseconds


def permuted(indices: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Return the images of `indices` (int64, any shape, in 0..size - 1) under a seeded permutation, in constant memory.

    The permutation is a Feistel network on Z_a x Z_b, with a * b at least `size` and close to it. It is applied again
    to an image outside the range until the image is inside. `key` is any tuple of non-negative integers.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = np.random.SeedSequence(key).generate_state(2 * _ROUNDS, np.uint64)
    images = _encrypted(indices, np.uint64(rows), np.uint64(columns), keys)
    while (outside := images >= size).any():
        images[outside] = _encrypted(images[outside], np.uint64(rows), np.uint64(columns), keys)
    return images


def _encrypted(indices: np.ndarray, rows: np.uint64, columns: np.uint64, keys: np.ndarray) -> np.ndarray:
    row, column = np.divmod(indices.astype(np.uint64), columns)
    for of_row, of_column in keys.reshape(_ROUNDS, 2):
        row = (row + _mix(column + of_row) % rows) % rows
        column = (column + _mix(row + of_column) % columns) % columns
    return (row * columns + column).astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class StepSampler:
    """A sampler that draws without replacement, one shuffled epoch after another; a batch may span two epochs.

    Raises: BatchSizeError if the batch exceeds the training set, because every batch would repeat sequences.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        if num_samples < batch_size:
            raise BatchSizeError(
                f"batch_size: {batch_size} sequences are more than the {num_samples} of the training set, so a batch "
                "would repeat some; give a smaller batch_size or more data"
            )
        self.num_samples, self.batch_size, self._seed = num_samples, batch_size, seed
        self._steps_at_once = max(1, _CACHED_SAMPLES // batch_size)
        self._chunk = lru_cache(maxsize=1)(self._chunk_of_steps)

    def indices(self, step: int) -> np.ndarray:
        """Return the samples of the update after `step` finished updates: int64 of shape (batch_size,)."""
        chunk, number = divmod(step, self._steps_at_once)
        return self._chunk(chunk)[number * self.batch_size : (number + 1) * self.batch_size]

    def _chunk_of_steps(self, chunk: int) -> np.ndarray:
        count = self._steps_at_once * self.batch_size
        epochs, places = np.divmod(np.arange(chunk * count, (chunk + 1) * count), self.num_samples)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = permuted(places[chosen], self.num_samples, (self._seed, int(epoch)))
        return indices
