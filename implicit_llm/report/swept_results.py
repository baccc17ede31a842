"""Test-time compute: results of the evaluations that sweep the iteration budget or the tolerance of trained models.

A line is one model in one mode with the swept field at several values. Beside it stand the same model and mode as they
are evaluated elsewhere, without the sweep, and the explicit models of the same kind on the same test set.
Source: Schöne et al. 2025, Fig. 1 centre.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from implicit_llm.report.model_groups import ModelGroup, Variant
from implicit_llm.report.results import BestSeed, Cell, Spread, Task, from_record, hard_label
from implicit_llm.report.training_runs import Solver
from implicit_llm_contracts.runs.natural_order import natural

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
    shares = hard_label(hard if isinstance(hard, list | tuple) else [hard])
    return f"{Task(record['group'], record['monoid']).label}, {shares}, length {record['length']}"


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
