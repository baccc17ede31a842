"""What a word-problem model scores without tracking any state: the share of the most frequent answer at each position.

A token's group part is uniform over the whole group with probability h (`hard_fraction`) and the identity otherwise,
so after t tokens the product is the identity with probability (1 - h)^t + (1 - (1 - h)^t) / |G|: above 1 / |G| when the
sequence is short or h small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from implicit_llm_data.groups import load_group, load_monoid


def chance_per_position(group: str, monoid: str, hard_fraction: float | Sequence[float], length: int) -> np.ndarray:
    """Share of the most frequent target at each position, shape (length,).

    Several hard fractions mean samples mixed from them in equal shares. The monoid part of a token is uniform.
    Raises: UnknownGroup.
    """
    fractions = np.atleast_1d(np.asarray(hard_fraction, dtype=np.float64))
    untouched = (1.0 - fractions[:, None]) ** np.arange(1, length + 1)
    identity = (untouched + (1.0 - untouched) / load_group(group).order).mean(axis=0)
    return identity * _most_frequent_product(load_monoid(monoid).table, length)


def _most_frequent_product(table: np.ndarray, length: int) -> np.ndarray:
    """Share of the most frequent product of t uniform elements, for t = 1 .. length."""
    order = len(table)
    share = np.full(order, 1.0 / order)
    largest = np.empty(length)
    for position in range(length):
        largest[position] = share.max()
        following = np.zeros(order)
        np.add.at(following, table, share[:, None] / order)
        share = following
    return largest
