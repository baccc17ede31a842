"""The tasks that models are trained on: the one table that recipes, training, rules and model cards read.

A task is a kind of data. A new one is an entry here, a module with its data sets in the driver's
`experiment_files/data_sets`, and one in `implicit_llm_data/stages` for each kind of job that makes its data.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from implicit_llm_contracts.config.registry import Registry
from implicit_llm_contracts.runs import UserError

WORD_PROBLEM, CATBABI, LANGUAGE_MODEL = "word_problem", "catbabi", "language_model"
LAST_TOKENS = 10  # of a word problem: those whose accuracy the published experiments give


@dataclass(frozen=True)
class TaskKind:
    """`labels`: how the labels of its data are stored, which decides what training may do with them; None allows both.

    `accuracy`: what accuracy means, its name and how many positions at the end of a sequence count (None: all).
    `learns` and `limits`: sentences of model cards; {group} is that of a word problem.
    `protocol`: evaluation settings with which a trained model is saved, those of the protocol of all results.
    """

    labels: Literal["aligned", "next_token"] | None
    accuracy: tuple[str, int | None] | None
    learns: str
    limits: str
    protocol: Mapping[str, Any] = field(default_factory=dict)


_BUILTIN = {
    WORD_PROBLEM: TaskKind(
        labels=None,  # the published script shifts its aligned labels
        accuracy=("accuracy_last10", LAST_TOKENS),
        learns="a word problem: each token is an element of {group}, and the answer at each position is the product of "
        "all elements so far",
        limits="It knows one task and no language: tokens are numbers of group elements.",
        protocol={"eval_block_len": 8, "eval_max_iter": 128},
    ),
    CATBABI: TaskKind(
        labels="aligned",
        accuracy=("accuracy", None),
        learns="CatbAbI, bAbI stories one after another, with questions",
        limits="It knows the small world and vocabulary of the bAbI stories, and no other language.",
        protocol={"eval_block_len": 8, "eval_max_iter": 200},
    ),
    LANGUAGE_MODEL: TaskKind(
        labels="next_token",
        accuracy=None,
        learns="text, to predict the next token",
        limits="A base model: it continues text, was tuned neither to follow instructions nor for safety, and repeats "
        "what is wrong or harmful in its training text. It was not tested for bias.",
        protocol={"eval_block_len": 256},
    ),
}
TASKS: Registry[TaskKind] = Registry("task", _BUILTIN)

# Groups of word problems. The library makes the tables of the built-in ones; of others it is given them.
BUILTIN_GROUP = re.compile(r"([SAZ])([1-9][0-9]*)")
GROUP_ORDERS: dict[str, int] = {}  # elements of the others
MONOID_ORDERS = {"none": 1, "aperiodic": 4}
# A table of 64 MiB in uint16: S7 still fits (5,040 elements), and no table takes more than about a second to build.
MAX_ORDER = 5792
LARGEST_N = {"S": 7, "A": 7, "Z": MAX_ORDER}
VALID_GROUPS = f"S1 to S{LARGEST_N['S']}, A1 to A{LARGEST_N['A']}, Z1 to Z{LARGEST_N['Z']}"


class UnknownGroup(UserError, ValueError):
    """A name is no group whose table can be built."""


def group_order(name: str) -> int:
    """Elements of "S5", "A5", "Z60" or a plugin's group. Raises: UnknownGroup, naming the valid forms."""
    if name in GROUP_ORDERS:
        return GROUP_ORDERS[name]
    match = BUILTIN_GROUP.fullmatch(name[:6])  # more digits are too many in any case
    family, size = (match[1], int(match[2])) if match else ("", 0)
    if not 0 < size <= LARGEST_N.get(family, 0):
        raise UnknownGroup(f"group: {name[:20]!r} is no group, built in or of a plugin; use one of {VALID_GROUPS}")
    return size if family == "Z" else max(1, math.factorial(size) // (2 if family == "A" else 1))


def product_order(group: str, monoid: str) -> int:
    """Elements of the direct product. Raises: UnknownGroup, also for a product whose table would be too large."""
    order = group_order(group) * MONOID_ORDERS[monoid]
    if order > MAX_ORDER:
        raise UnknownGroup(
            f"group: {group} x {monoid} has {order} elements and at most {MAX_ORDER} fit a table; "
            "use a smaller group or monoid: none"
        )
    return order
