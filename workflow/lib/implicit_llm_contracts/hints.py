"""Find the valid name nearest to a misspelt one, and order names that contain numbers."""

import difflib
import re
from collections.abc import Iterable

SHOWN_NAMES = 20


def nearest(name: str, valid: Iterable[str], otherwise: str = "") -> str:
    """Return a question with the closest valid name; if none is close, `otherwise` or the first valid names."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1)
    if close or otherwise:
        return f"did you mean {close[0]!r}?" if close else otherwise
    more = f" and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else ""
    return f"valid: {', '.join(names[:SHOWN_NAMES]) or 'none'}{more}"


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sorting key for names that contain numbers, so that `layers4` comes before `layers16`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]
