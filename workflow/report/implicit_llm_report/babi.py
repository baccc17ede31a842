"""Answers to the questions of CatbAbI: which runs speak, the tables and the figure.

Figures, tables and claims show the test set of a data set; its validation set only chooses runs. The most accurate run
on it speaks for those that compete, whatever it does on the test set. Runs compete that are equal in all that a claim
compares by: kind, family, layers and training tokens. A grid over the learning rate is one such field; batch sizes
train on different numbers of tokens and are fields of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from implicit_llm_report.axes import tell_if_empty
from implicit_llm_report.frame import COST, Group, Spread, groups, mode_rank, roles_of
from implicit_llm_report.perplexity import is_close
from implicit_llm_report.published import Published
from implicit_llm_report.style import BAND, Series, series_of_names
from implicit_llm_report.svg import Figure, Panel
from implicit_llm_report.table_text import fields, files_of, rounded, spread_fields

TEST, VALIDATION = "test", "valid"  # splits of a data set
WINDOWED = "windowed"
# How a protocol is named on the page.
PROTOCOL_WORDS = {WINDOWED: "every row from an empty state", "carried": "state carried over all stories"}


@dataclass(frozen=True)
class BabiResults:
    """The rows of CatbAbI, with the ways in which figures, tables and claims look at them."""

    rows: pd.DataFrame

    @cached_property
    def cells(self) -> list[Group]:
        """One a (run, phase, data set, protocol, mode): by data set, implicit runs first, a run's headline first."""
        return groups(self.rows, ("run", "phase", "data", "protocol", "mode"), order=_order)

    @property
    def test_sets(self) -> list[str]:
        """What is shown and judged; validation sets are left out."""
        return sorted({cell.data for cell in self.cells if cell.split == TEST})

    def protocols(self, data: str) -> list[str | None]:
        """In which the models were evaluated on a data set, the one that speaks first."""
        found = {cell.protocol for cell in self.cells if cell.data == data}
        return sorted(found, key=lambda protocol: (protocol != self.headline_protocol(data), protocol or ""))

    def headline_protocol(self, data: str) -> str | None:
        """The protocol of figures, choices and claims: windowed where it was run, as every model can follow it."""
        found = {cell.protocol for cell in self.cells if cell.data == data}
        return WINDOWED if WINDOWED in found else min(found, key=str, default=None)

    def of(self, data: str, protocol: str | None = None, *, headline_only: bool = False) -> list[Group]:
        """The cells of a data set, in the protocol that speaks for it unless another is named."""
        wanted = protocol or self.headline_protocol(data)
        mine = [cell for cell in self.cells if (cell.data, cell.protocol) == (data, wanted)]
        return [cell for cell in mine if cell.is_headline] if headline_only else mine

    def validated(self, tested: Group) -> Group | None:
        """The cell of the validation set, of the runs, protocol and mode of a cell of the test set."""

        def key(cell: Group) -> tuple:
            return cell.run, cell.phase, cell.data_set, cell.protocol, cell.mode

        mine = (cell for cell in self.cells if cell.split == VALIDATION and key(cell) == key(tested))
        return next(mine, None)

    def validation(self, cell: Group) -> Spread:
        """Accuracy at all questions of the validation set."""
        validated = self.validated(cell)
        return Spread(()) if validated is None else validated.spread("accuracy")


def _order(cell: Group) -> tuple:
    kind = (cell.data, not cell.is_implicit, cell.run, cell.phase or "")
    return (*kind, not cell.is_headline, *mode_rank(cell.mode))


def of_task(cell: Group, metric: str, task: int | None) -> Spread:
    """A metric on one task over seeds, of all tasks together for None; a seed without a number counts as missing."""
    if task is None:
        return cell.spread(metric)
    return Spread.of((detail.get(f"{metric}_by_task") or {}).get(str(task)) for detail in cell.details)


def questions_by_task(cell: Group) -> Mapping[str, int]:
    """How many there are of each task asked."""
    return {task: number for found in cell.curves("num_questions_by_task") for task, number in found.items()}


def tasks_asked(cells: Iterable[Group]) -> list[int]:
    """The tasks with questions in any of the cells."""
    return sorted({int(task) for cell in cells for task in questions_by_task(cell)})


SAME_TOKENS = 0.01


