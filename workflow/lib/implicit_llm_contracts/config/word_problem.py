"""Define the groups of word problems by name, and the settings of the job that makes a data set of word problems."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.fill import UNLESS_DEFAULT
from implicit_llm_contracts.config.registry import Declared, Registry
from implicit_llm_contracts.config.values import SOME, Count, Fraction, Number
from implicit_llm_contracts.errors import UserError

BUILTIN_GROUP = re.compile(r"([SAZ])([1-9][0-9]*)")
GROUPS: Registry[Any] = Registry("group", {}, BUILTIN_GROUP.fullmatch)  # only the groups of plugins
MONOID_ORDERS = {"none": 1, "aperiodic": 4}
# The largest table has 64 MiB in uint16: S7 fits (5,040 elements), and every table is built in about a second or less.
MAX_ORDER = 5792
LARGEST_N = {"S": 7, "A": 7, "Z": MAX_ORDER}
VALID_GROUPS = f"S1 to S{LARGEST_N['S']}, A1 to A{LARGEST_N['A']}, Z1 to Z{LARGEST_N['Z']}"


class UnknownGroup(UserError, ValueError):
    """The name is not that of a group whose multiplication table can be built."""


def group_order(name: str) -> int:
    """Return the number of elements of "S5", "A5", "Z60" or a plugin's group.

    Raises: UnknownGroup, which names the valid forms.
    """
    if GROUPS.knows(name):
        return name.entries[GROUPS.what] if isinstance(name, Declared) else GROUPS[name].order
    match = BUILTIN_GROUP.fullmatch(name[:6])  # a longer name is refused, because its number is too large
    family, size = (match[1], int(match[2])) if match else ("", 0)
    if not 0 < size <= LARGEST_N.get(family, 0):
        raise UnknownGroup(f"group: {name[:20]!r} is no group, built in or of a plugin; use one of {VALID_GROUPS}")
    return size if family == "Z" else max(1, math.factorial(size) // (2 if family == "A" else 1))


def product_order(group: str, monoid: str) -> int:
    """Return the number of elements of group x monoid. Raises: UnknownGroup, also if the table would be too large."""
    order = group_order(group) * MONOID_ORDERS[monoid]
    if order > MAX_ORDER:
        raise UnknownGroup(
            f"group: {group} x {monoid} has {order} elements and at most {MAX_ORDER} fit a table; "
            "use a smaller group or monoid: none"
        )
    return order


@dataclass(frozen=True)
class WordProblemConfig:
    """The training set or one test set of a word problem. Every field is part of its identity.

    group: S<n>, A<n>, Z<n> or a plugin's group. hard_fraction: the probability that a token is drawn from the whole
    group; otherwise it is the identity. With n values, sample i uses the value at index i modulo n.
    length: tokens per sample. shard_samples: samples per shard; the last shard may have fewer. seed: training and
    test set of one seed come from separate random streams, but very short sequences can be equal by chance. file,
    sha256: a file of the authors' generator and its digest; the file's first samples replace the random ones.
    Raises: UnknownGroup.
    """

    group: str
    monoid: Literal["none", "aperiodic"]
    hard_fraction: Fraction | Annotated[tuple[Fraction, ...], SOME]
    length: Count
    num_samples: Count
    split: Literal["train", "test"]
    seed: Number
    shard_samples: Count
    kind: Literal["word_problem"] = "word_problem"
    file: Annotated[str | None, UNLESS_DEFAULT] = None
    sha256: Annotated[str | None, UNLESS_DEFAULT] = None

    def __post_init__(self) -> None:
        product_order(self.group, self.monoid)  # raises UnknownGroup

    @property
    def hard_fractions(self) -> tuple[float, ...]:
        """The hard fractions as a tuple, also if there is only one."""
        return self.hard_fraction if isinstance(self.hard_fraction, tuple) else (self.hard_fraction,)

    @property
    def num_shards(self) -> int:
        return -(-self.num_samples // self.shard_samples)
