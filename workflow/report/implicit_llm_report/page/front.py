"""Build parts of the first page: at most five figures with few lines, a compact table for each test, and facts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import islice

import pandas as pd

from implicit_llm_report.config import MOST_FIGURES
from implicit_llm_report.figures.svg import Drawn, drawn
from implicit_llm_report.inputs.frame import SHARES, count_words, groups, headlines
from implicit_llm_report.inputs.sources import Given
from implicit_llm_report.registry import registry
from implicit_llm_report.sections import figure_of
from implicit_llm_report.tables import Table, tables_of

# Unless the configuration names figures, the page shows the first five of these that have data. If these are fewer than
# five, figures of plugins follow.
FIGURES = (
    "accuracy-by-length", "loss-by-flops", "perplexity-by-length", "minimum-layers", "accuracy-by-position",
    "jacobian", "accuracy-by-babi-task", "perplexity-by-position",
)  # fmt: skip
FEW_LINES = frozenset({"minimum-layers", "jacobian"})  # these show all models, because they have few lines
MOST_LINES, MOST_PANELS, MOST_ROWS = 6, 3, 12
TABLES = ("accuracy", "perplexity", "downstream", "babi")
TEST = ("kind", "group", "monoid", "data_set")


@dataclass(frozen=True)
class FrontTable:
    """A table in the mode that represents each model.

    num_left_out: the number of measured rows that only the page of all numbers has. not_run: the titles of rows that
    are left out because their models have no result.
    """

    name: str
    table: Table
    unit: str
    num_left_out: int
    not_run: Sequence[str]


def front_figures(given: Given) -> list[Drawn]:
    few, names = with_few_models(given), given.config.front.figures or (*FIGURES, *given.kinds.figures)
    figures = (figure_of(given if name in FEW_LINES else few, name) for name in names)
    found = islice(filter(None, figures), MOST_FIGURES)
    return [drawn(replace(one, panels=one.panels[:MOST_PANELS])) for one in found]


def with_few_models(given: Given) -> Given:
    """Return the results of the models that match the configured patterns; without patterns, each test's first six."""
    rows, patterns = given.measured, given.config.front.models
    named = {name for name in rows["name"].unique() if any(fnmatch(str(name), one) for one in patterns)}
    few = [one.rows[one.rows["name"].isin(named if patterns else _first(one.rows))] for one in groups(rows, TEST)]
    kept = pd.concat([rows[:0], *few]).sort_index()
    runs = set(kept["run"])
    return replace(given, measured=kept, training=tuple(one for one in given.training if one.run in runs))


def _first(rows: pd.DataFrame) -> list[str]:
    """Return the names of the first six models of a test: three implicit and three explicit ones.

    If one kind has fewer than three, more models of the other kind are returned.
    """
    shown, half = headlines(rows), MOST_LINES // 2
    is_implicit = shown["is_implicit"].astype(bool)
    implicit, explicit = (list(dict.fromkeys(shown[kind]["name"])) for kind in (is_implicit, ~is_implicit))
    return [*implicit[: max(half, MOST_LINES - len(explicit))], *explicit[: max(half, MOST_LINES - len(implicit))]]


def front_tables(rows_of: dict[str, pd.DataFrame], patterns: Sequence[str] = ()) -> Iterator[FrontTable]:
    """Yield a table for each test, with at most MOST_ROWS measured rows; models that match a pattern are preferred.

    `rows_of`: the rows of each table in TABLES.
    """
    for name in TABLES:
        for table in tables_of(registry().tables[name], headlines(rows_of[name])):
            top = 1 if name == "babi" else None  # its tasks are in a figure
            rows = [(head, row[:top]) for head, row in zip(table.side, table.cells, strict=True)]
            measured = [row for row in rows if any(cell.spread.mean is not None for cell in row[1])]
            models = rows[:-1] if table.foot else rows
            feet = [row for row in rows[len(models) :] if row in measured]
            known = [row for row in models if row in measured]
            first = sorted(known, key=lambda row: not any(fnmatch(row[0].title, one) for one in patterns))
            chosen = first[: MOST_ROWS - len(feet)]
            shown = [row for row in measured if row in chosen + feet]
            side, cells = [head for head, _ in shown], [row for _, row in shown]
            unit = "%" if cells and cells[0][0].metric in SHARES else ""
            small = replace(table, side=side, top=table.top[:top], cells=cells)
            not_run = [row[0].title for row in models if row not in known]
            yield FrontTable(name, small, unit, len(measured) - len(shown), not_run)


def facts_of(given: Given) -> Sequence[str]:
    """Return phrases on the origin of the numbers: devices, training jobs, total time of their processes, commits."""
    sources = list(given.sources.values())
    devices = dict.fromkeys(str(one.provenance["device"]) for one in sources if one.provenance.get("device"))
    trained = [one.provenance for one in sources if one.manifest.stage == "train"]
    busy_s = sum(
        attempt["busy_s"] * record.get("processes", 1) for record in trained for attempt in record.get("attempts") or []
    )
    commits = [(one.provenance.get("git") or {}).get("commit") for one in sources]
    known = list(dict.fromkeys(commit[:10] for commit in commits if commit))
    took = f"{busy_s / 3600:.1f} hours" if busy_s >= 3600 else count_words(max(1, round(busy_s / 60)), "minute")
    lost = commits.count(None)
    facts = {
        ", ".join(devices): devices,
        f"{count_words(len(trained), 'training job')}, {took}": busy_s,
        f"commit{'s' if len(known) > 1 else ''} {', '.join(known)}": known,
        f"commit not recorded by {lost} of {count_words(len(commits), 'job')}": lost,
    }
    return [words for words, is_known in facts.items() if is_known]