@dataclass(frozen=True)
class Choice:
    """Runs that compete on a test set; `chosen` is None where several do and none has a validation number."""

    rivals: tuple[Group, ...]
    chosen: Group | None
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
            cells[0].num_layers,
            cells[0].family,
            *(
                _choose(results, [cell for cell in cells if cell.is_implicit is is_implicit])
                for is_implicit in (True, False)
            ),
        )
        for cells in _equal_cells(results.of(data, headline_only=True))
    )


def speaking_cells(results: BabiResults, data: str) -> list[Group]:
    """The headline cells without those that others of their field were chosen over."""
    lost = {
        cell
        for choice in _choices(results, data)
        for cell in choice.rivals
        if choice.chosen is not None and cell is not choice.chosen
    }
    return [cell for cell in results.of(data, headline_only=True) if cell not in lost]


def chosen_variants(results: BabiResults, data: str) -> set[tuple[str, str | None]]:
    """The runs, with the phase that left them so, that were chosen over others."""
    chosen = [choice.chosen for choice in _choices(results, data) if len(choice.rivals) > 1]
    return {(cell.run, cell.phase) for cell in chosen if cell is not None}


def marked_name(results: BabiResults, cell: Group) -> str:
    """The name of a cell's line, which says so where its run was chosen over others."""
    is_chosen = (cell.run, cell.phase) in chosen_variants(results, cell.data)
    return cell.name + (" (chosen on validation)" if is_chosen else "")


def _choices(results: BabiResults, data: str) -> list[Choice]:
    return [choice for field in fields_of(results, data) for choice in (field.implicit, field.explicit) if choice]


def _equal_cells(cells: Sequence[Group]) -> Iterator[list[Group]]:
    """The cells by layers, family and tokens, fewest tokens first."""
    found: list[list[Group]] = []
    for cell in sorted(cells, key=lambda cell: cell.train_tokens or 0.0):
        mine = (group for group in found if _is_equal(group[0], cell))
        group = next(mine, None)
        if group is None:
            found.append([cell])
        else:
            group.append(cell)
    yield from found


def _is_equal(first: Group, other: Group) -> bool:
    is_alike = (first.num_layers, first.family) == (other.num_layers, other.family)
    return is_alike and is_close(first.train_tokens, other.train_tokens, SAME_TOKENS)


def _choose(results: BabiResults, rivals: Sequence[Group]) -> Choice | None:
    if not rivals:
        return None
    if len(rivals) == 1:
        return Choice(tuple(rivals), rivals[0], 0)
    scores = {cell: results.validation(cell).mean for cell in rivals}
    scored = [cell for cell in rivals if scores[cell] is not None]
    best = max(scored, key=lambda cell: scores[cell] or 0.0, default=None)
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
    cells: tuple[Group, ...]
    names: tuple[str, ...]
    headlines: tuple[bool, ...]
    chosen: tuple[bool, ...]
    rows: tuple[BabiRow, ...]

    @property
    def protocol_words(self) -> str:
        return PROTOCOL_WORDS.get(self.protocol or "", self.protocol or "protocol not recorded")

    @property
    def roles(self) -> tuple[str, ...]:
        return roles_of(self.cells)


def babi_tables(results: BabiResults) -> list[BabiTable]:
    """One table a test set and protocol."""
    return [_table(results, data, protocol) for data in results.test_sets for protocol in results.protocols(data)]


def _table(results: BabiResults, data: str, protocol: str | None) -> BabiTable:
    cells = results.of(data, protocol)
    tasks = (None, *tasks_asked(cells))
    rows = [BabiRow(task, tuple(of_task(cell, "accuracy", task) for cell in cells)) for task in tasks]
    validation = tuple(results.validation(cell) for cell in cells)
    if any(spread.values for spread in validation):
        validation_set = next(found.data for cell in cells if (found := results.validated(cell)))
        rows.append(BabiRow(None, validation, validation_set))
    variants = chosen_variants(results, data)
    chosen = tuple((cell.run, cell.phase) in variants for cell in cells)
    names = tuple(marked_name(results, cell) for cell in cells)
    headlines = tuple(cell.is_headline for cell in cells)
    speaks = protocol == results.headline_protocol(data)
    return BabiTable(data, protocol, speaks, tuple(cells), names, headlines, chosen, tuple(rows))


