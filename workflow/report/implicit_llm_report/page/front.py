"""Make the first page: verdicts, at most five figures with few lines, one compact table for each test, and links."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

import pandas as pd

from implicit_llm_report.config import MOST_FIGURES
from implicit_llm_report.figures.svg import Drawn, drawn
from implicit_llm_report.inputs.frame import SHARES, Group, groups, headlines
from implicit_llm_report.inputs.sources import Given
from implicit_llm_report.registry import registry
from implicit_llm_report.sections import figure_of
from implicit_llm_report.tables import Table, tables_of

# The first page shows the first five that have data, in this order; the first one is the most prominent.
FIGURES = (
    "accuracy-by-length", "loss-by-flops", "perplexity-by-length", "minimum-layers", "accuracy-by-position",
    "jacobian", "accuracy-by-babi-task", "perplexity-by-position",
)  # fmt: skip
FEW_LINES = frozenset({"minimum-layers", "jacobian"})  # show all models: they have one line per kind, or none
MOST_LINES, MOST_PANELS, MOST_ROWS = 6, 3, 12
TABLES = ("accuracy", "perplexity", "downstream", "babi")
TEST = ("kind", "group", "monoid", "data_set")


@dataclass(frozen=True)
class FrontTable:
    """A table in the mode that represents each model; the page of all numbers has `num_left_out` more rows.

    not_run: titles of the planned models that have no result.
    """

    name: str
    table: Table
    unit: str
    num_left_out: int
    not_run: Sequence[str]


def front_figures(given: Given) -> list[Drawn]:
    config, few = given.config.front, with_few_models(given)
    found = (
        figure
        for name in config.figures or (*FIGURES, *given.kinds.figures)
        if (figure := figure_of(given if name in FEW_LINES else few, name)) is not None
    )
    return [drawn(replace(one, panels=one.panels[:MOST_PANELS])) for one, _ in zip(found, range(MOST_FIGURES))]  # noqa: B905


def with_few_models(given: Given) -> Given:
    """Return the results of the models that the configuration names, or of the first six of each test."""
    rows, patterns = given.measured, given.config.front.models
    if patterns:
        shown = {name for name in rows["name"].unique() if any(fnmatch(str(name), one) for one in patterns)}
    else:
        shown = {name for test in groups(headlines(rows), TEST) for name in _first(test)}
    kept = rows[rows["name"].isin(shown)]
    runs = set(kept["run"])
    return replace(given, measured=kept, training=tuple(one for one in given.training if one.run in runs))


def _first(test: Group) -> list[str]:
    """Return the first models of a test, if possible as many implicit as explicit ones."""
    by_kind = [
        list(dict.fromkeys(test.rows[test.rows["is_implicit"].astype(bool) == is_implicit]["name"]))
        for is_implicit in (True, False)
    ]
    half = MOST_LINES // 2
    implicit, explicit = by_kind
    return [*implicit[: max(half, MOST_LINES - len(explicit))], *explicit[: max(half, MOST_LINES - len(implicit))]]


def front_tables(rows_of: dict[str, pd.DataFrame], patterns: Sequence[str] = ()) -> Iterator[FrontTable]:
    """Yield a table for each test: the models that match a pattern, and the first others that were measured."""
    for name in TABLES:
        entry = registry().tables[name]
        for table in tables_of(entry, headlines(rows_of[name])):
            top = 1 if name == "babi" else None  # a figure shows its tasks
            cells = [row[:top] for row in table.cells]
            has_any = [any(cell.spread.mean is not None for cell in row) for row in cells]
            kept = [index for index, is_there in enumerate(has_any) if is_there]
            not_run = [head.title for head, is_there in zip(table.side, has_any, strict=True) if not is_there]
            feet = [index for index in kept if table.foot and index == len(cells) - 1]
            named = {index for index in kept if any(fnmatch(table.side[index].title, one) for one in patterns)}
            first = sorted((index for index in kept if index not in feet), key=lambda index: index not in named)
            shown = [*sorted(first[: MOST_ROWS - len(feet)]), *feet]
            small = replace(
                table,
                side=[table.side[index] for index in shown],
                top=table.top[:top],
                cells=[cells[index] for index in shown],
            )
            metric = small.cells[0][0].metric if small.cells else ""
            yield FrontTable(name, small, "%" if metric in SHARES else "", len(kept) - len(shown), not_run)


def facts_of(given: Given) -> Sequence[str]:
    """Return the origin of the numbers: devices, hours of training, commits."""
    sources = list(given.sources.values())
    devices = dict.fromkeys(str(one.provenance["device"]) for one in sources if one.provenance.get("device"))
    trained = [one for one in sources if one.manifest.stage == "train"]
    busy_s = sum(attempt["busy_s"] for one in trained for attempt in one.provenance.get("attempts") or [])
    commits = [(one.provenance.get("git") or {}).get("commit") for one in sources]
    known = list(dict.fromkeys(commit[:10] for commit in commits if commit))
    words = [", ".join(devices)] if devices else []
    took = f"{busy_s / 3600:.1f} hours" if busy_s >= 3600 else f"{max(1, busy_s / 60):.0f} minutes"
    words += [f"{len(trained)} training jobs, {took}"] if busy_s else []
    words += [f"commit{'s' if len(known) > 1 else ''} {', '.join(known)}"] if known else []
    lost = commits.count(None)
    words += [f"commit not recorded by {lost} of {len(commits)} jobs"] if lost else []
    return words
