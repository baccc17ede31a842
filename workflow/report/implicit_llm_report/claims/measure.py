"""Measure claims: find a number of models, or of one model beside another, in the rows of the frame (inputs/frame.py).

In a pair, one run represents each side. If several runs compete because they are equal in all compared columns, the one
with the best score on a validation set or in training is chosen (the frame's columns `validation_loss` and `choice`),
over the seeds that all of them have. The number of the pair never decides; without scores there is no number.

The number of a pair is computed for every seed of the first with every seed of the second. Only equal seeds are paired
if both sides are of one run and therefore share their start, or if the claim requires it. The value of a seed with
several records is their mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Literal

import pandas as pd

from implicit_llm_contracts.hints import nearest
from implicit_llm_report.inputs.frame import (
    COLUMNS,
    METRIC_WORDS,
    SHARES,
    Group,
    Spread,
    groups,
    is_close,
    roles_of,
    seeds_words,
)
from implicit_llm_report.tables import title_of

# Columns in which compared models must be equal, and the share by which they may differ.
EQUAL = {"num_parameters": 0.1, "train_tokens": 0.01, "train_flops": 0.1}
# Columns that identify a number of a metric.
CELL = ("name", "data", "protocol", "length", "mode", "against", "column", "swept", "at")
COUNTED = ("accuracy_last10", "accuracy_sequence", "accuracy_token")  # shares of test tokens
Z_95 = 1.96  # standard deviations of a two-sided 95 % interval
WORDS = {"difference": "minus", "ratio": "over", "tasks": "against"}


@dataclass(frozen=True)
class Measure:
    """A metric of all cells that match `of`: columns of the frame with a value, a list of values or {at_most: value}.

    against: the columns of a second cell, which agrees with the first in the columns `same` and, within EQUAL, in the
    columns `equal`. by: the number is then the difference, the ratio, or the share of tasks on which the first is
    better. size: bounds of the second model's size over that of the first. seeds: "equal" pairs each seed only with the
    same seed, which trained on the same sequences in the same order. speaks: with "best" the best model decides, with
    "all" every model must meet the bound; None means "best" for a claim that something can be done (`>=`) without
    `against`, and "all" for other claims.
    """

    metric: str
    kind: str = "word_problem"
    of: Mapping[str, Any] = field(default_factory=dict)
    against: Mapping[str, Any] | None = None
    same: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    size: tuple[float, float] | None = None
    by: Literal["difference", "ratio", "tasks"] = "difference"
    seeds: Literal["all", "equal"] = "all"
    speaks: Literal["best", "all"] | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRIC_WORDS:
            raise ValueError(f"metric {self.metric!r} is unknown; use one of {', '.join(sorted(METRIC_WORDS))}")
        for column in (*self.of, *(self.against or ()), *self.same, *self.equal):
            if column not in COLUMNS:
                raise ValueError(f"column {column!r} is unknown; {nearest(column, COLUMNS)}")

    @property
    def words(self) -> str:
        """A description of the number for the reader."""
        of = f", {self.of['column']}" if "column" in self.of else ""
        return METRIC_WORDS[self.metric] + of + ("" if self.against is None else f", {self.unit}")

    @property
    def form(self) -> Literal["percent", "points", "ratio", "number"]:
        """The format of the number."""
        if self.against is not None and self.by != "tasks":
            return "ratio" if self.by == "ratio" else "points" if self.metric in SHARES else "number"
        return "percent" if self.metric in SHARES else "number"

    @property
    def unit(self) -> str:
        """The text after the number if it is not the metric itself: how two models are combined, or "above chance"."""
        if self.against is None:
            return "above chance" if self.metric == "above_chance" else ""
        return "share of the tasks that are won" if self.by == "tasks" else self.by


@dataclass(frozen=True)
class Found:
    """The number of a model, or pair of models: `text` for the reader, `roles` the evaluations behind it.

    num_samples: for a share, the smallest number of test sequences of a seed; tokens of a sequence are not independent.
    """

    spread: Spread = field(default_factory=Spread)
    text: str = ""
    run: str | None = None
    data: str | None = None
    modes: tuple[str, ...] = ()
    num_seeds: int = 0
    roles: tuple[str, ...] = ()
    num_samples: int | None = None
    train_tokens: float | None = None
    num_parameters: float | None = None

    @property
    def is_lacking(self) -> bool:
        return self.spread.mean is None or self.spread.num_missing > 0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of a single seed's share (Wilson's score interval); None for other numbers."""
        return self.bounds if len(self.spread.values) == 1 else None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lower end of the lowest seed's 95 % interval, and the upper end of the highest seed's."""
        if not self.spread.values or not self.num_samples:
            return None
        return wilson(min(self.spread.values), self.num_samples)[0], wilson(max(self.spread.values), self.num_samples)[
            1
        ]


def wilson(share: float, num_samples: int) -> tuple[float, float]:
    """Return the 95 % interval of a share by Wilson's score interval; 64 of 64 is at least 94 %."""
    scale = 1 + Z_95**2 / num_samples
    middle = (share + Z_95**2 / (2 * num_samples)) / scale
    half = Z_95 / scale * (share * (1 - share) / num_samples + (Z_95 / (2 * num_samples)) ** 2) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Choice:
    """The cell that represents its rivals; `words` explains the choice and is None if no score decides."""

    cell: Group
    words: str | None = ""


