"""Natural sort order of names with numbers."""

from __future__ import annotations

import re


def natural(name: str) -> list[tuple[int, str]]:
    """Sorting key of a name with numbers in it: `layers4` before `layers16`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]
