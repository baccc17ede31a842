"""Word problems: tables of groups, how words are drawn from them, and the stage that writes them."""

import hashlib
import itertools
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from implicit_llm_contracts.config.word_problem import WordProblemConfig
from implicit_llm_contracts.runs.stage_context import StageContext
from implicit_llm_data.groups import UnknownGroup, load_group, load_monoid, load_product
from implicit_llm_data.shards import open_dataset
from implicit_llm_data.stages import word_problem as stage
from implicit_llm_data.stages.word_problem import BLOCK_SAMPLES, STRIP_POSITIONS, generate
from tests.refusals import refused
from tests.unit.data import text_samples
from tests.unit.data.text_samples import contents, real_file

A5_TABLE_SHA256 = "0af9ef8f7333935c7c766456aa8abe9e7bab47f6ce5f0831062c2b4e7d782180"
A5_APERIODIC_TABLE_SHA256 = "c97fcaf46150b97d1f5961f2d49063ed26215df9f0e93425fcad2240323e73ba"

GROUPS = ("S1", "S2", "S3", "S4", "S5", "A1", "A2", "A3", "A4", "A5", "A6", "Z1", "Z2", "Z7", "Z60", "Z300")


@pytest.mark.parametrize(("monoid", "expected"), [("none", A5_TABLE_SHA256), ("aperiodic", A5_APERIODIC_TABLE_SHA256)])
def test_tables_of_a5_have_the_published_check_sums(monoid: str, expected: str) -> None:
    table = load_product("A5", monoid).table
    assert table.dtype == np.uint8
    assert hashlib.sha256(table.tobytes()).hexdigest() == expected


def test_tables_equal_the_published_file() -> None:
    published = json.loads(real_file("word_problem_tables.json").read_text())
    for name, found in (("A5", load_group("A5")), ("M", load_monoid("aperiodic"))):
        assert found.table.tolist() == published[f"{name}_table"]
    assert (
        published["sha256_A5_table_uint8_rowmajor"],
        published["sha256_product_table_uint8_rowmajor"],
    ) == (A5_TABLE_SHA256, A5_APERIODIC_TABLE_SHA256)


@pytest.mark.parametrize("name", GROUPS)
def test_group_axioms_hold(name: str) -> None:
    group = load_group(name)
    table, order = group.table.astype(np.int64), group.order
    every = np.arange(order)
    assert table.shape == (order, order)
    np.testing.assert_array_equal(table[0], every)  # the identity is element 0
    np.testing.assert_array_equal(table[:, 0], every)
    np.testing.assert_array_equal(np.sort(table, axis=0), np.repeat(every[:, None], order, axis=1))
    np.testing.assert_array_equal(np.sort(table, axis=1), np.repeat(every[None], order, axis=0))
    third = every if order <= 60 else np.random.default_rng(0).integers(0, order, 20)
    np.testing.assert_array_equal(table[table[:, :, None], third], table[:, table[:, third]])  # (ab)c = a(bc)


@pytest.mark.parametrize("name", ["none", "aperiodic"])
def test_monoid_is_associative_with_identity_0_and_has_no_subgroup(name: str) -> None:
    table = load_monoid(name).table
    every = np.arange(len(table))
    np.testing.assert_array_equal(table[table], table[:, table])
    np.testing.assert_array_equal(table[0], every)
    np.testing.assert_array_equal(table[:, 0], every)
    for element in every:
        powers = list(itertools.accumulate([element] * 6, lambda a, b: table[a, b]))
        assert powers[4] == powers[5]  # aperiodic: powers come to rest


@pytest.mark.parametrize("name", ["S2", "S3", "S4", "A3", "A4", "A5", "S7"])
def test_permutations_are_in_lexicographic_order_and_compose_right_to_left(name: str) -> None:
    group = load_group(name)
    elements = [
        images
        for images in itertools.permutations(range(int(name[1])))
        if name[0] == "S" or sum(a > b for a, b in itertools.combinations(images, 2)) % 2 == 0
    ]
    assert len(elements) == group.order
    some = range(group.order) if group.order <= 60 else (0, 1234, 4321)
    for a, b in itertools.product(some, repeat=2):
        assert elements[group.table[a, b]] == tuple(elements[a][image] for image in elements[b])


def test_cyclic_group_lists_the_powers() -> None:
    assert load_group("Z4").table[2, 3] == 1


def test_direct_product_multiplies_componentwise() -> None:
    group, monoid, product = load_group("S3"), load_monoid("aperiodic"), load_product("S3", "aperiodic")
    for g, h, m, n in itertools.product(range(6), range(6), range(4), range(4)):
        assert product.table[4 * g + m, 4 * h + n] == 4 * group.table[g, h] + monoid.table[m, n]
    assert load_product("S5", "aperiodic").table.dtype == np.uint16  # of 480 elements


def test_tables_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="read-only"):
        load_group("A5").table[0, 0] = 1


