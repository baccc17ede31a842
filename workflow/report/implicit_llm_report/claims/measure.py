"""Compute the numbers that a claim measures, for models or pairs of models, from the frame (inputs/frame.py).

In a comparison of two models, one run represents each side. Runs of a side compete only if the claim has `equal`
columns, and the runs agree in these, in the columns `same`, in training length and in size. Of competing runs, the one
with the best score on a validation set or in training is chosen. The score is the mean of the frame's column
`validation_loss` or `choice` over the seeds that all runs with a score share. The result of the comparison never
decides the choice. If several runs compete and none has a score, there is no number.

The number of a pair combines every seed of the first model with every seed of the second. If both models belong to one
run, in which they share their start, or if the claim requires it, only equal seeds are combined. If a seed has several
records, its value is their mean.
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

# The columns that a claim can list in `equal`, and the relative difference that is allowed.
EQUAL = {"num_parameters": 0.1, "train_tokens": 0.01, "train_flops": 0.1}
# Rows that agree in these columns form a cell: a number of one metric, with a value for each seed.
CELL = ("name", "data", "protocol", "length", "mode", "against", "column", "swept", "at")
COUNTED = ("accuracy_last10", "accuracy_sequence", "accuracy_token")  # these are shares of test tokens or sequences
Z_95 = 1.96  # 95 % of a normal distribution is within this many standard deviations
WORDS = {"difference": "minus", "ratio": "over", "tasks": "against"}


@dataclass(frozen=True)
class Measure:
    """A metric of all cells that match `of`.

    of: for columns of the frame, the required value, a list of allowed values, or {at_most: value}, which allows
    numbers above 0 up to this value. against: the same conditions for a second cell, which makes a pair with the first.
    Both agree in the columns `same` and, within EQUAL, in the columns `equal`. by: the number of a pair is the
    difference, the ratio, or the share of the tasks that the first model wins. size: the bounds of the second model's
    size divided by the first model's. seeds: "equal" combines only equal seeds, which trained on the same sequences in
    the same order. speaks: with "best" the best model decides, with "all" every model must meet the bound; None means
    "best" for a bound ">=" on a single model, and "all" otherwise.
    Raises: ValueError for an unknown metric or column.
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
        for column in self.equal:
            if column not in EQUAL:
                raise ValueError(f"column {column!r} has no allowed difference; use one of {', '.join(EQUAL)}")

    @property
    def words(self) -> str:
        """The name of the number for the reader."""
        of = f", {self.of['column']}" if "column" in self.of else ""
        return METRIC_WORDS[self.metric] + of + ("" if self.against is None else f", {self.unit}")

    @property
    def form(self) -> Literal["percent", "points", "ratio", "number"]:
        """The format of the number."""
        if self.metric == "above_chance":  # is itself a difference of two shares
            return "points"
        if self.against is not None and self.by != "tasks":
            return "ratio" if self.by == "ratio" else "points" if self.metric in SHARES else "number"
        return "percent" if self.metric in SHARES else "number"

    @property
    def unit(self) -> str:
        """The relation of the two models that the number expresses, or "above chance"; "" for any other number."""
        if self.against is None:
            return "above chance" if self.metric == "above_chance" else ""
        return "share of the tasks that are won" if self.by == "tasks" else self.by


@dataclass(frozen=True)
class Found:
    """The number of a model or pair of models.

    text: a description of the number for the reader. roles: the roles of the evaluations from which it was computed.
    num_samples: for a single model and a metric in COUNTED, the smallest number of test sequences of a seed; tokens do
    not count, because those of one sequence are not independent. of_pair: for two models and a metric in COUNTED, this
    number for each model.
    """

    spread: Spread = field(default_factory=Spread)
    text: str = ""
    run: str | None = None
    data: str | None = None
    modes: tuple[str, ...] = ()
    num_seeds: int = 0
    roles: tuple[str, ...] = ()
    num_samples: int | None = None
    of_pair: tuple[int, ...] = ()
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
        """The lowest and the highest end of the 95 % intervals of the seeds; None without `num_samples`."""
        if not self.spread.values or not self.num_samples:
            return None
        return wilson(min(self.spread.values), self.num_samples)[0], wilson(max(self.spread.values), self.num_samples)[
            1
        ]


def wilson(share: float, num_samples: int) -> tuple[float, float]:
    """Return the 95 % interval of a share by Wilson's score interval, in which 64 of 64 is at least 94 %."""
    scale = 1 + Z_95**2 / num_samples
    middle = (share + Z_95**2 / (2 * num_samples)) / scale
    half = Z_95 / scale * (share * (1 - share) / num_samples + (Z_95 / (2 * num_samples)) ** 2) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def choose(rivals: Sequence[Group]) -> tuple[Group, str | None]:
    """Return the rival with the best score, and a text that describes how it was chosen.

    The score is the loss on validation text if all rivals have such a loss, otherwise the column `choice`. Rivals
    without a score are not chosen. If none of several rivals has a score, return the first one and None. The text is
    empty for one rival.
    """
    if len(rivals) == 1:
        return rivals[0], ""
    by, scores = "loss on validation text", _scores(rivals, "validation_loss")
    if len(scores) < len(rivals):
        by = "accuracy on the validation set" if rivals[0].kind == "catbabi" else "training loss at the end"
        scores = _scores(rivals, "choice")
    if not scores:
        return rivals[0], None
    lost = len(rivals) - len(scores)
    without = f", {lost} of them without a number there" if lost else ""
    return rivals[min(scores)[1]], f" [chosen of {len(rivals)} by {by}{without}]"


