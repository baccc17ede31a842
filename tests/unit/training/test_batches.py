from __future__ import annotations

import numpy as np
import pytest
import torch

from implicit_llm.training.batches import BatchLayout, BatchSizeError, micro_batches
from implicit_llm.training.sampler import StepSampler
from implicit_llm_data.shards import IGNORED_LABEL


class Numbered:
    """Sample i is i * 10 + position; labels are inputs + 1000."""

    length = 4
    vocab_size = 10_000

    def __len__(self) -> int:
        return 100

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        input_ids = indices[:, None] * 10 + np.arange(4)
        return {"input_ids": input_ids, "labels": input_ids + 1000}


def batches(world_size: int = 1, rank: int = 0, micro: int | None = None, labels: str = "aligned"):
    """Those of step 3."""
    layout, indices = BatchLayout.choose(12, world_size, rank, micro), StepSampler(100, 12, seed=0).indices(3)
    return list(micro_batches(Numbered(), indices, layout, labels, torch.device("cpu")))


def samples_of_step(world_size: int, micro: int | None) -> list[int]:
    ranks = [batches(world_size, rank, micro) for rank in range(world_size)]
    return [sample for rank in ranks for batch in rank for sample in (batch["input_ids"][:, 0] // 10).tolist()]


@pytest.mark.parametrize(("world_size", "micro"), [(1, None), (1, 3), (1, 1), (2, None), (2, 3), (4, 1), (12, None)])
def test_a_step_has_the_same_samples_whatever_the_world_size_and_accumulation(
    world_size: int, micro: int | None
) -> None:
    assert sorted(samples_of_step(world_size, micro)) == sorted(samples_of_step(1, None))


def test_micro_batches_of_one_process_come_in_the_order_of_the_step() -> None:
    assert samples_of_step(1, 3) == samples_of_step(1, None) == StepSampler(100, 12, seed=0).indices(3).tolist()


def test_aligned_labels_stay_where_they_are_and_all_count() -> None:
    (batch,) = batches()
    assert torch.equal(batch["labels"], batch["input_ids"] + 1000)
    assert batch["num_labels"] == 12 * 4


def test_next_token_labels_move_by_one_and_the_last_position_has_none() -> None:
    (batch,) = batches(labels="next_token")
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:] + 1000)
    assert (batch["labels"][:, -1] == IGNORED_LABEL).all()
    assert batch["num_labels"] == 12 * 3


@pytest.mark.parametrize(("world_size", "micro"), [(1, 5), (5, None), (2, 4)])
def test_a_batch_that_cannot_be_divided_is_refused(world_size: int, micro: int | None) -> None:
    with pytest.raises(BatchSizeError, match="micro_batch_size"):
        BatchLayout.choose(12, world_size, 0, micro)
