"""Answers to the questions of CatbAbI: which runs speak, the tables and the figure.

Figures, tables and claims show the test set of a data set; its validation set only chooses runs. The most accurate run
on it speaks for those that compete, whatever it does on the test set. Runs compete that are equal in all that a claim
compares by: kind, family, layers and training tokens. A grid over the learning rate is one such field; batch sizes
train on different numbers of tokens and are fields of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from implicit_llm_report.axes import tell_if_empty
from implicit_llm_report.model_groups import ModelPoint, Variant, name_among
from implicit_llm_report.perplexity import is_close
from implicit_llm_report.published import Published
from implicit_llm_report.results import Cell, Spread, headline_mode, mode_rank
from implicit_llm_report.style import BAND, Series, series_of_names
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import (
    csv_text,
    escape,
    in_percent,
    latex_of,
    latex_spread,
    rounded,
    spread_columns,
    spread_values,
)

TEST, VALIDATION = "test", "valid"  # splits of a data set
WINDOWED = "windowed"
# How a protocol is named on the page.
PROTOCOL_WORDS = {WINDOWED: "every row from an empty state", "carried": "state carried over all stories"}


@dataclass(frozen=True)
class BabiPoint(ModelPoint):
    """One record of a CatbAbI evaluation; None is a missing number."""

    num_layers: int | None
    data: str
    data_set: str
    split: str
    mode: str
    protocol: str | None
    accuracy: float | None
    accuracy_by_task: Mapping[str, float] | None
    num_questions: int | None
    num_questions_by_task: Mapping[str, int] | None
    lm_accuracy: float | None
    lm_perplexity: float | None
    lm_accuracy_by_task: Mapping[str, float] | None
    lm_perplexity_by_task: Mapping[str, float | None] | None
    num_words: int | None
    residual: float | None
    train_tokens: float | None
    train_flops: float | None

    def of_task(self, task: int) -> float | None:
        return (self.accuracy_by_task or {}).get(str(task))


BabiCell = Cell[BabiPoint]


@dataclass(frozen=True)
class BabiResults:
    """All points, with the ways in which figures, tables and claims look at them."""

    points: tuple[BabiPoint, ...]
    headline_mode: str | None = None

    @cached_property
    def cells(self) -> tuple[BabiCell, ...]:
        """One a (run, phase, data set, protocol, mode): by data set, implicit runs first, a run's headline first."""
        groups: dict[tuple, list[BabiPoint]] = {}
        for point in self.points:
            groups.setdefault((point.variant, point.data, point.protocol, point.mode), []).append(point)
        cells = [Cell(tuple(sorted(points, key=lambda point: point.seed or 0))) for points in groups.values()]
        return tuple(sorted(cells, key=self._order))

    @property
    def test_sets(self) -> tuple[str, ...]:
        """What is shown and judged; validation sets are left out."""
        return tuple(sorted({point.data for point in self.points if point.split == TEST}))

    def protocols(self, data: str) -> tuple[str | None, ...]:
        """In which the models were evaluated on a data set, the one that speaks first."""
        found = {point.protocol for point in self.points if point.data == data}
        return tuple(sorted(found, key=lambda protocol: (protocol != self.headline_protocol(data), protocol or "")))

    def headline_protocol(self, data: str) -> str | None:
        """The protocol of figures, choices and claims: windowed where it was run, as every model can follow it."""
        found = {point.protocol for point in self.points if point.data == data}
        return WINDOWED if WINDOWED in found else min(found, key=str, default=None)

    def of(self, data: str, protocol: str | None = None, *, headline_only: bool = False) -> list[BabiCell]:
        """The cells of a data set, in the protocol that speaks for it unless another is named."""
        wanted = protocol or self.headline_protocol(data)
        mine = [cell for cell in self.cells if (cell.first.data, cell.first.protocol) == (data, wanted)]
        return [cell for cell in mine if self.is_headline(cell)] if headline_only else mine

    def validation(self, cell: BabiCell) -> Spread:
        """Accuracy at all questions of the validation set, of the runs, protocol and mode of a cell of the test set."""
        return Spread.of(point.accuracy for point in self._validation_points(cell.first))

    def validation_set(self, cell: BabiCell) -> str | None:
        """The validation set that `validation` is of; None without one."""
        return next((point.data for point in self._validation_points(cell.first)), None)

    def _validation_points(self, tested: BabiPoint) -> list[BabiPoint]:
        mine = (tested.variant, tested.data_set, VALIDATION, tested.protocol, tested.mode)
        return [p for p in self.points if (p.variant, p.data_set, p.split, p.protocol, p.mode) == mine]

    def is_headline(self, cell: BabiCell) -> bool:
        mine = (cell.first.run, cell.first.data, cell.first.protocol)
        modes = {point.mode for point in self.points if (point.run, point.data, point.protocol) == mine}
        return cell.first.mode == headline_mode(modes, self.headline_mode)

    def name(self, cell: BabiCell) -> str:
        """The name of a cell's line."""
        return name_among(cell.first, self.points)

    def _order(self, cell: BabiCell) -> tuple:
        point = cell.first
        kind = (point.data, not point.is_implicit, point.run, point.phase or "")
        return (*kind, not self.is_headline(cell), *mode_rank(point.mode))


