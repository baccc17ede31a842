"""What every record about a language model or a CatbAbI model has in common, whatever was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from implicit_llm.report.model_groups import Variant, family_of
from implicit_llm.report.results import from_record
from implicit_llm.report.training_runs import Solver


@dataclass(frozen=True)
class ModelPoint:
    """One record of an evaluation: which model it is about, and what solving cost; None is a missing number."""

    role: str
    run: str
    phase: str | None
    solver: Solver | None
    seed: int | None
    is_implicit: bool
    model_type: str | None
    num_parameters: int | None
    f_evaluations_per_token: float | None
    unconverged_share: float | None

    @classmethod
    def from_record(cls, record: Mapping[str, Any], role: str) -> Self:
        return from_record(cls, dict(record), role)

    @property
    def phase_label(self) -> str | None:
        return None if self.solver is None else self.solver.label

    @property
    def variant(self) -> Variant:
        return Variant(self.run, self.phase, self.solver, self.is_implicit)

    @property
    def family(self) -> str:
        return family_of(self.model_type)


def name_among(point: ModelPoint, points: Iterable[ModelPoint]) -> str:
    """The run of a point, with its phase where several phases of the run are among `points`."""
    phases = {other.phase: other.phase_label for other in points if other.run == point.run}
    if len(phases) == 1:
        return point.run
    is_unique = list(phases.values()).count(point.phase_label) == 1
    return f"{point.run} {point.phase_label if is_unique else point.phase}"
