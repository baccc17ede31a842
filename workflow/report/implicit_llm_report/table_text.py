"""Tables as text: CSV with everything, LaTeX for papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from implicit_llm_report.frame import Group, Spread

LONG = 60  # rows of a table that needs the package longtable
SYMBOLS = {">": "$>$", "<": "$<$", "≤": r"$\leq$", "×": r"$\times$"}
Row = Mapping[str, Any]


def files_of(
    tables: Sequence[tuple[str, Sequence[Row]]],
    names: Mapping[str, str],
    values: Mapping[str, str],
    *,
    by: str | None = None,
    form: str = ".3f",
    more: Sequence[Row] = (),
) -> dict[str, str]:
    """Tables with their titles as one CSV file, with the rows `more` at its end, and as LaTeX for the package booktabs.

    Of a row LaTeX has the columns `names`, then the numbers `values`, each by column with its head; a number with a
    mean shows its mean and range over seeds. `by`: the column whose values stand side by side.
    """
    rows = [*(row for _, table in tables for row in table), *more]
    csv = pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")
    return {
        "csv": csv,
        "tex": "\n".join(_latex(title, mine, names, values, by, form) for title, mine in tables),
    }


def _latex(
    title: str, rows: Sequence[Row], names: Mapping[str, str], values: Mapping[str, str], by: str | None, form: str
) -> str:
    cells = [[*(row.get(key) for key in names), *(_latex_cell(row, key, form) for key in values)] for row in rows]
    table = pd.DataFrame(cells, columns=[*names.values(), *values.values()], dtype=object).fillna("")
    if by is not None and rows:
        (value,), index = values.values(), list(names.values())
        beside = list(dict.fromkeys(row[by] for row in rows))
        table = table.assign(by=[row[by] for row in rows]).pivot_table(
            value, index, "by", aggfunc="first", sort=False, fill_value=""
        )
        is_length = all(isinstance(head, int) for head in beside)
        table = table[sorted(beside)].add_prefix(f"{by} ") if is_length else table
        table = table.reset_index()
    text = table.to_latex(index=False, escape=True, float_format="{:g}".format, longtable=len(rows) > LONG)
    for symbol, command in SYMBOLS.items():
        text = text.replace(symbol, command)
    return f"% {title.replace('×', 'x')}: mean over seeds (range)\n{text}"


def _latex_cell(row: Mapping[str, Any], key: str, form: str) -> object:
    prefix = key and f"{key}_"
    if f"{prefix}mean" not in row:
        return row.get(key)
    mean, low, high = (row[f"{prefix}{part}"] for part in ("mean", "low", "high"))
    if mean is None:
        return "missing"
    return f"{mean:{form}}" + (f" ({low:{form}}--{high:{form}})" if low < high else "")


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