def task_spread(cell: BabiCell, task: int) -> Spread:
    """Accuracy on one task over seeds; without values for a task that was not asked."""
    return cell.spread(lambda point: point.of_task(task))


def word_spread(cell: BabiCell, task: int | None, *, is_perplexity: bool) -> Spread:
    """Accuracy or perplexity over all words of a task, None for all of them, over seeds."""
    if task is None:
        return cell.spread("lm_perplexity" if is_perplexity else "lm_accuracy")
    key = "lm_perplexity_by_task" if is_perplexity else "lm_accuracy_by_task"
    return cell.spread(lambda point: (getattr(point, key) or {}).get(str(task)))


def tasks_asked(cells: list[BabiCell]) -> list[int]:
    """The tasks with questions in any of the cells."""
    return sorted({int(task) for cell in cells for point in cell.points for task in point.num_questions_by_task or {}})


SAME_TOKENS = 0.01


@dataclass(frozen=True)
class Choice:
    """Runs that compete on a test set; `chosen` is None where several do and none has a validation number."""

    rivals: tuple[BabiCell, ...]
    chosen: BabiCell | None
    num_unvalidated: int

    @property
    def words(self) -> str:
        """How the run was chosen, to follow its name; empty where it is the only one."""
        if len(self.rivals) == 1:
            return ""
        without = f", {self.num_unvalidated} of them without a number there" if self.num_unvalidated else ""
        return f" [chosen of {len(self.rivals)} by accuracy on the validation set{without}]"


@dataclass(frozen=True)
class Field:
    """What is compared at equal layers and tokens; a kind that was not run is None."""

    num_layers: int | None
    family: str
    implicit: Choice | None
    explicit: Choice | None


def fields_of(results: BabiResults, data: str) -> tuple[Field, ...]:
    """The fields of the test set `data`, every run in the mode that speaks for it."""
    return tuple(
        Field(
            cells[0].first.num_layers,
            cells[0].first.family,
            *(
                _choose(results, [cell for cell in cells if cell.first.is_implicit is is_implicit])
                for is_implicit in (True, False)
            ),
        )
        for cells in _equal_cells(results.of(data, headline_only=True))
    )


def speaking_cells(results: BabiResults, data: str) -> list[BabiCell]:
    """The headline cells without those that others of their field were chosen over."""
    lost = {
        id(cell)
        for choice in _choices(results, data)
        for cell in choice.rivals
        if choice.chosen is not None and cell is not choice.chosen
    }
    return [cell for cell in results.of(data, headline_only=True) if id(cell) not in lost]


def chosen_variants(results: BabiResults, data: str) -> set[Variant]:
    """The runs, as one of their phases left them, that were chosen over others."""
    return {
        choice.chosen.first.variant
        for choice in _choices(results, data)
        if choice.chosen is not None and len(choice.rivals) > 1
    }


def marked_name(results: BabiResults, cell: BabiCell) -> str:
    """The name of a cell's line, which says so where its run was chosen over others."""
    is_chosen = cell.first.variant in chosen_variants(results, cell.first.data)
    return results.name(cell) + (" (chosen on validation)" if is_chosen else "")


def _choices(results: BabiResults, data: str) -> list[Choice]:
    return [choice for field in fields_of(results, data) for choice in (field.implicit, field.explicit) if choice]


def _equal_cells(cells: Sequence[BabiCell]) -> Iterator[list[BabiCell]]:
    """The cells by layers, family and tokens, fewest tokens first."""
    found: list[list[BabiCell]] = []
    for cell in sorted(cells, key=lambda cell: cell.first.train_tokens or 0.0):
        mine = (group for group in found if _is_equal(group[0], cell))
        group = next(mine, None)
        if group is None:
            found.append([cell])
        else:
            group.append(cell)
    yield from found


def _is_equal(first: BabiCell, other: BabiCell) -> bool:
    mine, its = first.first, other.first
    is_alike = (mine.num_layers, mine.family) == (its.num_layers, its.family)
    return is_alike and is_close(mine.train_tokens, its.train_tokens, SAME_TOKENS)


