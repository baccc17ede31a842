"""Test-time compute: results of the evaluations that sweep the iteration budget or the tolerance of trained models.

A line is one model in one mode with the swept field at several values. Beside it stand the same model and mode as they
are evaluated elsewhere, without the sweep, and the explicit models of the same kind on the same test set.
Source: Schöne et al. 2025, Fig. 1 centre.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from implicit_llm_contracts.runs.natural_order import natural
from implicit_llm_report.axes import nice_log_ticks, tell_if_empty, tell_missing
from implicit_llm_report.config import Hole
from implicit_llm_report.model_groups import ModelGroup, Variant
from implicit_llm_report.results import BestSeed, Cell, Spread, from_record, shares_of
from implicit_llm_report.section import Section, SectionInputs
from implicit_llm_report.style import INK, PAPER, Series, series_of_names
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import csv_text, escape, latex_spread, spread_columns, spread_values
from implicit_llm_report.training_runs import Solver

ITERATIONS, TOLERANCE = "eval_max_iter", "eval_tol"
ACCURACY, PERPLEXITY = "accuracy_last10", "perplexity"
COST = "f_evaluations_per_token"
MEASURES = {"word_problem": ACCURACY, "perplexity": PERPLEXITY}  # by the kind of evaluation


@dataclass(frozen=True)
class SweptPoint:
    """One record of a model of a word problem or of text, swept or as it is; None is a missing number."""

    role: str
    run: str
    phase: str | None
    solver: Solver | None
    seed: int | None
    is_implicit: bool
    data: str
    length: int
    mode: str
    eval_max_iter: int | None
    eval_tol: float | None
    train_length: int | None
    f_evaluations_per_token: float | None
    accuracy_last10: float | None = None
    perplexity: float | None = None

    @property
    def variant(self) -> Variant:
        return Variant(self.run, self.phase, self.solver, self.is_implicit)


SweptCell = Cell[SweptPoint]
Record = Mapping[str, Any]


@dataclass(frozen=True)
class SweptLine:
    """A model in a mode: a cell at each value of the swept field, and as it is (`own`)."""

    name: str
    base: str
    cells: tuple[tuple[float, SweptCell], ...]
    own: SweptCell | None

    @property
    def roles(self) -> tuple[str, ...]:
        cells = [cell for _, cell in self.cells] + ([self.own] if self.own else [])
        return tuple(dict.fromkeys(role for cell in cells for role in cell.roles))

    def own_value(self, key: str) -> float | None:
        """Where the model as it is stands on the axis of `key`: the iterations it took, or its tolerance."""
        if self.own is None:
            return None
        return self.own.spread(COST).mean if key == ITERATIONS else self.own.first.eval_tol


@dataclass(frozen=True)
class Reference:
    """An explicit model on the same test set."""

    name: str
    cell: SweptCell


@dataclass(frozen=True)
class SweptPanel:
    """The lines of one field on one test set, by a measure."""

    title: str
    key: str
    measure: str
    lines: tuple[SweptLine, ...]
    references: tuple[Reference, ...]

    @property
    def is_low_better(self) -> bool:
        return self.measure == PERPLEXITY

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(sorted({value for line in self.lines for value, _ in line.cells}))

    @property
    def roles(self) -> tuple[str, ...]:
        explicit = (role for reference in self.references for role in reference.cell.roles)
        return tuple(dict.fromkeys([*(role for line in self.lines for role in line.roles), *explicit]))

    def spread(self, cell: SweptCell) -> Spread:
        return cell.spread(self.measure)

    def best(self, cell: SweptCell) -> BestSeed | None:
        return cell.best(self.measure, is_low_better=self.is_low_better)


def swept_panels(records: Mapping[str, Sequence[Record]], groups: Sequence[ModelGroup]) -> tuple[SweptPanel, ...]:
    """A panel for each test set and length that was swept, by field; `groups` are those of the language models."""
    panels: list[SweptPanel] = []
    for kind, measure in MEASURES.items():
        mine = [record for record in records.get(kind, ()) if not record.get("source")]  # trained here
        by_test: dict[tuple, list[Record]] = {}
        for record in mine:
            by_test.setdefault(_test(record, groups), []).append(record)
        for test in sorted(by_test, key=lambda test: (natural(test[0]), test[1])):
            of_test = by_test[test]
            for key in (ITERATIONS, TOLERANCE):
                swept = [r for r in of_test if r.get("sweep") and r["is_implicit"] and r["sweep"]["key"] == key]
                if swept:
                    panels.append(_panel(_title(of_test[0], groups), key, measure, (swept, of_test)))
    return tuple(panels)


def _test(record: Record, groups: Sequence[ModelGroup]) -> tuple:
    """What models must share to stand in one panel: test set and length, and for text the group of models."""
    return record["data"], record["length"], _group_of(record, groups)


def _group_of(record: Record, groups: Sequence[ModelGroup]) -> ModelGroup | None:
    return next((group for group in groups if record["run"] in group.runs), None)


def _title(record: Record, groups: Sequence[ModelGroup]) -> str:
    if "group" not in record:
        group = _group_of(record, groups)
        return f"{group.title if group else record['run']}, {record['data']}, length {record['length']}"
    hard = record["hard_fraction"]
    shares = " / ".join(f"{100 * share:g}" for share in shares_of(tuple(hard) if isinstance(hard, list) else hard))
    task = record["group"] if record["monoid"] == "none" else f"{record['group']} × monoid"
    return f"{task}, {shares} % hard, length {record['length']}"


def _panel(title: str, key: str, measure: str, records: tuple[Sequence[Record], Sequence[Record]]) -> SweptPanel:
    """`records`: those that were swept, and all of the test set."""
    swept, plain = records[0], [record for record in records[1] if not record.get("sweep")]
    lines: dict[tuple[Variant, str], list[Record]] = {}
    for record in swept:
        lines.setdefault((_variant(record), record["sweep"]["base"]), []).append(record)
    made = []
    for (variant, base), members in lines.items():
        values = sorted({record["sweep"]["value"] for record in members})
        cells = [(float(v), _cell([r for r in members if r["sweep"]["value"] == v])) for v in values]
        own = [record for record in plain if (_variant(record), record["mode"]) == (variant, base)]
        name = _name((variant, base), lines)
        made.append(SweptLine(name, base, tuple(cells), _cell(own) if own else None))
    return SweptPanel(title, key, measure, tuple(made), _references(plain))


def _variant(record: Record) -> Variant:
    return Variant(record["run"], record["phase"], record.get("solver"), record["is_implicit"])


def _name(line: tuple[Variant, str], lines: Iterable[tuple[Variant, str]]) -> str:
    """ "implicit" and what tells a line from the others of its panel: run, phase, mode."""
    lines = list(lines)
    variant, base = line
    words = [variant.run if len({other.run for other, _ in lines}) > 1 else "implicit"]
    phases = {other.phase: other.phase_label for other, _ in lines if other.run == variant.run}
    if len(phases) > 1:
        is_unique = list(phases.values()).count(variant.phase_label) == 1
        words.append((variant.phase_label if is_unique else variant.phase) or "")
    words += [f"({base})"] if len({other for _, other in lines}) > 1 else []
    return " ".join(words)


def _references(plain: Sequence[Record]) -> tuple[Reference, ...]:
    by_run: dict[str, list[Record]] = {}
    for record in plain:
        if not record["is_implicit"]:
            by_run.setdefault(record["run"], []).append(record)
    return tuple(Reference("explicit" if len(by_run) == 1 else run, _cell(by_run[run])) for run in sorted(by_run))


def _cell(records: Iterable[Record]) -> SweptCell:
    points = [from_record(SweptPoint, dict(record), record["role"]) for record in records]
    return Cell(tuple(sorted(points, key=lambda point: point.seed or 0)))


FIGURES = {
    ITERATIONS: ("test-time-iterations", "Accuracy and perplexity by iterations at test time", "iterations allowed"),
    TOLERANCE: ("test-time-tolerance", "Accuracy and perplexity by tolerance at test time", "tolerance"),
}
LABELS = {ACCURACY: "accuracy, last 10 tokens", "perplexity": "perplexity"}
OWN = Series("unswept: stops by its tolerance", INK, "o", has_line=False)


def test_time_section(given: SectionInputs) -> Section | None:
    """What trained models do with fewer or more iterations than they were trained with."""
    panels = swept_panels(given.inputs.records, given.perplexities.groups)
    lost = {key for hole in given.config.holes if hole.config.get("kind") in MEASURES for key in _swept(hole)}
    keys = [key for key in FIGURES if key in lost or any(panel.key == key for panel in panels)]
    if not keys:
        return None
    figures = [_figure(key, [panel for panel in panels if panel.key == key]) for key in keys]
    files = {"test-time": {"csv": _csv(panels), "tex": _latex(panels)}}
    return Section("test-time", "sections/test-time.html.j2", panels, figures, files)


def _swept(hole: Hole) -> set[str]:
    """The settings that a result that is missing would have swept."""
    return set(hole.config.get("sweep") or ()) if hole.is_implicit else set()


def _figure(key: str, panels: Sequence[SweptPanel]) -> Figure:
    name, title, label = FIGURES[key]
    if not panels:
        return Figure(name, title, (Panel(title, partial(tell_if_empty, shown=())),), (), ())
    names = [(line.name, True) for panel in panels for line in panel.lines]
    names += [(reference.name, False) for panel in panels for reference in panel.references]
    series = series_of_names(names)
    drawn = tuple(
        Panel(panel.title, partial(_draw, panel=panel, series=series), f"{panel.title}: against {label}")
        for panel in panels
    )
    roles = tuple(dict.fromkeys(role for panel in panels for role in panel.roles))
    return Figure(name, title, drawn, (*series.values(), OWN), roles)


def _draw(axis: Axes, panel: SweptPanel, series: Mapping[str, Series]) -> None:
    shown: list[float] = []
    for reference in panel.references:
        mean = panel.spread(reference.cell).mean
        if mean is not None:
            style = series[reference.name]
            axis.axhline(mean, color=style.color, linestyle=(0, style.dashes or (3, 1.6)), linewidth=1.3)
            shown.append(mean)
    for line in panel.lines:
        shown += _draw_line(axis, panel, line, series[line.name])
    _sweep_axis(axis, panel)
    if panel.measure == ACCURACY:
        axis.set(ylim=(-0.03, 1.05))
        axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    else:
        nice_log_ticks(axis, shown)
    axis.set_ylabel(LABELS[panel.measure])
    axis.grid(visible=False, axis="x")
    tell_if_empty(axis, shown)
    tell_missing(axis, _missing(panel) if shown else [])


def _draw_line(axis: Axes, panel: SweptPanel, line: SweptLine, style: Series) -> list[float]:
    """The mean over seeds as a line, every seed as a thin one, the model as it is as a dot; returns the values."""
    present = [(value, panel.spread(cell)) for value, cell in line.cells if panel.spread(cell).values]
    for seed in sorted({point.seed or 0 for _, cell in line.cells for point in cell.points}):
        if all(len(cell.points) < 2 for _, cell in line.cells):
            break
        own = [(v, getattr(p, panel.measure)) for v, cell in line.cells for p in cell.points if (p.seed or 0) == seed]
        known = [(value, number) for value, number in own if number is not None]
        axis.plot([v for v, _ in known], [n for _, n in known], color=style.color, linewidth=0.6, alpha=0.55)
    means = [spread.mean for _, spread in present]
    axis.plot([value for value, _ in present], means, **style.line(), zorder=4)  # type: ignore[arg-type]
    found = [number for _, spread in present for number in spread.values]
    where = line.own_value(panel.key)
    mean = None if line.own is None else panel.spread(line.own).mean
    if where is not None and mean is not None:
        axis.plot(where, mean, "o", color=style.color, markersize=8, markeredgecolor=PAPER, zorder=6, clip_on=False)
        found.append(mean)
    return found


def _sweep_axis(axis: Axes, panel: SweptPanel) -> None:
    """Each swept value with its tick, the work growing to the right."""
    axis.set_xscale("log")
    axis.xaxis.set(major_locator=FixedLocator(list(panel.values)), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if panel.key == TOLERANCE:
        axis.invert_xaxis()
        axis.set_xlabel("tolerance (relative residual; stricter to the right)")
    else:
        axis.set_xlabel("iterations allowed for a block")


def _missing(panel: SweptPanel) -> list[str]:
    return [
        f"{line.name} at {value:g}"
        for line in panel.lines
        for value, cell in line.cells
        if not panel.spread(cell).values
    ]


def _rows(panel: SweptPanel) -> Iterator[tuple[str, str, float | None, SweptCell]]:
    """Name, what was swept, its value and the cell: swept lines, each followed by the model as it is, then explicit."""
    for line in panel.lines:
        for value, cell in line.cells:
            yield line.name, panel.key, value, cell
        if line.own is not None:
            yield line.name, "unswept", None, line.own
    for reference in panel.references:
        yield reference.name, "explicit", None, reference.cell


def _csv(panels: Sequence[SweptPanel]) -> str:
    """One line a model, field and value; empty where there is no number."""
    head = ["test", "data", "length", "run", "phase", "mode", "swept", "value", "eval_max_iter", "eval_tol", "measure"]
    head += [*spread_columns(["value"]), "best_seed", "num_seeds", "num_missing", *spread_columns([COST])]
    return csv_text(head, (row for panel in panels for row in _csv_rows(panel)))


def _csv_rows(panel: SweptPanel) -> Iterator[list[object]]:
    for _, swept, value, cell in _rows(panel):
        point, spread, best = cell.first, panel.spread(cell), panel.best(cell)
        about = [panel.title, point.data, point.length, point.run, point.phase, point.mode, swept, value]
        about += [point.eval_max_iter, point.eval_tol, panel.measure]
        seeds = [best and best.seed, len(spread.values), spread.num_missing]
        yield [*about, *spread_values(spread), *seeds, *spread_values(cell.spread(COST))]


def _latex(panels: Sequence[SweptPanel]) -> str:
    """A table a panel: mean over seeds (range), and f-evaluations per token; needs the package booktabs."""
    return "\n".join(_latex_table(panel) for panel in panels)


def _latex_table(panel: SweptPanel) -> str:
    title = panel.title.replace("×", "x")
    lines = [
        f"% {title}: {LABELS[panel.measure]} by {FIGURES[panel.key][2]}, mean over seeds (range)",
        r"\begin{tabular}{llrr}",
        r"\toprule",
        rf"Model & {FIGURES[panel.key][2].capitalize()} & {LABELS[panel.measure].capitalize()} & $f$ per token \\",
        r"\midrule",
    ]
    form = ".3f" if panel.measure == ACCURACY else ".4g"
    for name, swept, value, cell in _rows(panel):
        shown = swept if value is None else f"{value:g}"
        cost = cell.spread(COST).mean
        numbers = f"{latex_spread(panel.spread(cell), form)} & {'--' if cost is None else f'{cost:.3g}'}"
        lines.append(rf"{escape(name)} & {shown} & {numbers} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
