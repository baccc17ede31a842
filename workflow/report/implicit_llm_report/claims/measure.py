"""What a claim measures: a number of models, or of one model beside another, as rows of the frame (inputs/frame.py).

Of two models one run represents each side. Where several runs compete, equal in all that the claim compares by, the one
with the best score in training or on a validation set is chosen (the frame's column `choice`), never by what comes out
of the pair; without scores there is no number.

The number of a pair is formed for every seed of the first with every seed of the second; of the same seed, where both
are of one run and so share their start. The value of a seed with several records is their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd

from implicit_llm_contracts.hints import nearest
from implicit_llm_report.inputs.frame import (
    COLUMNS,
    METRIC_WORDS,
    Group,
    Spread,
    groups,
    is_close,
    seeds_words,
    shares_of,
)

# Columns by which models can be compared, and the share by which they may differ there.
EQUAL = {"num_parameters": 0.1, "train_tokens": 0.01, "train_flops": 0.1}
# Columns that identify a number of a metric.
CELL = ("name", "data", "protocol", "length", "mode", "against", "column", "swept", "at")
COUNTED = ("accuracy_last10", "accuracy_sequence", "accuracy_token")  # shares of what was asked
WORDS = {"difference": "minus", "ratio": "over", "tasks": "against"}
ByTask = Mapping[str, float]


@dataclass(frozen=True)
class Measure:
    """A metric of all cells that have `of`: columns of the frame with their values, or {at_most: value}.

    against: the columns of a second cell, which agrees with the first in the columns `same` and, within EQUAL, in the
    columns `equal`; the number is then the difference, the ratio, or the share of the tasks that the first wins.
    size: bounds of the second model's size over that of the first. speaks: "best" lets the model that does best
    decide, "all" asks it of every one; None lets the best one show that something can be done (`at_least`), and asks
    all of the rest and of pairs.
    """

    metric: str
    kind: str = "word_problem"
    of: Mapping[str, Any] = field(default_factory=dict)
    against: Mapping[str, Any] | None = None
    same: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    size: tuple[float, float] | None = None
    by: Literal["difference", "ratio", "tasks"] = "difference"
    speaks: Literal["best", "all"] | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRIC_WORDS:
            raise ValueError(f"metric {self.metric!r} is unknown; use one of {', '.join(sorted(METRIC_WORDS))}")
        for column in (*self.of, *(self.against or ()), *self.same, *self.equal):
            if column not in COLUMNS:
                raise ValueError(f"column {column!r} is unknown; {nearest(column, COLUMNS)}")

    @property
    def words(self) -> str:
        """What the number is, for the reader."""
        of = f", {self.of['column']}" if "column" in self.of else ""
        compared = {"difference": ", difference", "ratio": ", ratio", "tasks": ", share of the tasks that are won"}
        return METRIC_WORDS[self.metric] + of + ("" if self.against is None else compared[self.by])


@dataclass(frozen=True)
class Found:
    """The number of a model, or pair of models: `text` for the reader, `roles` the evaluations behind it.

    num_samples: of a share, the fewest test sequences of a seed; their tokens are not independent of each other.
    """

    spread: Spread
    text: str
    run: str
    data: str
    modes: tuple[str, ...]
    num_seeds: int
    roles: tuple[str, ...]
    num_samples: int | None = None

    @property
    def is_lacking(self) -> bool:
        return self.spread.mean is None or self.spread.num_missing > 0


@dataclass(frozen=True)
class Choice:
    """The cell that represents its rivals, None where nothing chooses; `words` says how it was chosen."""

    cell: Group | None
    rivals: Sequence[Group]
    words: str = ""


def choose(rivals: Sequence[Group]) -> Choice:
    """The rival with the best score, of those that have one; one without rivals needs none."""
    if len(rivals) == 1:
        return Choice(rivals[0], rivals)
    scores = [(score, index) for index, cell in enumerate(rivals) if (score := cell.mean("choice")) is not None]
    if not scores:
        return Choice(None, rivals)
    by = "accuracy on the validation set" if rivals[0].kind == "catbabi" else "training loss at the end"
    lost = len(rivals) - len(scores)
    without = f", {lost} of them without a number there" if lost else ""
    return Choice(rivals[min(scores)[1]], rivals, f" [chosen of {len(rivals)} by {by}{without}]")


def in_rivals(cells: Sequence[Group], same: Sequence[str], equal: Sequence[str]) -> list[list[Group]]:
    """The cells that compete: alike in the columns `same`, and equal in the columns `equal` to the first of them."""
    found: list[list[Group]] = []
    for cell in cells:
        mine = next((rivals for rivals in found if _is_alike(rivals[0], cell, same, equal)), None)
        if mine is None:
            found.append([cell])
        else:
            mine.append(cell)
    return found


def _is_alike(first: Group, other: Group, same: Sequence[str], equal: Sequence[str]) -> bool:
    return all(getattr(first, column) == getattr(other, column) for column in same) and all(
        is_close(first.mean(column), other.mean(column), EQUAL[column]) for column in equal
    )


def find(measure: Measure, frame: pd.DataFrame) -> list[Found]:
    """Of every model that competes for it; one that was tested and gave no number has a spread that counts it."""
    firsts = _cells(measure, measure.of, frame)
    if measure.against is None:
        return [_alone(measure, cell) for cell in firsts]
    seconds = _cells(measure, measure.against, frame)
    partners = [[other for other in seconds if _is_pair(measure, cell, other)] for cell in firsts]
    paired = {id(cell): others for cell, others in zip(firsts, partners, strict=True) if others}
    firsts = [cell for cell in firsts if id(cell) in paired]
    found = []
    for rivals in _rivals(measure, firsts):
        first = choose(rivals)
        others = _rivals(measure, paired[id(first.cell or rivals[0])])
        found += [_pair(measure, first, choose(other)) for other in others]
    return found


def _rivals(measure: Measure, cells: Sequence[Group]) -> list[list[Group]]:
    """Cells do not compete where the claim compares by nothing."""
    if not measure.equal:
        return [[cell] for cell in cells]
    return in_rivals(cells, (*measure.same, "train_length"), (*measure.equal, "num_parameters"))


def _cells(measure: Measure, wanted: Mapping[str, Any], frame: pd.DataFrame) -> list[Group]:
    """Of models trained here; sweeps only where they are asked for."""
    rows = frame[(frame["kind"] == measure.kind) & (frame["metric"] == measure.metric) & frame["source"].isna()]
    for column, value in {"swept": None, **wanted}.items():
        rows = rows[np.array([_agrees(one, value) for one in rows[column]], bool)]
    if measure.kind == "catbabi":
        rows = rows[(rows["split"] == "test") & (rows["task"].isna() | (measure.by == "tasks"))]
    return groups(rows, CELL)


def _agrees(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return value is not None and 0 < value <= wanted["at_most"]
    return bool(value == wanted)


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
    return Found(spread, text, cell.name, cell.data or "", modes, len(spread.values), cell.roles, num_samples)


def _pair(measure: Measure, *choices: Choice) -> Found:
    """Without a number where nothing chooses: the test set must not."""
    first, second = (choice.cell or choice.rivals[0] for choice in choices)
    is_chosen = all(choice.cell is not None for choice in choices)
    is_tasks = measure.by == "tasks"
    sides = [_tasks_by_seed(cell) if is_tasks else cell.by_seed(measure.metric) for cell in (first, second)]
    pairs = [
        (mine, its)
        for (seed, mine), (other, its) in product(*(side.items() for side in sides))
        if seed == other or first.run != second.run
    ]
    spread = Spread.of(_COMBINED[measure.by](*pair) for pair in pairs) if is_chosen else Spread((), 1)
    words = f" {WORDS[measure.by]} ".join(_named(choice.cell or choice.rivals[0]) + choice.words for choice in choices)
    seeds = (
        "no score chooses among the runs"
        if not is_chosen
        else " and ".join(str(len(side)) for side in sides) + " seeds"
    )
    text = f"{words}, {_test(first)}{seeds}{', no spread' if len(spread.values) == 1 else ''}"
    num_seeds = min(sum(value is not None for value in side.values()) for side in sides) if is_chosen else 0
    roles = tuple(dict.fromkeys((*first.roles, *second.roles)))
    return Found(spread, text, first.name, first.data or "", (first.mode, second.mode), num_seeds, roles)


def _named(cell: Group) -> str:
    return f"{cell.name} ({cell.mode}{' against ' + cell.against if cell.against else ''})" if cell.mode else cell.name


def _test(cell: Group) -> str:
    hard = None if cell.hard_fraction is None else f"{100 * shares_of(cell.hard_fraction)[-1]:g} % hard"
    length = None if cell.length is None else f"length {cell.length:g}"
    return "".join(f"{word}, " for word in (cell.column, cell.data, length, hard) if word)


def _seeds(cell: Group) -> Iterator[tuple[Any, pd.DataFrame]]:
    """The rows by seed, which some models do not have."""
    for seed, rows in cell.rows.groupby("seed", dropna=False):
        yield None if pd.isna(seed) else seed, rows


def _tasks_by_seed(cell: Group) -> dict[Any, ByTask | None]:
    known = {seed: rows[rows["task"].notna()].set_index("task")["value"] for seed, rows in _seeds(cell)}
    return {seed: tasks.dropna().to_dict() or None for seed, tasks in known.items()}


def _known(combine: Callable[[Any, Any], float | None]) -> Callable[[Any, Any], float | None]:
    return lambda first, second: None if first is None or second is None else combine(first, second)


def _share_won(first: ByTask, second: ByTask) -> float | None:
    """Share of the tasks that both answered on which the first is more accurate; a tie is not more accurate."""
    tasks = first.keys() & second.keys()
    return sum(first[task] > second[task] for task in tasks) / len(tasks) if tasks else None


_COMBINED = {
    "difference": _known(lambda first, second: first - second),
    "ratio": _known(lambda first, second: first / second if second else None),
    "tasks": _known(_share_won),
}
