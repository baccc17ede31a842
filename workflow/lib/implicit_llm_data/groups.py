"""Define finite groups and monoids by multiplication tables: S_n, A_n, Z_n, the aperiodic monoid, direct products.

The order of elements is part of the data format, because a token is an element's index. S_n has the permutations of
1..n in lexicographic order, A_n has its even permutations in the same order, and Z_n has the powers e, a, a^2, ... In a
direct product, the index is `right.order * left_index + right_index`. The identity always has index 0.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from implicit_llm_contracts.config.word_problem import (
    GROUPS,
    MAX_ORDER,
    MONOID_ORDERS,
    UnknownGroup,
    group_order,
    product_order,
)
from implicit_llm_contracts.errors import UserError


class InvalidTable(UserError, ValueError):
    """A table does not define a finite monoid."""


@dataclass(frozen=True, eq=False)
class Algebra:
    """A finite group or monoid whose identity is element 0.

    table: (order, order), read-only, of the smallest unsigned type that fits an index; table[a, b] is a*b.
    """

    table: np.ndarray

    @property
    def order(self) -> int:
        """The number of elements."""
        return len(self.table)


def register_group(name: str, table: ArrayLike) -> Algebra:
    """Register any finite monoid, given by its multiplication table, as the group `name` of word problems; return it.

    Args: table[a][b] is the index of a*b, and element 0 is the identity.
    Raises: NameTaken for the name of a built-in group; InvalidTable.
    """
    GROUPS.refuse_builtin(name)
    _check_table(name, table)
    GROUPS.add(name, _algebra(np.asarray(table)))
    load_product.cache_clear()
    return GROUPS[name]


def _check_table(name: str, given: ArrayLike) -> None:
    try:
        table = np.asarray(given)
    except ValueError:  # rows of different lengths
        table = np.empty(0)
    order = len(table) if table.ndim == 2 else 0
    is_square = table.shape == (order, order) and np.issubdtype(table.dtype, np.integer) and 1 <= order <= MAX_ORDER
    if not is_square or table.min() < 0 or table.max() >= order:
        raise InvalidTable(
            f"group {name!r}: the table must be a square of integers, with 1 to {MAX_ORDER} rows, each the index of an "
            "element from 0 on"
        )
    if not ((table[0] == np.arange(order)).all() and (table[:, 0] == np.arange(order)).all()):
        raise InvalidTable(f"group {name!r}: element 0 is not the identity; let row 0 and column 0 be 0, 1, 2, ...")
    for a in range(order):  # (a b) c = a (b c)
        if (table[table[a]] != table[a][table]).any():
            raise InvalidTable(f"group {name!r}: the table is not associative at element {a}; correct it")


def load_group(name: str) -> Algebra:
    """Return the group called `name`, for example "S5", "A5" or "Z60", or a registered one.

    Raises: UnknownGroup, which names the valid forms.
    """
    if name in GROUPS:
        return GROUPS[name]
    group_order(name)  # raises errors for invalid names
    return _build_group(name[0], int(name[1:]))


def load_monoid(name: str) -> Algebra:
    """Build the monoid called `name`: "aperiodic" (four elements) or "none" (the trivial one).

    Source: the published A5 x aperiodic monoid task. E is the identity and X absorbs everything.
    Raises: UnknownGroup, which names the valid forms.
    """
    if name == "none":
        return _algebra(np.zeros((1, 1)))
    if name == "aperiodic":
        E, A, B, X = range(4)
        return _algebra(np.array([[E, A, B, X], [A, X, X, X], [B, A, B, X], [X, X, X, X]]))
    raise UnknownGroup(f"monoid: {name!r} is unknown; use one of {', '.join(MONOID_ORDERS)}")


@lru_cache(maxsize=8)
def load_product(group: str, monoid: str) -> Algebra:
    """Build the direct product of a group and a monoid, both by name; with the monoid "none", return the group itself.

    Raises: UnknownGroup for an unknown name, and for a product whose table would be too large.
    """
    right = load_monoid(monoid)
    product_order(group, monoid)  # raises errors for invalid names
    left = load_group(group)
    return left if monoid == "none" else direct_product(left, right)


def direct_product(left: Algebra, right: Algebra) -> Algebra:
    """Build the direct product of two algebras; the element (i, j) has the index `right.order * i + j`."""
    order = left.order * right.order
    pairs = left.table.astype(np.int64)[:, None, :, None] * right.order + right.table[None, :, None, :]
    return _algebra(pairs.reshape(order, order))


@lru_cache(maxsize=8)
def _build_group(family: str, n: int) -> Algebra:
    if family == "Z":
        exponents = np.arange(n)
        return _algebra((exponents[:, None] + exponents) % n)
    permutations = np.array(list(itertools.permutations(range(n))), dtype=np.uint8)
    if family == "A":  # the even permutations
        permutations = permutations[np.linalg.det(np.eye(n)[permutations]) > 0]
    return _algebra(_composition_table(permutations))


def _composition_table(permutations: np.ndarray) -> np.ndarray:
    """Return the table of (a*b)(i) = a(b(i)). `permutations`: (order, n), the images of one permutation in each row."""
    order, n = permutations.shape
    # The images of a permutation, as digits in base n, give its key.
    place_values = n ** np.arange(n - 1, -1, -1)
    index_of = np.zeros(n**n, dtype=np.uint16)
    index_of[permutations @ place_values] = np.arange(order)
    table = np.empty((order, order), dtype=np.uint16)
    for a, images in enumerate(permutations):  # one row at a time: all rows at once would need 1.8 GB for S7
        table[a] = index_of[images[permutations] @ place_values]
    return table


def _algebra(table: np.ndarray) -> Algebra:
    """Return an algebra with a compact table, which is read-only because a cache shares it."""
    compact = np.ascontiguousarray(table, dtype=np.uint8 if len(table) <= 256 else np.uint16)
    compact.setflags(write=False)
    return Algebra(compact)
