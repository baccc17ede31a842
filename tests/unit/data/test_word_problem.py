from __future__ import annotations

import hashlib
from dataclasses import asdict, replace

import numpy as np
import pytest

from implicit_llm_contracts.runs.fill import fill
from implicit_llm_data.groups import load_group, load_monoid
from implicit_llm_data.stages.word_problem import BLOCK_SAMPLES, STRIP_POSITIONS, WordProblemConfig, generate
from tests.refusals import refused

BASE = WordProblemConfig(
    group="A5", monoid="none", hard_fraction=0.5, length=20, num_samples=300, split="train", seed=0, shard_samples=100
)


def slow_targets(config: WordProblemConfig, inputs: np.ndarray) -> list[list[int]]:
    """Running products, element by element, each factor by its own table."""
    group, monoid = load_group(config.group).table, load_monoid(config.monoid).table
    order = len(monoid)
    targets = []
    for word in inputs.tolist():
        g, m, row = 0, 0, []
        for token in word:
            g, m = int(group[g, token // order]), int(monoid[m, token % order])
            row.append(order * g + m)
        targets.append(row)
    return targets


@pytest.mark.parametrize("group", ["A5", "S3", "Z60", "S5", "S6", "Z1", "Z256", "Z257"])
@pytest.mark.parametrize("monoid", ["none", "aperiodic"])
@pytest.mark.parametrize("length", [1, STRIP_POSITIONS, 2 * STRIP_POSITIONS + 3])
def test_targets_are_the_running_products_of_the_inputs(group: str, monoid: str, length: int) -> None:
    config = replace(BASE, group=group, monoid=monoid, length=length, num_samples=30, shard_samples=30)
    inputs, targets = generate(config, 0)
    assert inputs.shape == targets.shape == (30, length)
    assert targets.tolist() == slow_targets(config, inputs)


def test_blocks_of_samples_join_without_a_seam() -> None:
    config = replace(BASE, length=8, num_samples=BLOCK_SAMPLES + 5, shard_samples=BLOCK_SAMPLES + 5)
    inputs, targets = generate(config, 0)
    seam = slice(BLOCK_SAMPLES - 5, None)
    assert targets[seam].tolist() == slow_targets(config, inputs[seam])
    assert len(np.unique(inputs, axis=0)) > BLOCK_SAMPLES // 2


@pytest.mark.parametrize("hard_fraction", [0.0, 0.002, 0.1, 0.3, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("monoid", ["none", "aperiodic"])
def test_elements_are_drawn_with_the_published_probabilities(hard_fraction: float, monoid: str) -> None:
    """The identity by what is left, others equally often; the part in the monoid equally often and independently."""
    inputs, _ = generate(large(hard_fraction=hard_fraction, monoid=monoid), 0)
    order = load_monoid(monoid).order
    easy = 1 - hard_fraction * 59 / 60
    assert_share(inputs // order == 0, easy)
    for element in range(1, 60):
        assert_share(inputs // order == element, hard_fraction / 60)
    for part in range(order):
        assert_share(inputs % order == part, 1 / order)
    assert_share(inputs == 0, easy / order)


def test_neighbouring_positions_and_samples_are_independent() -> None:
    inputs, _ = generate(large(hard_fraction=0.5), 0)
    is_identity = inputs == 0
    share = 1 - 0.5 * 59 / 60
    assert_share(is_identity[:, ::2] & is_identity[:, 1::2], share**2)
    assert_share(is_identity[::2] & is_identity[1::2], share**2)


def test_several_hard_fractions_take_turns_over_the_samples_across_shards() -> None:
    fractions = (0.0, 1.0, 0.25)
    config = large(hard_fraction=fractions, num_samples=40_000, shard_samples=20_000)  # no multiple of three
    inputs = np.concatenate([generate(config, shard)[0] for shard in range(config.num_shards)])
    for i, fraction in enumerate(fractions):
        assert_share(inputs[i::3] == 0, 1 - fraction * 59 / 60)


def test_a_shard_depends_on_nothing_but_the_seed_the_split_and_its_number() -> None:
    again = generate(BASE, 2)
    generate(BASE, 0)
    for first, second in zip(generate(BASE, 2), again, strict=True):
        np.testing.assert_array_equal(first, second)
    longer = replace(BASE, num_samples=1000)
    np.testing.assert_array_equal(generate(longer, 2)[0], again[0])
    for other in (generate(replace(BASE, seed=1), 2), generate(replace(BASE, split="test"), 2), generate(BASE, 1)):
        assert (other[0] != again[0]).mean() > 0.3


def test_data_of_a_seed_never_change() -> None:
    config = replace(BASE, monoid="aperiodic", hard_fraction=(0.1, 1.0), length=40)
    digest = hashlib.sha256()
    for shard in range(3):
        for array in generate(config, shard):
            digest.update(array.tobytes())
    # A new value here means that every data set ever made with a seed is another one: do not change it lightly.
    assert digest.hexdigest() == "f948fa1e796841b681bb569a84342657b8140f5cf251ddd84cef751b6f0cb3be"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hard_fraction", 1.5),
        ("hard_fraction", -0.1),
        ("hard_fraction", float("nan")),
        ("hard_fraction", (0.5, 2.0)),
        ("hard_fraction", ()),
        ("length", 0),
        ("num_samples", 0),
        ("shard_samples", -1),
        ("seed", -1),
    ],
)
def test_a_value_out_of_range_gives_one_line_that_names_the_key_and_the_fix(key: str, value: object) -> None:
    with refused(f"^a5-train.{key}.*(; give |expected a number from 0 to 1)"):
        fill(WordProblemConfig, {**asdict(BASE), key: value}, where="a5-train")


def large(**changes: object) -> WordProblemConfig:
    return replace(BASE, **{"num_samples": 20_000, "shard_samples": 20_000, **changes})


def assert_share(is_event: np.ndarray, probability: float) -> None:
    """Five standard deviations: fails by chance once in two million, and the seed is fixed."""
    deviation = np.sqrt(probability * (1 - probability) / is_event.size)
    assert abs(is_event.mean() - probability) <= 5 * deviation
