"""Micro-batches of a training step, and how they are spread over processes.

Shapes: `B` batch, `L` length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from implicit_llm_contracts.runs import UserError
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


def micro_batches(
    dataset: Sequences, indices: np.ndarray, layout: BatchLayout, labels: str, device: torch.device
) -> Iterator[dict[str, Any]]:
    """This rank's part of the step with the samples `indices`: input_ids (B, L), labels (B, L), num_labels.

    Labels stand at the position whose logits they score: with `labels="next_token"` they are moved by one here, so that
    the loss is computed in one way. No DataLoader: it would draw from the random state that a checkpoint restores.
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
    # From pageable memory the copy to a GPU would wait for all work that is queued on it.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _next_token(labels_BL: np.ndarray) -> np.ndarray:
    moved_BL = np.full_like(labels_BL, IGNORED_LABEL)
    moved_BL[:, :-1] = labels_BL[:, 1:]
    return moved_BL
