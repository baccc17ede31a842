"""One table of everything that was measured or is missing: a row a number.

Columns: `kind` of evaluation, `metric` and `value`; what the number is of (run, seed, phase and its solver, model,
data, length, mode, ...); `role`, the input it comes from; `origin`, "measured" or "missing", and `reason` of a missing
one. A number that does not exist is NaN in a row of its own, never zero and never left out. What
does not apply to a kind is None. Curves and other details stay in `detail`, a mapping by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.hints import natural
from implicit_llm_report.config import ReportError
from implicit_llm_report.model_groups import family_of

MEASURED, MISSING = "measured", "missing"
COSTS = ("f_evaluations_per_token", "unconverged_share")
# The numbers that a record of a kind has; one that it lacks is missing.
METRICS = {name: kind.metrics for name, kind in EVALUATION_KINDS.items()}
# Numbers that only some records of a kind have, beside COSTS.
EXTRAS = (
    "logit_std", "against_f_evaluations_per_token", "iterations_per_token", "residual", "token_match_sequential",
)  # fmt: skip
ABOUT = (
    "role", "run", "name", "seed", "phase", "solver", "is_implicit", "is_headline", "model_type", "num_layers",
    "num_parameters", "source", "train_length", "train_tokens", "train_flops", "setting", "task", "data", "data_set",
    "split", "protocol", "measure", "mode", "against", "eval_mode", "length", "group", "monoid", "hard_fraction",
    "train_hard_fraction", "sweep", "swept", "base", "at", "num_samples", "num_tokens", "eval_tol", "eval_max_iter",
    "eval_block_len", "layer", "state_size", "is_hard", "num_documents", "num_fewshot", "task_version", "task_hash",
    "harness_version", "num_questions", "record",
)  # fmt: skip
COLUMNS = ("kind", *ABOUT, "family", "phase_label", "origin", "reason", "metric", "value", "detail")

# The mode whose numbers represent a model, in this order, when the config names none.
HEADLINE_MODES = ("blockwise", "sequential", "simultaneous", "published")
# Order of modes in tables and legends, by falling work per answer.
MODE_ORDER = ("parallel", "blockwise", "sequential", "simultaneous", "published")
LAST_TEN, COST = "accuracy_last10", "f_evaluations_per_token"


def shares_of(hard: float | tuple[float, ...]) -> tuple[float, ...]:
    """Shares of hard tokens; several are mixed in equal parts."""
    return hard if isinstance(hard, tuple) else (hard,)


@dataclass(frozen=True)
class Spread:
    """A number over seeds: all that were measured; `num_missing` runs gave none."""

    values: tuple[float, ...]
    num_missing: int = 0

    @property
    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None

    @property
    def low(self) -> float | None:
        return min(self.values, default=None)

    @property
    def high(self) -> float | None:
        return max(self.values, default=None)

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        present, missing = [], 0
        for value in values:
            if value is None:
                missing += 1
            else:
                present.append(value)
        return cls(tuple(present), missing)


def seeds_words(spread: Spread) -> str:
    """ "3 seeds", and how many of them gave no number."""
    total = len(spread.values) + spread.num_missing
    words = f"{total} seed{'' if total == 1 else 's'}"
    return words + (f", {spread.num_missing} missing" if spread.num_missing else "")


@dataclass(frozen=True)
class BestSeed:
    """The best of several seeds."""

    value: float
    seed: int | None


def headline_mode(modes: set[str], wanted: str | None) -> str | None:
    """The one of `modes` that represents a model: the wanted one if it is there, else the first of HEADLINE_MODES."""
    for mode in (wanted, *HEADLINE_MODES, "parallel"):
        if mode in modes:
            return mode
    return next(iter(sorted(modes)), None)


def mode_rank(mode: str) -> tuple[int, str]:
    """Sorting key: the known modes in MODE_ORDER, others after them by name."""
    return (MODE_ORDER.index(mode) if mode in MODE_ORDER else len(MODE_ORDER), mode)


def frame_of(
    records: Mapping[str, Sequence[Mapping[str, Any]]], reasons: Mapping[str, str], wanted_mode: str | None = None
) -> pd.DataFrame:
    """The rows of all records, by kind in the order of their files.

    `reasons`: by role, why a result is missing. `wanted_mode`: the mode that is the headline of a model that has it.
    `name` is the run of a model, with its phase where several phases of the run have results of this kind;
    `swept`, `at` and `base` are the setting that a record sweeps, its value and the mode.
    `is_headline` marks the records in the mode that stands for the model in figures and claims.
    """
    rows: list[dict[str, Any]] = []
    for kind, mine in sorted(records.items()):
        plain = [record for record in mine if not record.get("sweep")]
        names, modes = _names(plain), _headline_modes(plain, wanted_mode)
        for number, record in enumerate(mine):
            name = names.get((record.get("run"), record.get("phase")), record.get("run"))
            is_headline = not record.get("sweep") and record.get("mode") == modes[_reading(record)]
            derived = {"record": number, "name": name, "is_headline": is_headline, **_swept(record.get("sweep"))}
            rows += _rows(kind, {**record, **derived}, reasons)
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    return frame.astype({"value": float})


def _rows(kind: str, record: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    about = {key: _hashable(record.get(key)) for key in ABOUT}
    about |= {"kind": kind, "family": family_of(record.get("model_type"))}
    solver = about["solver"]
    about["phase_label"] = None if solver is None else solver.label
    about["reason"] = reasons.get(str(record.get("role")))
    about["detail"] = {key: value for key, value in record.items() if isinstance(value, list | dict)}
    numbers = {name: record.get(name) for name in METRICS.get(kind, ())}
    numbers |= record.get("metrics") or {}  # of lm_eval: those of its task
    numbers |= {name: record.get(name) for name in COSTS}
    numbers |= {name: record[name] for name in EXTRAS if record.get(name) is not None}
    for metric, value in numbers.items():
        yield about | {"origin": MISSING if value is None else MEASURED, "metric": metric, "value": value}


def _swept(sweep: Mapping[str, Any] | None) -> dict[str, Any]:
    """The setting that a record sweeps, its value, and the mode that is swept."""
    return {"swept": sweep["key"], "base": sweep["base"], "at": float(sweep["value"])} if sweep else {}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _names(records: Sequence[Mapping[str, Any]]) -> dict[tuple, str]:
    """The name of each model, by run and phase."""
    labels: dict[Any, dict[Any, str | None]] = {}
    for record in records:
        solver = record.get("solver")
        labels.setdefault(record.get("run"), {})[record.get("phase")] = None if solver is None else solver.label
    names = {}
    for run, phases in labels.items():
        for phase, label in phases.items():
            is_unique = label is not None and list(phases.values()).count(label) == 1
            names[run, phase] = run if len(phases) == 1 else f"{run} {label if is_unique else phase}"
    return names


def _reading(record: Mapping[str, Any]) -> tuple:
    """What has one headline mode: a model, for CatbAbI in each protocol."""
    return record.get("run"), record.get("phase"), record.get("protocol")


def _headline_modes(records: Sequence[Mapping[str, Any]], wanted: str | None) -> defaultdict[tuple, str | None]:
    modes: defaultdict[tuple, set[str]] = defaultdict(set)
    for record in records:
        modes[_reading(record)].add(record.get("mode") or "")
    return defaultdict(lambda: None, {reading: headline_mode(mine, wanted) for reading, mine in modes.items()})


@dataclass(frozen=True, eq=False)
class Group:
    """The rows of one thing over its seeds; what they share is read as an attribute, None where it does not apply."""

    rows: pd.DataFrame

    @cached_property
    def _first(self) -> dict[str, Any]:
        return dict(zip(self.rows.columns, self.rows.iloc[0], strict=True))

    def __getattr__(self, column: str) -> Any:
        if column not in COLUMNS:
            raise AttributeError(column)
        return self._first[column]

    @cached_property
    def _by_seed(self) -> pd.DataFrame:
        seeds = [seed or 0 for seed in self.rows["seed"]]
        return self.rows.iloc[sorted(range(len(seeds)), key=seeds.__getitem__)] if len(set(seeds)) > 1 else self.rows

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._by_seed["role"].drop_duplicates())

    @cached_property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(self._by_seed["seed"]))

    @property
    def metrics(self) -> list[str]:
        return list(self.rows["metric"].drop_duplicates())

    def spread(self, metric: str, over: str = "seed") -> Spread:
        """The metric over the seeds, or over the records; one without a number is counted as missing.

        Raises: ReportError where rows differ in more than that: they are not one thing, and have no mean.
        """
        found = self._numbers(metric, over)
        if len({key for key, _ in found}) < len(found):
            raise ReportError(f"{self.role}: {metric} is in several records of one {over}, which have no mean")
        return Spread.of(value for _, value in found)

    @property
    def chance(self) -> float | None:
        """Accuracy of the best constant answer of a word problem."""
        return self.spread("chance_last10", over="record").high

    def by_seed(self, metric: str) -> dict[int | None, float | None]:
        return dict(self._numbers(metric, "seed"))

    def best(self, metric: str, *, is_low_better: bool = False) -> BestSeed | None:
        """The seed with the best number; None where there are not several to choose from."""
        known = [BestSeed(value, seed) for seed, value in self.by_seed(metric).items() if value is not None]
        return None if len(known) < 2 else (min if is_low_better else max)(known, key=lambda best: best.value)

    def cells(self, column: str) -> dict[Any, Group]:
        """The rows by their value in a column, in order; what has none there is left out."""
        if column not in self._cells:
            found = groups(self.rows[self.rows[column].notna()], (column,))
            self._cells[column] = {
                cell._first[column]: cell for cell in sorted(found, key=lambda cell: cell._first[column])
            }
        return self._cells[column]

    @cached_property
    def _cells(self) -> dict[str, dict[Any, Group]]:
        return {}

    @property
    def num_records(self) -> int:
        return int(self.rows["record"].nunique())

    @property
    def details(self) -> list[Mapping[str, Any]]:
        """One of each record, in the order of the seeds."""
        return list(self._by_seed.drop_duplicates("record")["detail"])

    def curves(self, name: str) -> list[Any]:
        """A detail of the records that have it, one of each record."""
        return [detail[name] for detail in self.details if detail.get(name)]

    def _numbers(self, metric: str, over: str) -> list[tuple[Any, float | None]]:
        mine = self._by_seed["metric"].to_numpy() == metric
        columns = (self._by_seed[column].to_numpy()[mine] for column in (over, "value"))
        return [(key, None if value != value else value) for key, value in zip(*columns, strict=True)]  # NaN


def plain(frame: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows of a kind of evaluation that belong to no sweep and to models trained here."""
    return frame[(frame["kind"] == kind) & frame["sweep"].isna() & frame["source"].isna()]


def word_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of word problems: by task, implicit models first, then by name, hard tokens, length and mode."""
    rows = plain(frame, "word_problem")
    columns = ("group", "monoid", "is_implicit", "name", "hard_fraction", "length", "mode")
    keys = [
        (group, monoid, not is_implicit, natural(name), shares_of(hard), length, mode_rank(mode))
        for group, monoid, is_implicit, name, hard, length, mode in zip(*(rows[c] for c in columns), strict=True)
    ]
    return rows.iloc[sorted(range(len(rows)), key=keys.__getitem__)]


def headlines(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows in the mode that stands for their model."""
    return rows[rows["is_headline"].astype(bool)]


def roles_of(found: Iterable[Group]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(role for group in found for role in group.roles))


def groups(rows: pd.DataFrame, by: Sequence[str], order: Callable[[Group], Any] | None = None) -> list[Group]:
    """The rows that agree in the columns `by`, as they stand or sorted by `order`; a group has its seeds in order."""
    found = [Group(mine) for _, mine in rows.groupby(list(by), sort=False, dropna=False)]
    return found if order is None else sorted(found, key=order)
