"""Make tables for the page, CSV and LaTeX, with models as rows, and lengths, tasks or metrics as columns.

Their numbers come from the frame (inputs/frame.py). registry.yaml defines the rows and columns of each table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from implicit_llm_contracts.runs.fetched_files import is_pinned
from implicit_llm_report.inputs.frame import (
    COLUMNS,
    COSTS,
    EXTRAS,
    PERPLEXITY,
    Group,
    Metrics,
    Spread,
    count_words,
    groups,
    in_order,
    kind_of,
    roles_of,
    seeds_words,
    shares_of,
    short_count,
)
from implicit_llm_report.inputs.published import Published
from implicit_llm_report.registry import Entry

MOST_COLUMNS = 12  # a table with more columns is transposed
LONG = 60  # a table with more rows needs the package longtable
SYMBOLS = {">": "$>$", "<": "$<$", "×": r"$\times$"}
# Columns of the frame that describe a single record, or that a CSV file contains in another form.
NOT_WRITTEN = (
    "kind", "role", "seed", "is_implicit", "solver", "source", "sweep", "record", "metric", "value", "detail",
    "validation_loss",
)  # fmt: skip
ABOUT = [column for column in COLUMNS if column not in NOT_WRITTEN]
TASK_NAMES = (  # tasks of CatbAbI: Weston et al. 2015, Table 1
    "single supporting fact", "two supporting facts", "three supporting facts", "two argument relations",
    "three argument relations", "yes/no questions", "counting", "lists/sets", "simple negation",
    "indefinite knowledge", "basic coreference", "conjunction", "compound coreference", "time reasoning",
    "basic deduction", "basic induction", "positional reasoning", "size reasoning", "path finding",
    "agent's motivations",
)  # fmt: skip
COUNTS = {
    "num_parameters": ("parameter", ""), "num_samples": ("sample", ""), "num_tokens": ("token", " read"),
    "num_documents": ("document", ""),
}  # fmt: skip
PROTOCOL_WORDS = {"windowed": "every row from an empty state", "carried": "state carried over all stories"}


@dataclass(frozen=True)
class Cell:
    """A metric of a group of rows, with its spread over the column `over`.

    `group` is None if the frame has no such rows, not even for a missing result.
    """

    group: Group | None
    metric: str
    over: str = "seed"

    @property
    def spread(self) -> Spread:
        return Spread() if self.group is None else self.group.spread(self.metric, self.over)


@dataclass(frozen=True)
class Head:
    """The heading of a row or column: a title and notes; `is_strong` marks the mode that represents its model."""

    title: str
    notes: Sequence[str] = ()
    is_strong: bool = False


@dataclass(frozen=True)
class Table:
    """A table. `cells`: by row and column. `side`: the headings of the rows. `top`: the headings of the columns."""

    title: str
    side: Sequence[Head]
    top: Sequence[Head]
    cells: Sequence[Sequence[Cell]]
    trained: frozenset[str] = frozenset()  # titles of the columns for lengths used in training
    foot: str | None = None  # metric of the last row, which describes the test and not a model

    @property
    def roles(self) -> tuple[str, ...]:
        return roles_of(cell.group for row in self.cells for cell in row if cell.group is not None)

    def readable(self) -> Table:
        """Return the table, transposed if it has more than MOST_COLUMNS columns."""
        if len(self.top) <= MOST_COLUMNS:
            return self
        return replace(self, side=self.top, top=self.side, cells=list(zip(*self.cells, strict=True)))


def tables_of(entry: Entry, rows: pd.DataFrame) -> list[Table]:
    """Return a table of `rows` for each combination of values in the columns `entry.by`; without `by`, at most one."""
    tests = groups(rows, entry.by) if entry.by else [Group(rows)] if len(rows) else []
    return [_table(entry, test) for test in tests]


def _table(entry: Entry, test: Group) -> Table:
    models, metrics = groups(test.rows, entry.rows), list(entry.metrics)
    first = metrics[0] if metrics else ""  # "": each cell has its own metric
    side = [_head(model, first or _metric(model)) for model in models]
    if entry.across is None:
        cells = [[Cell(model, metric, entry.over) for metric in metrics] for model in models]
        return Table(title_of(test, entry.by), side, [Head(head) for head in entry.metrics.values()], cells)
    values = in_order(test.rows[entry.across].dropna())
    rows = [list(map(model.cells(entry.across).get, values)) for model in models]
    found = [[Cell(group, first or _metric(group), entry.over) for group in row] for row in rows]
    top = [Head(_words(entry.across, value)) for value in values]
    if entry.foot:
        side.append(Head("chance: the best constant answer"))
        rows_of_test = test.rows[(test.rows["metric"] == entry.foot) & test.rows["value"].notna()]
        measured = Group(rows_of_test).cells(entry.across)
        found.append([Cell(measured.get(value), entry.foot, "record") for value in values])
    trained = frozenset(_words("length", length) for length in test.rows["train_length"].dropna())
    return Table(title_of(test, entry.by), side, top, found, trained, entry.foot)


def _metric(group: Group | None) -> str:
    return "" if group is None else next(metric for metric in group.metrics if metric not in COSTS)


def title_of(test: Group, by: Sequence[str]) -> str:
    """Return what the rows of a table or panel share in the columns `by`, such as "S5, 20 % hard, length 128"."""
    return ", ".join(words for column in by if (words := _words(column, getattr(test, column), test)))


def _words(column: str, value: Any, test: Group | None = None) -> str:
    if column == "group" and test is not None and test.monoid not in (None, "none"):
        return f"{value} × monoid"
    if column == "hard_fraction" and value is not None:
        return " / ".join(f"{100 * share:g}" for share in shares_of(value)) + " % hard"  # in training, equal parts
    if value is None or column == "monoid" or pd.isna(value):
        return ""
    if column == "task" and str(value).isdigit():
        return f"{value}. {TASK_NAMES[int(value) - 1]}"
    forms = {
        "length": f"length {value}",
        "protocol": PROTOCOL_WORDS.get(value, value),
        "swept": f"by {SWEPT.get(value, value)}",
    }
    return str(forms.get(column, f"{value:g}" if isinstance(value, float) else value))


SWEPT = {"eval_max_iter": "iterations allowed", "eval_tol": "tolerance"}


def _head(model: Group, metric: str) -> Head:
    """Return the heading of a model in a mode, with notes such as the number of seeds and of missing seeds."""
    mode = f"{model.base or model.mode or ''}" + (f" against {model.against}" if model.against else "")
    mode += f", converged by {model.eval_stop}" if model.eval_stop and not model.is_headline else ""
    by_seed = model.by_seed(metric)
    notes = [
        mode,
        None if set(by_seed) == {None} else seeds_words(Spread.of(by_seed.values())),
        *(
            count_words(count, noun) + rest
            for name, (noun, rest) in COUNTS.items()
            if (count := getattr(model, name)) is not None
        ),
        None if model.train_tokens is None else f"{short_count(model.train_tokens)} training tokens",
        None if model.is_hard is None else "hard tokens" if model.is_hard else "identity tokens",
        None if model.source is None else source_words(model.source),
    ]
    return Head(model.name, [note for note in notes if note], bool(model.is_headline))


def source_words(source: Mapping[str, Any]) -> str:
    """Return a text such as "EleutherAI/pythia-70m at a39f36b10000", with a note if its revision is no commit."""
    name = str(source.get("hub") or source.get("path") or "trained elsewhere")
    commit = f" at {source['commit'][:12]}" if source.get("commit") else ""
    is_fixed = "hub" not in source or is_pinned(source.get("revision"), source.get("commit") or "")
    return name + commit + ("" if is_fixed else ", not pinned")


def files_of(tables: Sequence[Table], published: Published, metrics: Metrics) -> dict[str, str]:
    """Return the texts of two files: "csv" with all numbers and their ranges, and "tex" with the tables in LaTeX."""
    cells = [
        cell
        for table in tables
        for row in table.cells
        for cell in row
        if cell.group is not None and cell.metric != table.foot
    ]
    first = {id(cell.group): cell for cell in reversed(cells)}  # the first cell of each group of rows
    rows = [_csv_row(cell, published, metrics) for cell in cells if cell is first[id(cell.group)]]
    frame = pd.DataFrame(rows, dtype=object)
    about = [column for column in ABOUT if column in frame and frame[column].isna().all()]
    return {"csv": csv_of(frame.drop(columns=about)), "tex": "\n".join(_latex(table) for table in tables)}


def csv_of(frame: pd.DataFrame) -> str:
    return frame.to_csv(index=False, lineterminator="\n")


def _csv_row(cell: Cell, published: Published, metrics: Metrics) -> dict[str, object]:
    """Return all numbers of the cell's group, and the value of the cell's metric for every seed."""
    group, first = cell.group, cell.metric
    assert group is not None
    known = [metric for metric in (*metrics.get(group.kind, ()), *COSTS, *EXTRAS) if metric in group.metrics]
    numbers = {metric: group.spread(metric, cell.over) for metric in dict.fromkeys((first, *known))}
    entry, seeds = published.beside(group, first), group.by_seed(first)
    spread, records = Spread.of(seeds.values()), numbers[first]
    counts = {"num_seeds": None if set(seeds) == {None} else len(spread.values), "num_missing": spread.num_missing}
    reached = {"num_records": len(records.values) + records.num_missing, "num_reached": len(records.values)}
    by_seed = "; ".join(f"{s}: {'missing' if v is None else f'{v:.6g}'}" for s, v in seeds.items())
    about = ((column, getattr(group, column)) for column in ABOUT)
    return {
        "model": kind_of(group),
        **{
            column: " ".join(map("{:g}".format, value)) if isinstance(value, tuple) else value
            for column, value in about
        },
        **counts,
        **(reached if cell.over == "record" else {}),
        "metric": first,
        **{f"{m}_{part}": rounded(getattr(s, part)) for m, s in numbers.items() for part in ("mean", "low", "high")},
        "by_seed": by_seed if len(seeds) > 1 else None,
        "published": entry and entry.value,
        "published_mark": entry and entry.mark,
    }


def _latex(table: Table) -> str:
    shown = table.readable()
    names = [", ".join((head.title, *head.notes[:1])) for head in (*shown.side, *shown.top)]
    rows = [[name, *map(_latex_cell, row)] for name, row in zip(names, shown.cells, strict=False)]
    return latex_of(table.title, pd.DataFrame(rows, columns=["", *names[len(shown.side) :]], dtype=object))


def latex_of(title: str, frame: pd.DataFrame) -> str:
    text = frame.to_latex(index=False, escape=True, float_format="{:g}".format, longtable=len(frame) > LONG)
    for symbol, command in SYMBOLS.items():
        text = text.replace(symbol, command)
    return f"% {title.replace('×', 'x')}: mean over seeds (range)\n{text}"


def _latex_cell(cell: Cell) -> str:
    mean, low, high = cell.spread.mean, cell.spread.low, cell.spread.high
    if mean is None or low is None or high is None:
        return "" if cell.group is None else "missing"
    form = ".4g" if cell.metric == PERPLEXITY else ".3f" if 1e-3 <= abs(mean) < 10 or not mean else ".3g"
    return f"{mean:{form}}" + (f" ({low:{form}}--{high:{form}})" if low < high else "")


def rounded(value: float | None) -> float | None:
    """Round to six significant digits."""
    return None if value is None else float(f"{value:.6g}")
