"""Numbers, shares and times as people read them in a narrow column."""

from __future__ import annotations

MISSING = "-"
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def time_text(seconds: float | None) -> str:
    """ "40 s", "12 min", "3.4 h", "5 d"."""
    if seconds is None:
        return MISSING
    for unit, length_s in _UNITS:
        number = seconds / length_s
        if number >= 1.5 or unit == "s":
            digits = 1 if unit in ("d", "h") and number < 9.95 else 0
            return f"{max(number, 0):.{digits}f} {unit}"
    return MISSING


def number_text(value: float | None, digits: int = 4) -> str:
    """With so many significant digits; whole numbers of no more than seven in full, thousands apart."""
    if value is None:
        return MISSING
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e7 else f"{value:.{digits}g}"


def share_text(share: float | None) -> str:
    """In per cent; a small one with a digit more."""
    if share is None:
        return MISSING
    return f"{100 * share:.1f} %" if 0 < share < 0.095 else f"{100 * share:.0f} %"
