from __future__ import annotations

import numpy as np
import pytest

from implicit_llm.evaluation.kinds.word_problem import chance_per_position
from implicit_llm_data.stages.word_problem import WordProblemConfig, generate


@pytest.mark.parametrize(
    ("group", "monoid", "hard_fraction"),
    [("S3", "none", 0.3), ("A4", "none", (0.1, 0.9)), ("S3", "aperiodic", 0.5), ("Z5", "none", 0.0)],
)
def test_chance_is_the_share_of_the_most_frequent_target(
    group: str, monoid: str, hard_fraction: float | tuple[float, ...]
) -> None:
    count, length = 40_000, 12
    config = WordProblemConfig(group, monoid, hard_fraction, length, count, "test", 0, count)  # type: ignore[arg-type]
    _, targets = generate(config, 0)
    frequent = np.array([np.bincount(targets[:, position]).max() / count for position in range(length)])
    assert chance_per_position(group, monoid, hard_fraction, length) == pytest.approx(frequent, abs=0.012)


def test_chance_of_long_hard_sequences_is_one_over_the_order_of_the_group() -> None:
    assert chance_per_position("A5", "none", 0.5, 64)[-1] == pytest.approx(1 / 60)