def choose(rivals: Sequence[Group]) -> Choice:
    """Return the rival with the best score: on validation text if all rivals have that score, otherwise in training."""
    if len(rivals) == 1:
        return Choice(rivals[0])
    by, scores = "loss on validation text", _scores(rivals, "validation_loss")
    if len(scores) < len(rivals):
        by = "accuracy on the validation set" if rivals[0].kind == "catbabi" else "training loss at the end"
        scores = _scores(rivals, "choice")
    if not scores:
        return Choice(rivals[0], None)
    lost = len(rivals) - len(scores)
    without = f", {lost} of them without a number there" if lost else ""
    return Choice(rivals[min(scores)[1]], f" [chosen of {len(rivals)} by {by}{without}]")


def _scores(rivals: Sequence[Group], column: str) -> list[tuple[float, int]]:
    """Return the score of each rival that has one, with its index: the mean over the seeds that all of them have."""
    scored = [(index, cell.rows.dropna(subset=[column])) for index, cell in enumerate(rivals)]
    scored = [(index, rows) for index, rows in scored if len(rows)]
    shared = set.intersection(*(set(rows["seed"]) for _, rows in scored)) if scored else set()
    return [
        (float((rows[rows["seed"].isin(shared)] if shared else rows).drop_duplicates("seed")[column].mean()), index)
        for index, rows in scored
    ]


def in_rivals(cells: Sequence[Group], same: Sequence[str], equal: Sequence[str]) -> list[list[Group]]:
    """Return the groups of competing cells, which are equal in the columns `same` and close in the columns `equal`."""
    found: list[list[Group]] = []
    for cell in cells:
        mine: list[Group] = next((rivals for rivals in found if _is_alike(rivals[0], cell, same, equal)), [])
        if not mine:
            found.append(mine)
        mine.append(cell)
    return found


def _is_alike(first: Group, other: Group, same: Sequence[str], equal: Sequence[str]) -> bool:
    return all(getattr(first, column) == getattr(other, column) for column in same) and all(
        is_close(first.mean(column), other.mean(column), EQUAL[column]) for column in equal
    )


def find(measure: Measure, frame: pd.DataFrame) -> list[Found]:
    """Find every competing model's number; a model that was tested without a number counts it in its spread."""
    rows = frame[(frame["kind"] == measure.kind) & (frame["metric"] == measure.metric) & frame["source"].isna()]
    firsts = _cells(measure, measure.of, rows) if len(rows) else []
    if measure.against is None or not firsts:
        return [_alone(measure, cell) for cell in firsts]
    seconds = _cells(measure, measure.against, rows)
    pairs = [(cell, [other for other in seconds if _is_pair(measure, cell, other)]) for cell in firsts]
    partners = {id(cell): others for cell, others in pairs if others}
    chosen = [choose(rivals) for rivals in _rivals(measure, [cell for cell, others in pairs if others])]
    return [
        _pair(measure, first, choose(rivals))
        for first in chosen
        for rivals in _rivals(measure, partners[id(first.cell)])
    ]


def _rivals(measure: Measure, cells: Sequence[Group]) -> list[list[Group]]:
    """Return the groups of cells that compete; without columns to compare by, no cells do."""
    if not measure.equal:
        return [[cell] for cell in cells]
    return in_rivals(cells, (*measure.same, "train_length"), (*measure.equal, "num_parameters"))


