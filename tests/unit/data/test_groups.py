import hashlib
import itertools
import json
import math

import numpy as np
import pytest

from implicit_llm_data.groups import UnknownGroup, load_group, load_monoid, load_product
from tests.refusals import refused
from tests.unit.data.text_samples import real_file

A5_TABLE_SHA256 = "0af9ef8f7333935c7c766456aa8abe9e7bab47f6ce5f0831062c2b4e7d782180"
A5_APERIODIC_TABLE_SHA256 = "c97fcaf46150b97d1f5961f2d49063ed26215df9f0e93425fcad2240323e73ba"

GROUPS = ("S1", "S2", "S3", "S4", "S5", "A1", "A2", "A3", "A4", "A5", "A6", "Z1", "Z2", "Z7", "Z60", "Z300")


def images(name: str) -> tuple[int, ...]:
    """The images of a permutation, from an element's name: "(2, 1)" or "(1,)"."""
    return tuple(int(image) for image in name.strip("()").split(",") if image)


@pytest.mark.parametrize(("monoid", "expected"), [("none", A5_TABLE_SHA256), ("aperiodic", A5_APERIODIC_TABLE_SHA256)])
def test_tables_of_a5_have_the_published_check_sums(monoid: str, expected: str) -> None:
    table = load_product("A5", monoid).table
    assert table.dtype == np.uint8
    assert hashlib.sha256(table.tobytes()).hexdigest() == expected


def test_tables_equal_the_published_file() -> None:
    published = json.loads(real_file("word_problem_tables.json").read_text())
    group, monoid = load_group("A5"), load_monoid("aperiodic")
    assert list(group.elements) == published["A5_elements"]
    assert group.table.tolist() == published["A5_table"]
    assert list(monoid.elements) == published["M_elements"]
    assert monoid.table.tolist() == published["M_table"]
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
    elements = [images(text) for text in group.elements]
    assert elements == sorted(elements)
    assert len(set(elements)) == math.factorial(int(name[1])) // (2 if name[0] == "A" else 1)
    some = range(group.order) if group.order <= 60 else (0, 1234, 4321)
    for a, b in itertools.product(some, repeat=2):
        assert elements[group.table[a, b]] == tuple(elements[a][image - 1] for image in elements[b])


def test_cyclic_group_lists_the_powers() -> None:
    group = load_group("Z4")
    assert group.elements == ("e", "a", "a^2", "a^3")
    assert group.table[2, 3] == 1


def test_direct_product_multiplies_componentwise() -> None:
    group, monoid, product = load_group("S3"), load_monoid("aperiodic"), load_product("S3", "aperiodic")
    assert product.elements[4 * 1 + 2] == f"{group.elements[1]}:B"
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
        *((name, "none", r"too large.*S1 to S7") for name in ("S8", "A8", "Z5793", "S1000000000", "Z" + "9" * 5000)),
        ("S7", "aperiodic", r"S7 x aperiodic has 20160 elements.*monoid: none"),
        ("A5", "periodic", "monoid: 'periodic' is unknown; use one of none, aperiodic"),
    ],
)
def test_what_has_no_table_is_refused_at_once_and_the_valid_forms_are_named(
    group: str, monoid: str, message: str
) -> None:
    with refused(message, UnknownGroup):
        load_product(group, monoid)
