from __future__ import annotations

import numpy as np
import pytest

from implicit_llm.evaluation.tallies import LossTally, PositionTally, position_bins


def test_mean_is_over_tokens_however_they_are_cut_into_batches() -> None:
    tally = LossTally()
    tally.add(6.0, 2)
    tally.add(1.0, 1)
    assert tally.loss == pytest.approx(7 / 3)
    assert tally.perplexity == pytest.approx(np.exp(7 / 3))


def test_bins_are_single_positions_first_and_a_share_of_an_octave_later() -> None:
    assert position_bins(16).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16]
    assert position_bins(1).tolist() == [1]
    assert len(position_bins(16384)) <= 64


@pytest.mark.parametrize("length", [1, 2, 9, 100, 2048])
def test_bins_cover_every_position_once(length: int) -> None:
    tally = PositionTally(length)
    tally.add(np.zeros((1, length)), np.ones((1, length), dtype=bool))
    curve = tally.values()
    covered = [p for start, end in zip(curve["start"], curve["end"], strict=True) for p in range(start, end + 1)]
    assert covered == list(range(1, length + 1))
    assert sum(curve["num_tokens"]) == length


def test_curve_is_weighted_by_tokens_and_counts_short_rows_where_they_reach() -> None:
    tally = PositionTally(10)
    counted = np.ones((2, 10), dtype=bool)
    counted[1, 8:] = False
    losses = np.where(counted, np.arange(1.0, 11.0) * [[1.0], [3.0]], 0.0)
    tally.add(losses, counted)
    tally.add(np.full((1, 3), 5.0), np.ones((1, 3), dtype=bool))
    curve = tally.values()
    assert curve["start"][-2:] == [8, 10]
    assert curve["end"][-2:] == [9, 10]
    assert curve["loss"][:2] == pytest.approx([(1 + 3 + 5) / 3, (2 + 6 + 5) / 3], rel=1e-5)
    assert curve["num_tokens"][-2:] == [3, 1]
    assert curve["loss"][-2:] == pytest.approx([(8 + 24 + 9) / 3, 10.0], rel=1e-5)


def test_positions_that_no_row_reached_have_no_loss_rather_than_zero() -> None:
    tally = PositionTally(4)
    tally.add(np.ones((1, 2)), np.ones((1, 2), dtype=bool))
    assert tally.values()["loss"] == [1.0, 1.0, None, None]