def _cells(measure: Measure, wanted: Mapping[str, Any], rows: pd.DataFrame) -> list[Group]:
    """Return the cells of models trained here, in `rows`; sweeps only if they are requested."""
    for column, value in {"swept": None, **wanted}.items():
        if isinstance(value, Mapping):
            rows = rows[rows[column].astype(float).between(0, value["at_most"], inclusive="right")]
        else:
            rows = rows[rows[column].isin(value if isinstance(value, list) else [value])]
    if measure.kind == "catbabi":
        rows = rows[(rows["split"] == "test") & (rows["task"].isna() | (measure.by == "tasks"))]
    return groups(rows, CELL)


def _is_pair(measure: Measure, first: Group, other: Group) -> bool:
    sizes = first.num_parameters, other.num_parameters
    is_size = measure.size is None or (all(sizes) and measure.size[0] <= sizes[1] / sizes[0] <= measure.size[1])
    is_other = first.rows.index[0] != other.rows.index[0]
    return is_other and is_size and _is_alike(first, other, measure.same, measure.equal)


def _alone(measure: Measure, cell: Group) -> Found:
    spread = Spread.of(cell.by_seed(measure.metric).values())
    modes = tuple(filter(None, (cell.mode, cell.against)))
    is_count = measure.metric in COUNTED
    num_samples = min(number or 0 for number in cell.rows["num_samples"]) if is_count else None
    text = f"{_named(cell)}, {_test(cell)}{seeds_words(spread)}"
    seeds = len(spread.values)
    return Found(spread, text, cell.name, cell.data or "", modes, seeds, cell.roles, num_samples, *_training(cell))


def _pair(measure: Measure, *choices: Choice) -> Found:
    """Return the number of a pair; there is none if no score chooses a model, because the test set must not choose."""
    first, second = (choice.cell for choice in choices)
    values = _tasks_by_seed if measure.by == "tasks" else partial(Group.by_seed, metric=measure.metric)
    mine, others = values(first), values(second)
    is_by_seed = measure.seeds == "equal" or first.run == second.run
    pairs = [pair for pair in product(mine, others) if pair[0] == pair[1] or not is_by_seed]
    spread = Spread.of(_combined(measure.by, mine[seed], others[other]) for seed, other in pairs)
    num_seeds = min(sum(value is not None for value in side.values()) for side in (mine, others))
    if measure.seeds == "equal":
        num_seeds = len(spread.values)
    seeds = "one seed each" if len(mine) == len(others) == 1 else f"{len(mine)} and {len(others)} seeds"
    if any(choice.words is None for choice in choices):
        spread, num_seeds, seeds = Spread((), 1), 0, "no score chooses among the runs"
    words = f" {WORDS[measure.by]} ".join(_named(choice.cell) + (choice.words or "") for choice in choices)
    text = f"{words}, {_test(first)}{seeds}{', no spread' if len(spread.values) == 1 else ''}"
    modes, roles = (first.mode, second.mode), roles_of((first, second))
    return Found(spread, text, first.name, first.data or "", modes, num_seeds, roles, None, *_training(first))


def _training(cell: Group) -> tuple[float | None, float | None]:
    return cell.mean("train_tokens"), cell.mean("num_parameters")


def _named(cell: Group) -> str:
    return f"{cell.name} ({cell.mode}{' against ' + cell.against if cell.against else ''})" if cell.mode else cell.name


def _test(cell: Group) -> str:
    return title_of(cell, ("column", "group" if cell.group else "data", "monoid", "length", "hard_fraction")) + ", "


def _tasks_by_seed(cell: Group) -> dict[Any, dict[str, float] | None]:
    known = {one.seed: one.rows.dropna(subset=["task", "value"]) for one in groups(cell.rows, ("seed",))}
    return {seed: dict(zip(rows["task"], rows["value"], strict=True)) or None for seed, rows in known.items()}


def _combined(by: str, first: Any, second: Any) -> float | None:
    """Combine the numbers of two models; for tasks, the share of common tasks on which the first is more accurate."""
    if first is None or second is None:
        return None
    if by == "tasks":
        tasks = first.keys() & second.keys()
        return sum(first[task] > second[task] for task in tasks) / len(tasks) if tasks else None
    if by == "ratio":
        return first / second if second else None
    return float(first - second)
