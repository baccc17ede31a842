"""Test-time compute: results of the evaluations that sweep the iteration budget or the tolerance of trained models.

A line is one model in one mode with the swept field at several values. Beside it stand the same model and mode as they
are evaluated elsewhere, without the sweep, and the explicit models of the same kind on the same test set.
Source: Schöne et al. 2025, Fig. 1 centre.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from implicit_llm_contracts.hints import natural
from implicit_llm_report.axes import tell_if_empty, ticks_at
from implicit_llm_report.charts import Chart, Line, chart_figure
from implicit_llm_report.config import MissingResult
from implicit_llm_report.downstream import AVERAGE
from implicit_llm_report.frame import COSTS, Group, groups, roles_of
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.style import INK, Series
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import fields, files_of, renamed, spread_fields
from implicit_llm_report.word_problems import title_of

ITERATIONS, TOLERANCE = "eval_max_iter", "eval_tol"
ACCURACY, PERPLEXITY = "accuracy_last10", "perplexity"
COST = COSTS[0]
MEASURES = {"word_problem": ACCURACY, "perplexity": PERPLEXITY, "lm_eval": AVERAGE}  # by the kind of evaluation
FIGURES = {
    ITERATIONS: ("test-time-iterations", "Accuracy and perplexity by iterations at test time", "iterations allowed"),
    TOLERANCE: ("test-time-tolerance", "Accuracy and perplexity by tolerance at test time", "tolerance"),
}
LABELS = {ACCURACY: "accuracy, last 10 tokens", PERPLEXITY: "perplexity", AVERAGE: "average accuracy"}
OWN = Series("unswept: stops by its tolerance", INK, "o", has_line=False)


@dataclass(frozen=True)
class SweptLine:
    """A model in a mode: by value of the swept field, and as it is (`own`)."""

    name: str
    base: str
    cells: Mapping[float, Group]
    own: Group | None

    @property
    def groups(self) -> list[Group]:
        return [*self.cells.values(), *([self.own] if self.own else [])]


@dataclass(frozen=True)
class SweptPanel:
    """The lines of one field on one test set, by a measure, and the explicit models on the same test set."""

    title: str
    key: str
    measure: str
    lines: Sequence[SweptLine]
    references: Mapping[str, Group]

    @property
    def is_low_better(self) -> bool:
        return self.measure == PERPLEXITY

    @property
    def values(self) -> list[float]:
        return sorted({value for line in self.lines for value in line.cells})

    @property
    def roles(self) -> tuple[str, ...]:
        return roles_of([*(group for line in self.lines for group in line.groups), *self.references.values()])

    @property
    def rows(self) -> Iterator[tuple[str, str, float | None, Group]]:
        """Name, what was swept, its value and the numbers; each line is followed by the model as it is."""
        for line in self.lines:
            yield from ((line.name, self.key, value, cell) for value, cell in line.cells.items())
            if line.own is not None:
                yield line.name, "unswept", None, line.own
        yield from ((name, "explicit", None, model) for name, model in self.references.items())


def swept_panels(given: SectionInputs) -> list[SweptPanel]:
    """A panel for each test set and length that was swept, by field."""
    models = [*given.perplexities.groups, *given.downstream.groups]
    titles = {run: group.title for group in models for run in group.runs}
    frame, panels = given.frame, []
    for kind, measure in MEASURES.items():
        has_measure = frame["data"].isin(set(frame[frame["metric"] == measure]["data"]))
        rows = frame[(frame["kind"] == kind) & frame["source"].isna() & has_measure]
        rows = rows.assign(models=rows["run"].map(titles))
        for test in groups(rows, ("data", "length", "models"), order=lambda t: (natural(t.data), t.length or 0)):
            title = title_of(test) if test.group else f"{titles.get(test.run, test.run)}, {test.data}"
            title += f", length {test.length}" if test.length else ""
            swept = test.rows[test.rows["is_implicit"].astype(bool) & test.rows["swept"].notna()]
            for key in (key for key in FIGURES if key in set(swept["swept"])):
                lines, references = _lines(swept[swept["swept"] == key], test.rows), _references(test.rows)
                panels.append(SweptPanel(title, key, measure, lines, references))
    return panels


def _lines(swept: pd.DataFrame, rows: pd.DataFrame) -> list[SweptLine]:
    found = groups(swept, ("run", "phase", "base"))
    lines = []
    for line in found:
        same = (rows["run"] == line.run) & (rows["phase"] == line.phase) & (rows["mode"] == line.base)
        own = rows[same & rows["sweep"].isna()]
        name = _name(line, found)
        lines.append(SweptLine(name, line.base, line.cells("at"), None if own.empty else Group(own)))
    return lines


def _name(line: Group, lines: Sequence[Group]) -> str:
    """ "implicit" and what tells a line from the others of its panel: run, phase, mode."""
    words = [line.run if len({other.run for other in lines}) > 1 else "implicit"]
    phases = {other.phase: other.phase_label for other in lines if other.run == line.run}
    if len(phases) > 1:
        is_unique = list(phases.values()).count(line.phase_label) == 1
        words.append((line.phase_label if is_unique else line.phase) or "")
    words += [f"({line.base})"] if len({other.base for other in lines}) > 1 else []
    return " ".join(words)


def _references(rows: pd.DataFrame) -> dict[str, Group]:
    explicit = rows[~rows["is_implicit"].astype(bool) & rows["sweep"].isna()]
    found = groups(explicit, ("run",), order=lambda model: model.run)
    return {"explicit" if len(found) == 1 else model.run: model for model in found}


def test_time_section(given: SectionInputs) -> Section | None:
    """What trained models do with fewer or more iterations than they were trained with."""
    panels = swept_panels(given)
    lost = {key for item in given.config.missing if item.config.get("kind") in MEASURES for key in _swept(item)}
    keys = [key for key in FIGURES if key in lost or any(panel.key == key for panel in panels)]
    if not keys:
        return None
    figures = [_figure(key, [panel for panel in panels if panel.key == key]) for key in keys]
    titles = [f"{panel.title}, {LABELS[panel.measure]} by {FIGURES[panel.key][2]}" for panel in panels]
    rows = [(title, [_csv_row(panel, *row) for row in panel.rows]) for title, panel in zip(titles, panels, strict=True)]
    names = {"run": "Model", "swept": "Setting", "value": "Value"}
    files = {"test-time": files_of(rows, names, {"value": "number", COST: "f per token"})}
    return Section("test-time", "sections/test-time.html.j2", panels, figures, files)


def _swept(item: MissingResult) -> set[str]:
    """The settings that a result that is missing would have swept."""
    return set(item.config.get("sweep") or ()) if item.is_implicit else set()


def _figure(key: str, panels: Sequence[SweptPanel]) -> Figure:
    name, title, label = FIGURES[key]
    charts = [
        Chart(
            panel.title,
            _drawn(panel),
            partial(_sweep_axis, panel=panel),
            f"{panel.title}: against {label}",
            LABELS[panel.measure],
            is_accuracy=panel.measure != PERPLEXITY,
        )
        for panel in panels
    ]
    empty = Figure(name, title, (Panel(title, partial(tell_if_empty, shown=())),), (), ())
    return chart_figure(name, title, charts, [OWN]) or empty


def _drawn(panel: SweptPanel) -> list[Line]:
    """The model as it is stands at the iterations it took, or at its tolerance."""
    lines = []
    for line in panel.lines:
        points = [(value, cell.spread(panel.measure)) for value, cell in line.cells.items()]
        own = line.own and (line.own.spread(COST).mean if panel.key == ITERATIONS else line.own.eval_tol)
        mark = (own, line.own.spread(panel.measure)) if line.own and own else None
        lines.append(Line(line.name, True, points, groups=line.groups, mark=mark))
    explicit = panel.references.items()
    return [*lines, *(Line(name, False, level=model.spread(panel.measure), groups=[model]) for name, model in explicit)]


def _sweep_axis(axis: Axes, panel: SweptPanel) -> None:
    """Each swept value with its tick, the work growing to the right."""
    axis.set_xscale("log")
    ticks_at(axis, panel.values)
    axis.set_xlabel("iterations allowed for a block")
    if panel.key == TOLERANCE:
        axis.invert_xaxis()
        axis.set_xlabel("tolerance (relative residual; stricter to the right)")


def _csv_row(panel: SweptPanel, _: str, swept: str, value: float | None, cell: Group) -> dict[str, object]:
    spread, best = cell.spread(panel.measure), cell.best(panel.measure, is_low_better=panel.is_low_better)
    return {
        **{"test": panel.title, **fields(cell, "data", "length", "run", "phase", "mode"), "swept": swept},
        **{"value": value, **fields(cell, ITERATIONS, TOLERANCE), "measure": panel.measure},
        **renamed(spread_fields([panel.measure], cell.spread), panel.measure, "value"),
        **{"best_seed": best and best.seed, "num_seeds": len(spread.values), "num_missing": spread.num_missing},
        **spread_fields([COST], cell.spread),
    }
