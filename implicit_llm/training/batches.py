"""Micro-batches of a training job, read from a data set as a step sampler says.

Shapes: `B` batch, `L` length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from implicit_llm.training.sampler import StepSampler
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_data.shards import IGNORED_LABEL, Sequences


class BatchSizeError(UserError):
    """The global batch cannot be divided among processes and micro-batches."""


@dataclass(frozen=True)
class BatchLayout:
    """How the samples of one step are spread: micro-step by micro-step, within each of them rank by rank."""

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
        """The layout for a wanted micro-batch size; None takes all of a process's samples at once."""
        micro = micro_batch_size or max(1, batch_size // world_size)
        return cls(batch_size, world_size, rank, min(micro, batch_size))

    @property
    def accumulation_steps(self) -> int:
        return self.batch_size // (self.world_size * self.micro_batch_size)

    def own(self, indices: np.ndarray) -> np.ndarray:
        """This rank's part of the indices of a step, in the order of its micro-steps."""
        by_micro_step = indices.reshape(self.accumulation_steps, self.world_size, self.micro_batch_size)
        return by_micro_step[:, self.rank].reshape(-1)


class MicroBatches:
    """Endless micro-batches from `first_step` on, on the device: input_ids (B, L), labels (B, L), num_labels.

    Labels stand at the position whose logits they score: with `labels="next_token"` they are moved by one here, so that
    the loss is computed in one way. No DataLoader: it would draw from the random state that a checkpoint restores.
    """

    def __init__(
        self,
        dataset: Sequences,
        sampler: StepSampler,
        layout: BatchLayout,
        labels: str,
        first_step: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.layout = layout
        self.labels = labels
        self.first_step = first_step
        self.device = device or torch.device("cpu")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        step = self.first_step
        while True:
            yield from self._step(step)
            step += 1

    def _step(self, step: int) -> Iterator[dict[str, Any]]:
        rows = self.dataset.fetch(self.layout.own(self.sampler.indices(step)))
        labels_BL = rows["labels"] if self.labels == "aligned" else _next_token(rows["labels"])
        size = self.layout.micro_batch_size
        for start in range(0, len(labels_BL), size):
            part_BL = labels_BL[start : start + size]
            yield {
                "input_ids": self._on_device(rows["input_ids"][start : start + size]),
                "labels": self._on_device(part_BL),
                "num_labels": int(np.count_nonzero(part_BL != IGNORED_LABEL)),
            }

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type != "cuda":
            return tensor
        # From pageable memory the copy would wait for all work that is queued on the device.
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _next_token(labels_BL: np.ndarray) -> np.ndarray:
    moved_BL = np.full_like(labels_BL, IGNORED_LABEL)
    moved_BL[:, :-1] = labels_BL[:, 1:]
    return moved_BL
