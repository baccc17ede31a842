from __future__ import annotations

import math

import pytest

from implicit_llm.training.optimizer import learning_rate
from implicit_llm_contracts.config.training import ScheduleConfig

LINEAR = ScheduleConfig("linear", peak_learning_rate=1.0, final_learning_rate=0.0, warmup_fraction=0.1)
STABLE = ScheduleConfig("warmup_stable_decay", 1.0, 0.01, warmup_fraction=0.1, decay_fraction=0.2)


def test_linear_rises_to_the_peak_and_falls_to_the_end() -> None:
    rates = [learning_rate(LINEAR, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 90)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_stable_part_keeps_the_peak_and_the_decay_is_one_minus_square_root() -> None:
    rates = [learning_rate(STABLE, step, 100) for step in range(100)]
    assert rates[10:81] == [1.0] * 71
    for step in range(80, 100):
        assert rates[step] == pytest.approx(0.01 + 0.99 * (1 - math.sqrt((step - 80) / 20)))
    assert rates[99] > 0.01


def test_warm_up_ends_at_the_next_whole_step() -> None:
    schedule = ScheduleConfig("linear", 1.0, 0.0, warmup_fraction=0.1)
    rates = [learning_rate(schedule, step, 16384) for step in range(1641)]
    assert rates.index(max(rates)) == math.ceil(1638.4) - 1


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(ScheduleConfig("linear", 0.5, 0.0, warmup_fraction=0.0), 0, 10) == 0.5


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kind": "linear", "decay_fraction": 0.2}, "decay_fraction"),
        ({"decay_fraction": None}, "decay_fraction"),
        ({"decay_fraction": 0.95}, "warmup_fraction"),
        ({"warmup_fraction": 1.5}, "warmup_fraction"),
        ({"peak_learning_rate": 0.0}, "peak_learning_rate"),
        ({"final_learning_rate": 2.0}, "final_learning_rate"),
        ({"peak_learning_rate": math.nan}, "peak_learning_rate"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_key(changes: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ScheduleConfig(**{**STABLE.__dict__, **changes})
