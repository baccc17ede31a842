"""What others reported on downstream tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from implicit_llm.report.model_groups import FAMILIES
from implicit_llm.report.training_runs import Solver

TOLERANCE = 0.1  # of sizes and tokens that count as the same


class DownstreamMeasured(Protocol):
    """What is asked of a measured model to place published numbers beside it."""

    @property
    def solver(self) -> Solver | None: ...

    @property
    def model_type(self) -> str | None: ...

    @property
    def num_parameters(self) -> int | None: ...

    @property
    def train_tokens(self) -> float | None: ...

    @property
    def source(self) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True)
class PublishedSolver:
    """The most iterations of the phase that a published model ended with, and its phantom steps."""

    max_iter: int
    phantom_steps: int

    @property
    def label(self) -> str:
        return f"({self.max_iter}+{self.phantom_steps})"


def is_same_solver(published: PublishedSolver | None, measured: Solver | None) -> bool:
    """Whether both are explicit, or end with phases of the same iterations and phantom steps."""
    if published is None or measured is None:
        return published is measured
    return (published.max_iter, published.phantom_steps) == (measured.max_iter, measured.phantom_steps)


@dataclass(frozen=True)
class PublishedDownstream:
    """A row of a table: `values` by the labels of the suite `paper` (workflow/report/downstream.yaml).

    `family` is Mamba2 or Llama, `solver` is None for an explicit model. `hub` names the
    released model that the numbers belong to.
    """

    id: str
    family: str
    num_parameters: float
    solver: PublishedSolver | None
    train_data: str
    train_tokens: float
    values: Mapping[str, float]
    source: str
    mark: Literal["paper", "other_paper", "secondary", "reference_run"]
    suite: str = "paper"
    hub: str | None = None
    note: str | None = None

    def is_beside(self, point: DownstreamMeasured) -> bool:
        """Whether it is the same released model, or one of the same family, solver, size and tokens of D-Pile.

        The tokens stand for the corpus, as with perplexities.
        """
        if point.source is not None:
            return self.hub is not None and self.hub == point.source.get("hub")
        return (
            self.train_data == "D-Pile"
            and self.family == FAMILIES.get(point.model_type or "")
            and is_same_solver(self.solver, point.solver)
            and is_near(self.num_parameters, point.num_parameters)
            and is_near(self.train_tokens, point.train_tokens)
        )


def is_near(first: float, second: float | None) -> bool:
    """Whether a measured size or number of tokens counts as the published one; None does not."""
    return second is not None and abs(first - second) <= TOLERANCE * first
