"""Format tables without lines, and short texts of numbers, times and sizes for narrow columns."""

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

MISSING = "-"
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def plain_table(
    *headings: str,
    rows: Iterable[Iterable[RenderableType]] = (),
    whole: Collection[str] = (),
    right: Collection[str] = (),
    **options: Any,
) -> Table:
    """Return a table without lines, whose strings are shown literally, without markup.

    `whole`: the columns whose cells are not wrapped. `right`: the columns that are aligned to the right.
    """
    table = Table(box=None, pad_edge=False, **options)
    for heading in headings:
        justify: Any = "right" if heading in right else "left"
        table.add_column(Text(heading), overflow="fold", no_wrap=heading in whole, justify=justify)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def first_line(error: Exception) -> str:
    """Return at most 300 characters of the first line of an exception's message; without a message, its class name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def time_text(seconds: float | None) -> str:
    """Return a time in a fitting unit, such as "40 s", "12 min", "3.4 h" or "12 d"; "-" for None."""
    if seconds is None:
        return MISSING
    unit, length_s = next((item for item in _UNITS if seconds >= 1.5 * item[1]), _UNITS[-1])
    number = max(seconds / length_s, 0)
    return f"{number:.{1 if unit in ('d', 'h') and number < 9.95 else 0}f} {unit}"


def number_text(value: float | None, digits: int = 4) -> str:
    """Return a number with up to `digits` significant digits, but all digits of an integer part below 1e7.

    Return "-" for None.
    """
    if value is None:
        return MISSING
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e7 else f"{value:.{digits}g}"


def spread_text(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Return the mean of `values` (one for each seed) as a text by `shown`; "-" if there are none.

    For several seeds, the text also has the lowest value, the highest value and the number of seeds.
    """
    if not values:
        return MISSING
    mean = shown(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ({shown(min(values))} to {shown(max(values))}, {len(values)} seeds)"


def share_text(share: float | None) -> str:
    """Return a share in percent, with one decimal above 0 and below 9.5 %; "-" for None."""
    if share is None:
        return MISSING
    return f"{100 * share:.1f} %" if 0 < share < 0.095 else f"{100 * share:.0f} %"


def size_text(size: int) -> str:
    """Return a number of bytes in MiB, such as "12.3 MiB"."""
    return f"{size / 2**20:,.1f} MiB"