def _choose(results: BabiResults, rivals: Sequence[BabiCell]) -> Choice | None:
    if not rivals:
        return None
    if len(rivals) == 1:
        return Choice(tuple(rivals), rivals[0], 0)
    scores = {id(cell): results.validation(cell).mean for cell in rivals}
    scored = [cell for cell in rivals if scores[id(cell)] is not None]
    best = max(scored, key=lambda cell: scores[id(cell)] or 0.0, default=None)
    return Choice(tuple(rivals), best, len(rivals) - len(scored))


# Weston et al. 2015, Table 1.
TASK_NAMES = {
    1: "single supporting fact", 2: "two supporting facts", 3: "three supporting facts", 4: "two argument relations",
    5: "three argument relations", 6: "yes/no questions", 7: "counting", 8: "lists/sets", 9: "simple negation",
    10: "indefinite knowledge", 11: "basic coreference", 12: "conjunction", 13: "compound coreference",
    14: "time reasoning", 15: "basic deduction", 16: "basic induction", 17: "positional reasoning",
    18: "size reasoning", 19: "path finding", 20: "agent's motivations",
}  # fmt: skip


@dataclass(frozen=True)
class BabiRow:
    """One task, or all of them (None): a spread for each model of the table; of the validation set only all of them."""

    task: int | None
    spreads: tuple[Spread, ...]
    validation_set: str | None = None

    @property
    def is_validation(self) -> bool:
        return self.validation_set is not None

    @property
    def name(self) -> str:
        if self.is_validation:
            return "all questions of the validation set"
        return "all questions" if self.task is None else f"{self.task}. {TASK_NAMES.get(self.task, 'task')}"


@dataclass(frozen=True)
class BabiTable:
    """The models on one test set in one protocol; each in every mode, the one that speaks for it marked.

    is_headline: this protocol speaks for the models in the figure and the claims. chosen: the runs that the validation
    set chose of several; its numbers are one row, the last.
    """

    data: str
    protocol: str | None
    is_headline: bool
    cells: tuple[BabiCell, ...]
    names: tuple[str, ...]
    headlines: tuple[bool, ...]
    chosen: tuple[bool, ...]
    rows: tuple[BabiRow, ...]

    @property
    def protocol_words(self) -> str:
        return PROTOCOL_WORDS.get(self.protocol or "", self.protocol or "protocol not recorded")

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for cell in self.cells for role in cell.roles))


def babi_tables(results: BabiResults) -> list[BabiTable]:
    """One table a test set and protocol."""
    return [_table(results, data, protocol) for data in results.test_sets for protocol in results.protocols(data)]


def _table(results: BabiResults, data: str, protocol: str | None) -> BabiTable:
    cells = results.of(data, protocol)
    rows = [BabiRow(None, tuple(cell.spread("accuracy") for cell in cells))]
    rows += [BabiRow(task, tuple(task_spread(cell, task) for cell in cells)) for task in tasks_asked(cells)]
    validation = tuple(results.validation(cell) for cell in cells)
    if any(spread.values for spread in validation):
        validation_set = next(name for cell in cells if (name := results.validation_set(cell)))
        rows.append(BabiRow(None, validation, validation_set))
    variants = chosen_variants(results, data)
    chosen = tuple(cell.first.variant in variants for cell in cells)
    names = tuple(marked_name(results, cell) for cell in cells)
    headlines = tuple(results.is_headline(cell) for cell in cells)
    speaks = protocol == results.headline_protocol(data)
    return BabiTable(data, protocol, speaks, tuple(cells), names, headlines, chosen, tuple(rows))


def babi_csv(tables: Sequence[BabiTable], published: Published) -> str:
    """One line a (model, mode, task), task 0 for all questions; then the yardsticks of other papers.

    Column `split` tells the lines of the validation set from those of the test set.
    """
    about = ["run", "model", "family", "num_layers", "num_parameters", "phase", "solver", "data"]
    about += ["protocol", "mode", "split", "is_chosen"]
    counts = ["num_seeds", "task", "num_questions"]
    words = spread_columns(["lm_accuracy", "lm_perplexity"])
    head = [*about, *counts, *spread_columns(["accuracy"]), *words, "f_evaluations_per_token_mean", "source", "mark"]
    return csv_text(head, _csv_rows(tables, published))


def _csv_rows(tables: Sequence[BabiTable], published: Published) -> Iterator[list[object]]:
    for table in tables:
        for index, cell in enumerate(table.cells):
            for row in table.rows:
                yield _csv_row(cell, row, row.spreads[index], is_chosen=table.chosen[index])
    for number in published.babi:
        about = [
            number.model,
            None,
            None,
            number.num_layers,
            None,
            None,
            None,
            None,
            None,
            number.training,
            "test",
            None,
        ]
        accuracy = rounded(number.value / 100)
        yield [*about, None, 0, None, accuracy, *[None] * 9, number.source, number.mark]


