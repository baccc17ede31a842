"""Define types of configured values with the ranges that `fill` accepts; experiment files and jobs share them."""

import re
from typing import Annotated

from implicit_llm_contracts.config.fill import Only

_MAX_LENGTH = _MAX_VOCABULARY = 1 << 16  # ids of tokens must fit into uint16
_MAX_BATCH, _MAX_ITERATIONS, _MAX_STEPS = 1 << 20, 1_000_000, 1_000_000_000  # more than any machine can run


def matching(pattern: str, allowed: str) -> Only:
    """Return a rule that accepts a text if `pattern` matches all of it; messages describe the rule by `allowed`."""
    return Only(re.compile(pattern).fullmatch, allowed)


def integer(first: int, last: int | None = None) -> Only:
    """Return a rule that accepts an integer from `first` to `last`; None means no limit."""
    if last is None:
        return Only(lambda value: value >= first, f"an integer of at least {first}")
    return Only(lambda value: first <= value <= last, f"an integer from {first} to {last}")


Text = Annotated[str, Only(bool, "a text that is not empty")]
# A name becomes the name of a folder, which has at most 255 bytes together with its suffixes.
_NOT_WORK = Only(lambda name: name != "work", "another name, because a job works in a folder called work")
Name = Annotated[
    str,
    matching(r"[a-z][a-z0-9-]{0,199}", "lower-case letters, digits and hyphens, beginning with a letter, at most 200"),
    _NOT_WORK,
]
RunName = Annotated[
    str,
    matching(
        r"[a-z][a-z0-9.-]{0,199}", "lower-case letters, digits, hyphens and dots, beginning with a letter, at most 200"
    ),
    _NOT_WORK,
]
ModeName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}",
        "letters, digits, spaces, dots, hyphens and underscores, beginning with a letter or digit, at most 100",
    ),
]
Digest = Annotated[str, matching(r"[0-9a-f]{64}", "a sha256 in 64 hexadecimal digits")]
COMMIT = matching(r"[0-9a-f]{40}", "a commit in 40 lower-case hexadecimal digits")
Commit = Annotated[str, COMMIT]
Count = Annotated[int, integer(1)]
BatchSize = Annotated[int, integer(1, _MAX_BATCH)]
Iterations = Annotated[int, integer(1, _MAX_ITERATIONS)]
Steps = Annotated[int, integer(1, _MAX_STEPS)]
Number = Annotated[int, integer(0)]
Length = Annotated[int, integer(1, _MAX_LENGTH)]
VocabSize = Annotated[int, integer(2, _MAX_VOCABULARY)]
Seed = Annotated[int, integer(0, (1 << 32) - 1)]
Fraction = Annotated[float, Only(lambda value: 0 <= value <= 1, "a number from 0 to 1")]
BelowOne = Annotated[float, Only(lambda value: 0 <= value < 1, "a number from 0 to below 1")]
Share = Annotated[float, Only(lambda value: 0 < value < 1, "a number above 0 and below 1")]
DISTINCT = Only(lambda items: items and len({*items}) == len(items), "a list with at least one entry, none twice")
Names = Annotated[tuple[Text, ...], DISTINCT]
SOME = Only(bool, "at least one entry")
