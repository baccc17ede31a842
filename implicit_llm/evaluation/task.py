"""Which word problem a data set poses, read from its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from implicit_llm.evaluation.accuracy import LAST_TOKENS
from implicit_llm.evaluation.chance import chance_per_position
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.manifest import Manifest


class TaskError(UserError):
    """A manifest does not describe a word problem."""


@dataclass(frozen=True)
class Task:
    """One word problem: products in `group`, times the aperiodic monoid or not, over `length` tokens."""

    group: str
    monoid: str
    length: int
    hard_fraction: float | tuple[float, ...]

    def record(self) -> dict[str, Any]:
        """The task's part of a record of metrics.json, with what a model without state would score."""
        chance = chance_per_position(self.group, self.monoid, self.hard_fraction, self.length)
        return {
            "group": self.group,
            "monoid": self.monoid,
            "length": self.length,
            "hard_fraction": self.hard_fraction,
            "chance_last10": round(float(chance[-LAST_TOKENS:].mean()), 6),
            "chance_per_position": [round(float(share), 6) for share in chance],
        }


def task_of(manifest: Manifest) -> Task:
    """The task of the data run behind `manifest`. Raises: TaskError when it is not a word problem."""
    config = manifest.identity.get("config", {})
    missing = [key for key in ("group", "monoid", "length", "hard_fraction") if key not in config]
    if missing:
        raise TaskError(
            f"data/{manifest.name}: its manifest names no {', '.join(missing)}; "
            "give the run directory of a word-problem data set"
        )
    hard_fraction = config["hard_fraction"]
    if isinstance(hard_fraction, list):
        hard_fraction = tuple(hard_fraction)
    return Task(config["group"], config["monoid"], config["length"], hard_fraction)
