"""Tables as text: CSV with everything, LaTeX for papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

from implicit_llm_report.frame import Group
from implicit_llm_report.results import Spread


def csv_of(rows: Iterable[Mapping[str, object]], columns: Sequence[str] | None = None) -> str:
    """CSV of rows by column; None is an empty field. `columns` stand there even without rows."""
    return pd.DataFrame(list(rows), columns=columns, dtype=object).to_csv(index=False, lineterminator="\n")


def latex_of(
    comment: str, head: Sequence[str], rows: Iterable[Sequence[str]], columns: str, foot: Sequence[str] = ()
) -> str:
    """A table of cells that are LaTeX already, for the package booktabs; `columns` are their places, as "llr".

    The lines `foot` stand below the rows.
    """
    cells = pd.DataFrame(list(rows), columns=range(len(head))).set_axis(list(head), axis=1)
    table = cells.to_latex(index=False, escape=False, column_format=columns)
    end = "\\bottomrule"
    return f"% {comment.replace('×', 'x')}\n" + table.replace(end, "\n".join([*foot, end]))


def fields(group: Group, *names: str) -> dict[str, object]:
    """What a group is of, by column; `model` is its kind in words."""
    known = {"model": "implicit" if group.is_implicit else "explicit", "solver": group.phase_label}
    return {name: known[name] if name in known else getattr(group, name) for name in names}


def spread_fields(names: Iterable[str], spread_of: Callable[[str], Spread]) -> dict[str, float | None]:
    """By column the mean, the lowest and the highest of each of the names."""
    parts = ("mean", "low", "high")
    return {f"{name}_{part}": rounded(getattr(spread_of(name), part)) for name in names for part in parts}


def renamed(columns: Mapping[str, object], name: str, new: str) -> dict[str, object]:
    """The columns with another name at their front."""
    return {new + column.removeprefix(name): value for column, value in columns.items()}


def rounded(value: float | None) -> float | None:
    """Six significant digits."""
    return None if value is None else float(f"{value:.6g}")


def latex_spread(spread: Spread, form: str = ".3f") -> str:
    """ "8.350 (8.300--8.400)"; a missing number says so."""
    if spread.mean is None:
        return "missing"
    low_high = f" ({spread.low:{form}}--{spread.high:{form}})" if len(spread.values) > 1 else ""
    return f"{spread.mean:{form}}{low_high}"


def in_percent(spread: Spread) -> Spread:
    """A hundred times each number."""
    return Spread(tuple(100 * value for value in spread.values), spread.num_missing)


def escape(text: str) -> str:
    """Text for LaTeX."""
    return "".join("\\" + letter if letter in "_%&#$" else letter for letter in text)