def babi_files(tables: Sequence[BabiTable], published: Published) -> dict[str, str]:
    """One line a (model, mode, task), task 0 for all questions; then the yardsticks of other papers.

    Column `split` tells the lines of the validation set from those of the test set.
    """
    rows = [(f"CatbAbI, {table.data}, {table.protocol_words}", list(_csv_rows(table))) for table in tables]
    yardsticks: list[dict[str, object]] = [
        {
            **{"run": number.model, "num_layers": number.num_layers, "mode": number.training, "split": "test"},
            **{"task": 0, "accuracy_mean": rounded(number.value / 100)},
            **{"source": number.source, "mark": number.mark},
        }
        for number in published.babi
    ]
    return files_of(rows, {"questions": "Questions"}, {"accuracy": "accuracy"}, by="run", more=yardsticks)


def _csv_rows(table: BabiTable) -> Iterator[dict[str, object]]:
    for (index, cell), row in product(enumerate(table.cells), table.rows):
        spread, is_all, is_test = row.spreads[index], row.task is None, not row.is_validation
        questions = cell.num_questions if is_all else questions_by_task(cell).get(str(row.task))
        words = spread_fields(("lm_accuracy", "lm_perplexity"), partial(of_task, cell, task=row.task))
        yield {
            **fields(cell, "run", "model", "family", "num_layers", "num_parameters", "phase", "solver"),
            **{"data": row.validation_set or cell.data, **fields(cell, "protocol", "mode")},
            **{"split": "test" if is_test else "validation", "is_chosen": int(table.chosen[index])},
            **{
                "num_seeds": len(spread.values),
                "task": row.task or 0,
                "questions": row.name,
                "num_questions": questions if is_test else None,
            },
            **spread_fields(["accuracy"], {"accuracy": spread}.__getitem__),
            **{name: number if is_test else None for name, number in words.items()},
            f"{COST}_mean": rounded(cell.spread(COST).mean) if is_test else None,
        }


SLOT = 0.66  # share of a task's width over which the models are spread


def accuracy_by_babi_task(results: BabiResults) -> Figure | None:
    """Accuracy on the test set at the questions of each task and of all, every model in the mode that speaks for it.

    Of runs that compete only the one chosen on the validation set is drawn: a grid has more of them than fit.
    """
    if not results.test_sets:
        return None
    shown = {
        data: {marked_name(results, cell): cell for cell in speaking_cells(results, data)} for data in results.test_sets
    }
    series = series_of_names((name, cell.is_implicit) for cells in shown.values() for name, cell in cells.items())
    panels = tuple(
        Panel(
            f"CatbAbI, {data}",
            partial(_draw, cells=cells, series=series),
            f"CatbAbI, {data}: accuracy on each task",
        )
        for data, cells in shown.items()
    )
    roles = roles_of(cell for cells in shown.values() for cell in cells.values())
    title = "Accuracy on each CatbAbI task"
    return Figure("accuracy-by-babi-task", title, panels, tuple(series.values()), roles, is_wide=True)


def _draw(axis: Axes, cells: Mapping[str, Group], series: Mapping[str, Series]) -> None:
    tasks = tasks_asked(cells.values())
    axis.axvspan(-0.5, 0.5, color=BAND, linewidth=0, zorder=0)
    for index, (name, cell) in enumerate(cells.items()):
        offset = SLOT * ((index + 0.5) / len(cells) - 0.5)
        for place, task in enumerate((None, *tasks)):
            _draw_spread(axis, place + offset, of_task(cell, "accuracy", task), series[name])
    axis.set(xlim=(-0.5, len(tasks) + 0.5), ylim=(-0.03, 1.03), xlabel="task", ylabel="accuracy at questions")
    labels = ["all", *map(str, tasks)]
    axis.xaxis.set(major_locator=FixedLocator(list(range(len(labels)))))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: labels[round(value)] if value < len(labels) else ""))
    axis.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axis.grid(visible=False, axis="x")
    tell_if_empty(axis, [cell for cell in cells.values() if cell.spread("accuracy").values])


def _draw_spread(axis: Axes, place: float, spread: Spread, series: Series) -> None:
    if spread.mean is None or spread.low is None or spread.high is None:
        return
    if len(spread.values) > 1:
        axis.plot([place, place], [spread.low, spread.high], color=series.color, linewidth=1.1, zorder=3)
    axis.plot(place, spread.mean, **series.line() | {"linestyle": "none", "markersize": 4.5}, zorder=4)
