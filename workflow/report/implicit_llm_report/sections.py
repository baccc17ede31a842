"""Define the contents of a report: the figures, and the tables of each kind of result, in the order of the page.

A new figure needs a function of `Given` in a module of figures/, and an entry in registry.yaml with the same name, in
which hyphens replace underscores. A new table needs an entry in registry.yaml and a line in ROWS.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from implicit_llm_contracts.config.evaluation_kinds import PERPLEXITY
from implicit_llm_contracts.config.tasks import WORD_PROBLEM
from implicit_llm_report.config import VALIDATION_KINDS
from implicit_llm_report.figures import analysis, language_models, training, word_problems
from implicit_llm_report.figures.svg import Figure
from implicit_llm_report.inputs.frame import COSTS, LANGUAGE_KINDS, Group, Spread, groups
from implicit_llm_report.inputs.published import PublishedEntry
from implicit_llm_report.inputs.sources import Given
from implicit_llm_report.registry import figures_with, registry
from implicit_llm_report.tables import Table, csv_of, latex_of, rounded, tables_of

CELL = ("name", "data", "length", "mode", "against", "task", "measure")
MODULES = (word_problems, language_models, training, analysis)


def _of_kind(kind: str, given: Given, measure: str | None = None) -> pd.DataFrame:
    """Return the rows of a kind that sweep no setting, only those with `measure` if it is given.

    The rows of models that were trained elsewhere are included.
    """
    rows = given.frame[(given.frame["kind"] == kind) & given.frame["swept"].isna()]
    return rows if measure is None else rows[rows["measure"] == measure]


def _layers(given: Given) -> pd.DataFrame:
    """Return the rows of accuracies by depth, preceded by rows of the fewest layers if these are configured."""
    needed, config = given.frame[given.frame["kind"] == "layers"], given.config.minimum_layers
    return pd.concat([needed.assign(group=config.group), given.depths]) if config is not None else given.depths


def _babi(given: Given) -> pd.DataFrame:
    """Return the CatbAbI rows except those on validation sets, which only serve to choose runs.

    In rows that are not of a single task, `task` becomes "all questions".
    """
    rows = _of_kind("catbabi", given)
    return rows[rows["split"] != "valid"].assign(
        task=lambda shown: shown["task"].where(shown["task"].notna(), "all questions")
    )


def _downstream(given: Given) -> pd.DataFrame:
    rows = _of_kind("lm_eval", given)
    return rows[~rows["metric"].isin(COSTS)]


ROWS: Mapping[str, Callable[[Given], pd.DataFrame]] = {
    "accuracy": partial(_of_kind, "word_problem"),
    "validation": partial(_of_kind, VALIDATION_KINDS[WORD_PROBLEM]),
    "validation-perplexity": partial(_of_kind, VALIDATION_KINDS[PERPLEXITY]),
    "minimum-layers": _layers,
    "perplexity": partial(_of_kind, "perplexity"),
    "downstream": _downstream,
    "babi": _babi,
    "test-time": analysis.swept_rows,
    "duality": partial(_of_kind, "duality", measure="pair"),
    "jacobian": lambda given: analysis.jacobian_rows(given.measured),
}


@dataclass(frozen=True)
class PublishedRow:
    """A published number or text, and the number of one of our models under the same conditions.

    `ours`: the values of this model over its seeds, without values if its result is missing; None if we have no such
    model.
    """

    entry: PublishedEntry
    ours: Spread | None
    roles: tuple[str, ...]
    model: str | None = None


def figures_of(given: Given) -> list[Figure]:
    """Return the selected figures that have data: those of registry.yaml in its order, then those of plugins."""
    asked = (figure_of(given, name) for name in figures_with(given.kinds) if given.config.shows("figures", name))
    return list(filter(None, asked))


def figure_of(given: Given, name: str) -> Figure | None:
    """Draw a figure of registry.yaml or of a plugin; return None if it has no data or its `needs` are not met."""
    if name in given.kinds.figures and name not in given.config.own_figures:
        return None
    function = name.replace("-", "_")
    own = given.kinds.function("report", name)
    draw: Callable[[Given], Figure | None] = own or next(filter(None, (getattr(it, function, None) for it in MODULES)))
    return draw(given)


def sections_of(given: Given) -> dict[str, list[Table]]:
    """Return the tables of each selected entry of ROWS that has any, by the name of the entry.

    The entry "minimum-layers" is included without tables if it is configured.
    """
    config = given.config
    asked = {name: rows_of(given) for name, rows_of in ROWS.items() if config.shows("tables", name)}
    found = {name: tables_of(registry().tables[name], rows) for name, rows in asked.items()}
    return {
        name: tables for name, tables in found.items() if tables or (name == "minimum-layers" and config.minimum_layers)
    }


def missing_files(given: Given) -> dict[str, str]:
    rows = [{"result": m.job, "state": m.state, "why": m.why, "made by": m.command} for m in given.config.missing]
    frame = pd.DataFrame(rows)
    return {"csv": csv_of(frame), "tex": latex_of("Missing results", frame.drop(columns="made by"))}


def published_rows(given: Given) -> list[PublishedRow]:
    """Return the rows of all published numbers; rows with a model of ours come first."""
    frame = given.frame[given.frame["swept"].isna() & (given.frame["task"].isna() | (given.frame["kind"] == "lm_eval"))]
    cells = {kind.kind: groups(kind.rows, CELL) for kind in groups(frame, ("kind",))}
    rows = [row for entry in given.published.entries for row in _published_rows(entry, cells.get(entry.kind or "", []))]
    return sorted(rows, key=lambda row: row.ours is None)


def _published_rows(entry: PublishedEntry, cells: Sequence[Group]) -> list[PublishedRow]:
    """Return a row for each of our models that matches the entry, or one row without a model if none does.

    Language models match only in their headline mode. Models of different recipes are never pooled.
    """
    is_of_all_modes = entry.kind not in LANGUAGE_KINDS
    beside = [cell for cell in cells if entry.is_beside(cell) and (is_of_all_modes or cell.is_headline)]
    rows = [PublishedRow(entry, cell.spread(entry.metric), cell.roles, cell.name) for cell in beside]
    return rows or [PublishedRow(entry, None, ())]


def published_files(rows: Sequence[PublishedRow]) -> dict[str, str]:
    frame = pd.DataFrame(list(map(_csv_row, rows)), dtype=object)
    shown = frame[["what", "published", "ours_mean", "mark"]].fillna("")
    return {"csv": csv_of(frame), "tex": latex_of("Published numbers, and ours", shown)}


def _csv_row(row: PublishedRow) -> dict[str, object]:
    ours, entry = row.ours or Spread(), row.entry
    return {
        "id": entry.id,
        "part": entry.part,
        "what": entry.what,
        "published": entry.value,
        "our_model": row.model,
        **{f"ours_{part}": rounded(getattr(ours, part)) for part in ("mean", "low", "high")},
        "num_seeds": None if row.ours is None else len(ours.values),
        "mark": entry.mark,
        "source": entry.source,
        "note": entry.note,
    }