def _csv_row(cell: BabiCell, row: BabiRow, spread: Spread, *, is_chosen: bool) -> list[object]:
    point = cell.first
    kind = "implicit" if point.is_implicit else "explicit"
    questions = point.num_questions if row.task is None else (point.num_questions_by_task or {}).get(str(row.task))
    words: list[object] = [None] * 6
    cost = rounded(cell.spread("f_evaluations_per_token").mean)
    data, split = point.data, "test"
    if row.validation_set is not None:
        data, split, questions, cost = row.validation_set, "validation", None, None
    else:
        spreads = [word_spread(cell, row.task, is_perplexity=is_perplexity) for is_perplexity in (False, True)]
        words = [value for spread in spreads for value in spread_values(spread)]
    return [
        *(point.run, kind, point.family, point.num_layers, point.num_parameters, point.phase, point.phase_label),
        *(data, point.protocol, point.mode, split, int(is_chosen), len(spread.values), row.task or 0, questions),
        *(*spread_values(spread), *words, cost, None, None),
    ]


def babi_latex(tables: Sequence[BabiTable], published: Published) -> str:
    """The tables for a paper, models in the mode that speaks for them; needs the package booktabs."""
    return "\n".join(_latex_table(table, published) for table in tables)


def _latex_table(table: BabiTable, published: Published) -> str:
    shown = [index for index, is_headline in enumerate(table.headlines) if is_headline]
    what = f"CatbAbI, {table.data}, {table.protocol_words}: accuracy at questions in percent, mean over seeds (range)"
    rows = [
        [escape(row.name), *(latex_spread(in_percent(row.spreads[index]), ".1f") for index in shown)]
        for row in table.rows
    ]
    foot = [r"\midrule"]
    for number in published.babi:
        name = number.model if number.num_layers is None else f"{number.model}, {number.num_layers} layer(s)"
        text = f"{escape(name)} ({number.training}): {number.value:.2f}"
        foot.append(rf"\multicolumn{{{1 + len(shown)}}}{{l}}{{{text}}} \\")
    head = ["Task", *(escape(table.names[index]) for index in shown)]
    return latex_of(what, head, rows, "l" + "r" * len(shown), foot)


SLOT = 0.66  # share of a task's width over which the models are spread


def accuracy_by_babi_task(results: BabiResults) -> Figure | None:
    """Accuracy on the test set at the questions of each task and of all, every model in the mode that speaks for it.

    Of runs that compete only the one chosen on the validation set is drawn: a grid has more of them than fit.
    """
    if not results.test_sets:
        return None
    series = series_of_names(
        (marked_name(results, cell), cell.first.is_implicit)
        for data in results.test_sets
        for cell in speaking_cells(results, data)
    )
    panels, roles = [], []
    for data in results.test_sets:
        cells = speaking_cells(results, data)
        names = {id(cell): marked_name(results, cell) for cell in cells}
        draw = partial(_draw, cells=cells, names=names, series=series)
        panels.append(Panel(f"CatbAbI, {data}", draw, f"CatbAbI, {data}: accuracy on each task"))
        roles += [role for cell in cells for role in cell.roles]
    title = "Accuracy on each CatbAbI task"
    return Figure(
        "accuracy-by-babi-task", title, tuple(panels), tuple(series.values()), tuple(dict.fromkeys(roles)), is_wide=True
    )


def _draw(axis: Axes, cells: list[BabiCell], names: Mapping[int, str], series: Mapping[str, Series]) -> None:
    tasks = tasks_asked(cells)
    places = {task: place for place, task in enumerate(tasks, start=1)}
    axis.axvspan(-0.5, 0.5, color=BAND, linewidth=0, zorder=0)
    for index, cell in enumerate(cells):
        offset = SLOT * ((index + 0.5) / len(cells) - 0.5)
        mine = series[names[id(cell)]]
        _draw_spread(axis, offset, cell.spread("accuracy"), mine)
        for task, place in places.items():
            _draw_spread(axis, place + offset, task_spread(cell, task), mine)
    axis.set(xlim=(-0.5, len(tasks) + 0.5), ylim=(-0.03, 1.03), xlabel="task", ylabel="accuracy at questions")
    labels = ["all", *map(str, tasks)]
    axis.xaxis.set(major_locator=FixedLocator(list(range(len(labels)))))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: labels[round(value)] if value < len(labels) else ""))
    axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axis.grid(visible=False, axis="x")
    tell_if_empty(axis, [cell for cell in cells if cell.spread("accuracy").values])


def _draw_spread(axis: Axes, place: float, spread: Spread, series: Series) -> None:
    if spread.mean is None or spread.low is None or spread.high is None:
        return
    if len(spread.values) > 1:
        axis.plot([place, place], [spread.low, spread.high], color=series.color, linewidth=1.1, zorder=3)
    axis.plot(place, spread.mean, **series.line() | {"linestyle": "none", "markersize": 4.5}, zorder=4)