def _scores(rivals: Sequence[Group], column: str) -> list[tuple[float, int]]:
    """Return mean score and index of each rival with scores.

    The mean is over the seeds for which all these rivals have a score. If there is no such seed, it is over all seeds.
    """
    known = ((index, cell.rows.dropna(subset=[column])) for index, cell in enumerate(rivals))
    scored = [(index, rows) for index, rows in known if len(rows)]
    shared = set.intersection(*(set(rows["seed"]) for _, rows in scored)) if scored else set()
    return [
        (float((rows[rows["seed"].isin(shared)] if shared else rows).drop_duplicates("seed")[column].mean()), index)
        for index, rows in scored
    ]


def in_rivals(cells: Sequence[Group], same: Sequence[str], equal: Sequence[str]) -> list[list[Group]]:
    """Return groups of cells that agree with the first of the group: exactly in `same`, within EQUAL in `equal`."""
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
    """Return the number of each matching model or chosen pair; models that were trained elsewhere do not match."""
    rows = frame[(frame["kind"] == measure.kind) & (frame["metric"] == measure.metric) & frame["source"].isna()]
    firsts = _cells(measure, measure.of, rows) if len(rows) else []
    if measure.against is None or not firsts:
        return [_alone(measure, cell) for cell in firsts]
    seconds = _cells(measure, measure.against, rows)
    partners = {id(cell): [other for other in seconds if _is_pair(measure, cell, other)] for cell in firsts}
    chosen = [choose(rivals) for rivals in _rivals(measure, [cell for cell in firsts if partners[id(cell)]])]
    return [
        _pair(measure, first, choose(rivals)) for first in chosen for rivals in _rivals(measure, partners[id(first[0])])
    ]


def _rivals(measure: Measure, cells: Sequence[Group]) -> list[list[Group]]:
    """Return groups of competing cells; each cell is a group of its own if the claim has no `equal` columns."""
    if not measure.equal:
        return [[cell] for cell in cells]
    return in_rivals(cells, (*measure.same, "train_length"), (*measure.equal, "num_parameters"))


def _cells(measure: Measure, wanted: Mapping[str, Any], rows: pd.DataFrame) -> list[Group]:
    """Return the cells that match `wanted`, without cells of sweeps unless `wanted` has the column `swept`.

    Only the test set of CatbAbI counts, and its single tasks only if the measure has `by: tasks`.
    """
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
    samples = _num_samples(cell) if measure.metric in COUNTED else None
    text = f"{_named(cell)}, {_test(cell)}{seeds_words(spread)}"
    return Found(
        spread, text, cell.name, cell.data or "", modes, num_seeds=len(spread.values), roles=cell.roles,
        num_samples=samples, train_tokens=cell.mean("train_tokens"), num_parameters=cell.mean("num_parameters"),
    )  # fmt: skip


def _pair(measure: Measure, *choices: tuple[Group, str | None]) -> Found:
    """Return the number of a pair, whose models come with the texts of `choose`.

    The number is missing if a text is None: no score chose the model, and the test set must not choose it.
    """
    (first, _), (second, _) = choices
    values = _tasks_by_seed if measure.by == "tasks" else partial(Group.by_seed, metric=measure.metric)
    mine, others = values(first), values(second)
    is_by_seed = measure.seeds == "equal" or first.run == second.run
    pairs = [pair for pair in product(mine, others) if pair[0] == pair[1] or not is_by_seed]
    spread = Spread.of(_combined(measure.by, mine[seed], others[other]) for seed, other in pairs)
    measured = [sum(value is not None for value in side.values()) for side in (mine, others)]
    num_seeds = len(spread.values) if measure.seeds == "equal" else min(measured)
    seeds = "one seed each" if len(mine) == len(others) == 1 else f"{len(mine)} and {len(others)} seeds"
    if None in [words for _, words in choices]:
        spread, num_seeds, seeds = Spread((), 1), 0, "no score chooses among the runs"
    models = f" {WORDS[measure.by]} ".join(_named(cell) + (words or "") for cell, words in choices)
    text = f"{models}, {_test(first)}{seeds}{', no spread' if len(spread.values) == 1 else ''}"
    return Found(
        spread, text, first.name, first.data or "", (first.mode, second.mode), num_seeds=num_seeds,
        roles=roles_of((first, second)),
        of_pair=(_num_samples(first), _num_samples(second)) if measure.metric in COUNTED else (),
        train_tokens=first.mean("train_tokens"), num_parameters=first.mean("num_parameters"),
    )  # fmt: skip


def _num_samples(cell: Group) -> int:
    """Return the smallest number of test sequences of a seed."""
    return int(min(number or 0 for number in cell.rows["num_samples"]))


def _named(cell: Group) -> str:
    return f"{cell.name} ({cell.mode}{' against ' + cell.against if cell.against else ''})" if cell.mode else cell.name


def _test(cell: Group) -> str:
    return title_of(cell, ("column", "group" if cell.group else "data", "monoid", "length", "hard_fraction")) + ", "


def _tasks_by_seed(cell: Group) -> dict[Any, dict[str, float] | None]:
    known = {one.seed: one.rows.dropna(subset=["task", "value"]) for one in groups(cell.rows, ("seed",))}
    return {seed: dict(zip(rows["task"], rows["value"], strict=True)) or None for seed, rows in known.items()}


def _combined(by: str, first: Any, second: Any) -> float | None:
    """Return the difference, ratio, or share of common tasks that the first model wins; None if it is not defined."""
    if first is None or second is None:
        return None
    if by == "tasks":
        tasks = first.keys() & second.keys()
        return sum(first[task] > second[task] for task in tasks) / len(tasks) if tasks else None
    if by == "ratio":
        return first / second if second else None
    return float(first - second)
