"""The samples of a step."""

import numpy as np
import pytest
import torch

from implicit_llm.models.stack import Prefix
from implicit_llm.training.batches import BatchLayout, BatchSizeError, StepSampler, micro_batches, permuted
from implicit_llm.training.state_passing import StatePassing
from implicit_llm_contracts.config.training import PhaseConfig
from implicit_llm_contracts.errors import InvalidValue
from implicit_llm_data.groups import load_group
from implicit_llm_data.shards import IGNORED_LABEL
from implicit_llm_data.stages.word_problem import prefix_products
from tests.refusals import refused
from tests.unit.evaluation.finished_runs import Rows

# Input i is i * 10 + position; labels are inputs + 1000.
INPUTS = 10 * np.arange(100)[:, None] + np.arange(4)
NUMBERED = Rows(length=4, vocab_size=10_000, input_ids=INPUTS, labels=INPUTS + 1000)


def batches(world_size: int = 1, rank: int = 0, micro: int | None = None, labels: str = "aligned"):
    """Those of step 3."""
    layout, indices = BatchLayout.choose(12, world_size, rank, micro), StepSampler(100, 12, seed=0).indices(3)
    return list(micro_batches(NUMBERED, indices, layout, labels, torch.device("cpu")))


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


@pytest.mark.parametrize("size", [*range(1, 40), 97, 1000, 4096, 65537])
def test_a_permutation_hits_every_index_once(size: int) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(size), size, (7, 0))), np.arange(size))


def test_a_permutation_of_a_huge_set_stays_inside_and_does_not_collide() -> None:
    size = 8_388_608 * 1000 + 13
    images = permuted(np.arange(100_000) + size - 100_000, size, (1, 2))
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == 100_000


def test_permutations_look_shuffled_and_depend_on_the_key() -> None:
    size = 10_000
    first, second = (permuted(np.arange(size), size, key) for key in ((1, 0), (1, 1)))
    assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    assert (first == np.arange(size)).mean() < 0.01


def test_every_epoch_has_every_sample_once_in_another_order() -> None:
    sampler = StepSampler(num_samples=50, batch_size=8, seed=3)
    epochs = np.concatenate([sampler.indices(step) for step in range(25)]).reshape(4, 50)  # 200 samples
    assert all(np.array_equal(np.sort(epoch), np.arange(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_step_has_the_same_samples_whatever_was_asked_for_before() -> None:
    asked = StepSampler(1000, 8, seed=3)
    for step in (0, 1, 511, 512, 600, 3, 599, 0, 512):  # 512 steps are permuted at once
        assert np.array_equal(asked.indices(step), StepSampler(1000, 8, seed=3).indices(step))


def test_the_seed_changes_the_order() -> None:
    assert not np.array_equal(StepSampler(1000, 64, seed=0).indices(0), StepSampler(1000, 64, seed=1).indices(0))


def test_a_batch_larger_than_the_data_is_refused_because_it_would_repeat_sequences() -> None:
    with refused("batch_size: 8 sequences are more than the 7 of the training set", BatchSizeError):
        StepSampler(num_samples=7, batch_size=8, seed=0)
    assert sorted(StepSampler(num_samples=8, batch_size=8, seed=0).indices(5)) == list(range(8))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert StepSampler(1000, 8, seed=3).indices(5).tolist() == [916, 469, 903, 521, 490, 172, 17, 220]


def test_a_phase_keeps_no_checkpoint_that_would_lack_its_states() -> None:
    with refused("keep: at step 2 some sequences continue a carried state", InvalidValue):
        PhaseConfig("a", 0, 1, 9, None, (2,), state_passing=4)
    assert PhaseConfig("a", 0, 1, 9, None, (5,), state_passing=4).keep == (5,)


@pytest.mark.parametrize("restarts", [True, False])
def test_words_start_empty_at_the_end_of_a_row_and_if_asked_to_after_a_wrong_answer(restarts: bool) -> None:
    group, rng = load_group("S3"), np.random.default_rng(4)
    phase = PhaseConfig("a", 0, 1, 9, None, state_passing=4, restart_when_wrong=restarts)
    source = {"group": "S3", "monoid": "none"}
    passing = StatePassing(phase, source, BatchLayout(16, 2, 1, 8), torch.device("cpu"))
    words_in_a_row_B = np.array([4, 2, 4, 1, 4, 2, 4, 1])
    before_B, ends, joins, carried = np.zeros(8, dtype=np.uint8), [], [], 0.0
    for step in range(1, 9):
        words_LB = rng.integers(6, size=(4, 8), dtype=np.uint8)
        alone_LB, joined_LB = np.empty_like(words_LB), np.empty_like(words_LB)
        prefix_products(group, np.zeros(8, dtype=np.uint8), words_LB, out=alone_LB)
        before_B = prefix_products(group, before_B, words_LB, out=joined_LB)
        batch = {"labels": torch.from_numpy(alone_LB.T.astype(np.int64))}
        passing.join([batch], step)
        assert batch["labels"].tolist() == joined_LB.T.tolist()
        assert batch["carried_share"].item() == carried
        joins.append(bool((alone_LB != joined_LB).any()))
        batch["chains"].cache.prefix = Prefix(((torch.ones(8, 3),),), 4)
        is_right_B = rng.random(8) < 0.7
        answers = batch["labels"] + torch.from_numpy(~is_right_B)[:, None]
        passing.leave(batch, torch.nn.functional.one_hot(answers % 6, 6))
        goes_on_B = (is_right_B | (not restarts)) & (step % words_in_a_row_B != 0)
        carried = 0.0 if step == 8 else goes_on_B.mean()
        assert batch["chains"].cache.prefix.layers[0][0].sum(1).tolist() == (3 * goes_on_B).tolist()
        before_B = before_B * goes_on_B
        ends.append(passing.starts_at(step))
    assert ends == [True, False, False, False] * 2
    assert joins == [False, True, True, True] * 2


def test_a_solver_that_failed_leaves_no_state_for_the_next_sequences() -> None:
    phase = PhaseConfig("a", 0, 0, 8, None, state_passing=4)
    passing = StatePassing(phase, {"group": "S3", "monoid": "none"}, BatchLayout(2, 1, 0, 2), torch.device("cpu"))
    batch = {"labels": torch.zeros(2, 4, dtype=torch.long)}
    passing.join([batch], 0)
    passing.leave(batch, torch.full((2, 4, 6), torch.nan))
    assert batch["chains"].cache.prefix is None
