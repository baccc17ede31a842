"""What MLflow is told of a run's journal: its points under MLflow's names, without those that it has already."""

import re
from collections.abc import Mapping
from typing import Any

from implicit_llm_contracts.config.evaluation import PARALLEL
from implicit_llm_contracts.runs.journal import Point, point_of
from implicit_llm_contracts.runs.metrics import METRICS

# Keys of metrics in MLflow are those of the journal, in the sections that its charts make of a slash. A key that the
# table of training does not have keeps the journal's name, in the section of its stage.
SECTIONS = {"evaluate": "evaluation", "data": "data"}  # of other stages: accuracy.<data set>.<mode>, and the like
SUMMARY = "summary"  # one number a run, from its manifest, for tables and parallel coordinates

KEY_CHARS = 200
_REFUSED = re.compile(r"[^\w\-. /:]")  # by MLflow


def mlflow_key(stage: str, key: str) -> str:
    """The key under which MLflow has the journal's `key`; one that has a section stays in it."""
    key = _REFUSED.sub("-", key.replace("@", "."))[:KEY_CHARS]
    if stage == "train" and key in METRICS:
        return METRICS[key].mlflow_key
    return f"{SECTIONS[stage]}/{key}" if stage in SECTIONS and "/" not in key else key


def in_one_column(values: Mapping[str, float], config: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation, and once more without the mode those of a model's main mode: the one of an explicit
    model, the first of an implicit one. So a table of MLflow compares the two in one column."""
    modes = () if config.get("sweep") else config.get("modes") or ()
    main = (PARALLEL, *(mode["name"] for mode in modes[:1]))
    ends = ["." + re.sub(r"[^\w.-]", "-", name) for name in main]  # as an evaluation names its numbers
    shared = {key.removesuffix(end): value for key, value in values.items() for end in ends if key.endswith(end)}
    return {**values, **shared}


class Trajectory:
    """Takes the records of a journal from its first line and returns what is new in each.

    MLflow keeps every point it ever got and cannot delete one. After a rewind the points of the steps that are trained
    again are already there: those are left out. They are equal, because a resume is bitwise equal. On another number of
    processes it is not, and then MLflow keeps the first points; the journal has both.
    """

    def __init__(self) -> None:
        self._known: dict[int, set[str]] = {}
        self.summary: Point | None = None  # of the last end of the stage

    def take(self, record: Mapping[str, Any]) -> Point | None:
        """The new metrics of a record, None when it has none."""
        point = _point(record)
        if point is None:
            return None
        known = self._known.setdefault(point.step, set())
        values = {key: value for key, value in point.values.items() if key not in known}
        known.update(values)
        if not values:
            return None
        taken = Point(point.step, point.time, values)
        if record["kind"] == "event":
            self.summary = taken
        return taken


def _point(record: Mapping[str, Any]) -> Point | None:
    if record["kind"] == "metrics":
        return point_of(record)
    if record.get("name") == "stage_finished":
        numbers = _summary_numbers(record.get("summary") or {})
        return Point(0, record["time"], {f"{SUMMARY}/{key}": value for key, value in numbers.items()})
    return None


def _summary_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """The summary's own numbers, those of its `metrics`, and the best ones by data set."""
    found = {key: value for key, value in summary.items() if _is_number(value)}
    for key, values in summary.items():
        if isinstance(values, Mapping) and (key == "metrics" or key.startswith("best_")):
            prefix = "" if key == "metrics" else f"{key}."
            found |= {f"{prefix}{name}": value for name, value in values.items() if _is_number(value)}
    return {key: float(value) for key, value in found.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
