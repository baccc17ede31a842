from __future__ import annotations

import numpy as np
import pytest

from implicit_llm.training.sampler import IndexPermutation, StepSampler


@pytest.mark.parametrize("size", [*range(1, 40), 97, 1000, 4096, 65537])
def test_a_permutation_hits_every_index_once(size: int) -> None:
    images = IndexPermutation(size, (7, 0))(np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))


def test_a_permutation_of_a_huge_set_stays_inside_and_does_not_collide() -> None:
    size = 8_388_608 * 1000 + 13
    images = IndexPermutation(size, (1, 2))(np.arange(100_000) + size - 100_000)
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == 100_000


def test_permutations_look_shuffled_and_depend_on_the_key() -> None:
    size = 10_000
    first, second = (IndexPermutation(size, key)(np.arange(size)) for key in ((1, 0), (1, 1)))
    assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    assert (first == np.arange(size)).mean() < 0.01


def test_every_epoch_has_every_sample_once_in_another_order() -> None:
    sampler = StepSampler(num_samples=50, batch_size=8, seed=3)
    stream = np.concatenate([sampler.indices(step) for step in range(25)])  # 200 samples: four epochs
    epochs = stream.reshape(4, 50)
    assert all(np.array_equal(np.sort(epoch), np.arange(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_step_has_the_same_samples_whatever_was_asked_for_before() -> None:
    asked = StepSampler(1000, 8, seed=3)
    for step in (0, 1, 511, 512, 600, 3, 599, 0, 512):  # 512 steps are permuted at once
        assert np.array_equal(asked.indices(step), StepSampler(1000, 8, seed=3).indices(step))


def test_the_seed_changes_the_order() -> None:
    assert not np.array_equal(StepSampler(1000, 64, seed=0).indices(0), StepSampler(1000, 64, seed=1).indices(0))


def test_a_batch_larger_than_the_data_takes_samples_of_several_epochs() -> None:
    indices = StepSampler(num_samples=3, batch_size=8, seed=0).indices(0)
    assert np.bincount(indices, minlength=3).tolist() in ([3, 3, 2], [3, 2, 3], [2, 3, 3])


def test_the_order_is_the_same_on_every_machine() -> None:
    assert StepSampler(1000, 8, seed=3).indices(5).tolist() == [916, 469, 903, 521, 490, 172, 17, 220]