KNOWN = r"^group: .*use one of S1 to S7, A1 to A7, Z1 to Z\d+$"


@pytest.mark.parametrize(
    ("group", "monoid", "message"),
    [
        *(
            (name, "none", KNOWN)
            for name in ("B5", "a5", "A", "A0", "A05", "5", "", "A5 ", "S-3", "A4xZ5", "Z1e3", "A٥")
        ),
        *((name, "none", r"is no group.*S1 to S7") for name in ("S8", "A8", "Z5793", "S1000000000", "Z" + "9" * 5000)),
        ("S7", "aperiodic", r"S7 x aperiodic has 20160 elements.*monoid: none"),
        ("A5", "periodic", "monoid: 'periodic' is unknown; use one of none, aperiodic"),
    ],
)
def test_what_has_no_table_is_refused_at_once_and_the_valid_forms_are_named(
    group: str, monoid: str, message: str
) -> None:
    with refused(message, UnknownGroup):
        load_product(group, monoid)


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
    np.testing.assert_array_equal(generate(replace(BASE, num_samples=1000), 2)[0], again[0])
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


def large(**changes: object) -> WordProblemConfig:
    return replace(BASE, **{"num_samples": 20_000, "shard_samples": 20_000, **changes})


def assert_share(is_event: np.ndarray, probability: float) -> None:
    """Five standard deviations: fails by chance once in two million, and the seed is fixed."""
    deviation = np.sqrt(probability * (1 - probability) / is_event.size)
    assert abs(is_event.mean() - probability) <= 5 * deviation


CONFIG: dict[str, Any] = {
    "kind": "word_problem",
    "group": "S3",
    "monoid": "none",
    "hard_fraction": [0.2, 1.0],
    "length": 6,
    "num_samples": 10,
    "split": "train",
    "seed": 3,
    "shard_samples": 4,
}


def context_in(work: Path, **changes: Any) -> StageContext:
    return text_samples.context_in(work, {**CONFIG, **changes}, name="s3-train")


def test_the_stage_writes_the_data_set_of_its_configuration(tmp_path: Path) -> None:
    result = stage.run(context_in(tmp_path))
    dataset = open_dataset(tmp_path)
    config = context_in(tmp_path).settings(WordProblemConfig)
    shards = [generate(config, shard) for shard in range(3)]
    batch = dataset.fetch(np.arange(10))
    np.testing.assert_array_equal(batch["input_ids"], np.concatenate([inputs for inputs, _ in shards]))
    np.testing.assert_array_equal(batch["labels"], np.concatenate([targets for _, targets in shards]))
    assert dataset.source == CONFIG
    assert result.summary == {"num_samples": 10, "num_tokens": 60, "num_shards": 3, "vocab_size": 6}
    listed = {str(Path(path).relative_to(tmp_path)) for path in result.files}
    assert listed == {path for path in contents(tmp_path) if path == "index.json" or path.endswith(".npy")}


@pytest.mark.parametrize("damage", ["missing", "flipped", "no record"])
def test_only_the_damaged_shard_is_made_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.run(context_in(tmp_path))
    undisturbed = contents(tmp_path)
    array, record = tmp_path / "shards" / "labels-00001.npy", tmp_path / "shards" / "00001.json"
    if damage == "missing":
        array.unlink()
    elif damage == "flipped":
        array.write_bytes(array.read_bytes()[:-1] + b"\x07")
    else:
        record.write_text(record.read_text()[:20])
    made = []
    monkeypatch.setattr(stage, "generate", lambda config, shard: made.append(shard) or generate(config, shard))
    with caplog.at_level(logging.INFO):
        stage.run(context_in(tmp_path))
    assert made == [1]
    assert "kept 2 of 3 shards" in caplog.text
    assert contents(tmp_path) == undisturbed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"hard_fraction": fraction}, "hard_fraction: expected a number from 0 to 1")
            for fraction in (1.5, -0.1, float("nan"))
        ),
        ({"hard_fraction": [0.5, 2.0]}, "hard_fraction[1]: 2.0 is not allowed; give a number from 0 to 1"),
        ({"hard_fraction": []}, "hard_fraction: [] is not allowed; give at least one entry"),
        ({"length": 0}, "length: 0 is not allowed; give an integer of at least 1"),
        ({"num_samples": 0}, "num_samples: 0 is not allowed; give "),
        ({"shard_samples": -1}, "shard_samples: -1 is not allowed; give "),
        ({"seed": -1}, "seed: -1 is not allowed; give "),
        ({"group": "D4"}, "use one of S1 to S7"),
        ({"group": "S7", "monoid": "aperiodic"}, "monoid: none"),
        ({"lenght": 3}, "length"),
    ],
)
def test_a_wrong_configuration_leaves_nothing_behind(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with refused(f"^data/s3-train.*{re.escape(message)}"):
        stage.run(context_in(tmp_path, **changes))
    assert not list(tmp_path.iterdir())
