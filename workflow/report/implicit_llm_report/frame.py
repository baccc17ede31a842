"""One table of everything that was measured or is missing: a row a number.

Columns: `kind` of evaluation, `metric` and `value`; what the number is of (run, seed, phase and its solver, model,
data, length, mode, ...); `role`, the input it comes from; `origin`, "measured" or "missing", and `reason` of a missing
one. A number that does not exist is NaN in a row of its own, never zero and never left out. What
does not apply to a kind is None. Curves and other details stay in `detail`, a mapping by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_report.config import ReportError
from implicit_llm_report.model_groups import family_of
from implicit_llm_report.results import Spread

MEASURED, MISSING = "measured", "missing"
COSTS = ("f_evaluations_per_token", "unconverged_share")
# The numbers that a record of a kind has; one that it lacks is missing.
METRICS = {name: kind.metrics for name, kind in EVALUATION_KINDS.items()}
# Numbers that only some records of a kind have, beside COSTS.
EXTRAS = ("logit_std", "against_f_evaluations_per_token")
ABOUT = (
    "role", "run", "seed", "phase", "solver", "is_implicit", "model_type", "num_layers", "num_parameters", "source",
    "train_length", "train_tokens", "train_flops", "setting", "task", "data", "data_set", "split", "protocol",
    "measure", "mode", "against", "eval_mode", "length", "group", "monoid", "hard_fraction", "train_hard_fraction",
    "sweep", "num_tokens", "eval_tol", "record",
)  # fmt: skip
COLUMNS = ("kind", *ABOUT, "family", "phase_label", "origin", "reason", "metric", "value", "detail")


def frame_of(records: Mapping[str, Sequence[Mapping[str, Any]]], reasons: Mapping[str, str]) -> pd.DataFrame:
    """The rows of all records, by kind in the order of their files. `reasons`: by role, why a result is missing."""
    rows = [
        row
        for kind, mine in sorted(records.items())
        for number, record in enumerate(mine)
        for row in _rows(kind, {**record, "record": number}, reasons)
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    return frame.astype({"value": float})


def _rows(kind: str, record: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    about = {key: record.get(key) for key in ABOUT} | {"kind": kind, "family": family_of(record.get("model_type"))}
    solver = about["solver"]
    about["phase_label"] = None if solver is None else solver.label
    about["reason"] = reasons.get(str(record.get("role")))
    about["detail"] = {key: value for key, value in record.items() if isinstance(value, list | dict)}
    numbers = {name: record.get(name) for name in METRICS.get(kind, ())}
    numbers |= record.get("metrics") or {}  # of lm_eval: those of its task
    numbers |= {name: record.get(name) for name in COSTS} | {name: record[name] for name in EXTRAS if name in record}
    for metric, value in numbers.items():
        yield about | {"origin": MISSING if value is None else MEASURED, "metric": metric, "value": value}


@dataclass(frozen=True)
class Group:
    """The rows of one thing over its seeds; what they share is read as an attribute, None where it does not apply."""

    rows: pd.DataFrame

    def __getattr__(self, column: str) -> Any:
        if column not in COLUMNS:
            raise AttributeError(column)
        return self.rows[column].iloc[0]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.rows["role"].drop_duplicates())

    @property
    def metrics(self) -> list[str]:
        return list(self.rows["metric"].drop_duplicates())

    def spread(self, metric: str, over: str = "seed") -> Spread:
        """The metric over the seeds, or over the records; one without a number is counted as missing.

        Raises: ReportError where rows differ in more than that: they are not one thing, and have no mean.
        """
        mine = self.rows[self.rows["metric"] == metric]
        if mine[over].duplicated().any():
            first = mine.iloc[0]
            raise ReportError(f"{first['role']}: {metric} stands in several records of one {over}, which have no mean")
        return Spread.of(None if pd.isna(value) else value for value in mine["value"])


def line_names(rows: pd.DataFrame) -> dict[tuple[str, str | None], str]:
    """What each model is called, by run and phase: its run, with the phase where several of it are among `rows`."""
    models = rows[["run", "phase", "phase_label"]].drop_duplicates()
    names: dict[tuple[str, str | None], str] = {}
    for run, phases in models.groupby("run", sort=False):
        for phase, label in zip(phases["phase"], phases["phase_label"], strict=True):
            is_unique = list(phases["phase_label"]).count(label) == 1
            names[run, phase] = run if len(phases) == 1 else f"{run} {label if is_unique else phase}"
    return names


def groups(rows: pd.DataFrame, by: Sequence[str], order: Callable[[Group], Any] | None = None) -> list[Group]:
    """The rows that agree in the columns `by`, each with its seeds in order; as they stand, or sorted by `order`."""
    found = [
        Group(mine.sort_values("seed", key=lambda seeds: seeds.fillna(0), kind="stable"))
        for _, mine in rows.groupby(list(by), sort=False, dropna=False)
    ]
    return found if order is None else sorted(found, key=order)
