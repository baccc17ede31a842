"""Sizes of the groups of the word problems, for the vocabulary; their tables belong to implicit_llm_data.groups."""

from __future__ import annotations

import math
import re

from implicit_llm_contracts.runs.errors import ConfigError

MONOID_ORDER = {"none": 1, "aperiodic": 4}
MAX_VOCABULARY = 1 << 16  # tokens are stored as uint16 at most


def group_order(group: str, where: str) -> int:
    """Number of elements of "S5", "A5", "Z60", ... Raises: ConfigError that names the valid forms, after `where`."""
    match = re.fullmatch(r"([SAZ])([1-9][0-9]*)", group)
    if match is None:
        raise ConfigError(f"{where}: unknown group {group!r}; use S<n>, A<n> or Z<n>, for example A5")
    family, degree = match[1], int(match[2])
    if family == "Z":
        return degree
    if degree > 20:  # far beyond any table; keeps the factorial small
        raise ConfigError(f"{where}: group {group} is too large; choose a smaller degree, for example {family}5")
    order = math.factorial(degree)
    return max(1, order // 2) if family == "A" else order


def vocabulary_size(group: str, monoid: str, where: str) -> int:
    """Number of tokens of a word problem. Raises: ConfigError when the tokens do not fit their storage type."""
    size = group_order(group, where) * MONOID_ORDER[monoid]
    if size > MAX_VOCABULARY:
        raise ConfigError(
            f"{where}: {group} with monoid {monoid!r} has {size} tokens, at most {MAX_VOCABULARY} fit uint16; "
            "choose a smaller group"
        )
    return size
