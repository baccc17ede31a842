"""The numbers that others reported: published.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from implicit_llm_contracts.runs.fill import fill
from implicit_llm_report.config import FOLDER, ReportError, read_yaml
from implicit_llm_report.frame import Group
from implicit_llm_report.model_groups import FAMILIES
from implicit_llm_report.training_runs import Solver

TOLERANCE = 0.1  # of sizes and tokens that count as the same


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
    """A row of a table: `values` by the labels of the suite `paper` (downstream.yaml).

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

    def is_beside(self, model: Group) -> bool:
        """Whether it is the same released model, or one of the same family, solver, size and tokens of D-Pile.

        The tokens stand for the corpus, as with perplexities.
        """
        if model.source is not None:
            return self.hub is not None and self.hub == model.source.get("hub")
        return (
            self.train_data == "D-Pile"
            and self.family == FAMILIES.get(model.model_type or "")
            and is_same_solver(self.solver, model.solver)
            and is_near(self.num_parameters, model.num_parameters)
            and is_near(self.train_tokens, model.train_tokens)
        )


def is_near(first: float, second: float | None) -> bool:
    """Whether a measured size or number of tokens counts as the published one; None does not."""
    return second is not None and abs(first - second) <= TOLERANCE * first


Mark = Literal["paper", "other_paper", "secondary", "reference_run", "reference_code", "derived", "not_known"]
NOT_KNOWN = "not_known"
MARK_WORDS = {
    "reference_code": "published code",
    "derived": "derived",
    "not_known": "not known",
    "paper": "paper",
    "other_paper": "another paper",
    "secondary": "secondary source",
    "reference_run": "published code, our run",
}


@dataclass(frozen=True)
class Split:
    """Sequences of `length` tokens with this share of hard tokens."""

    length: int
    hard_fraction: float


@dataclass(frozen=True)
class PublishedNumber:
    """One number, under which conditions it was found, and how far to trust it.

    `mark`: "paper" stands in the paper; "secondary" in a reading note of it; "reference_run" was measured with the
    published code.
    `mode` is the name used here for the way it was evaluated, "parallel" for explicit models.
    """

    id: str
    metric: str
    value: float
    group: str
    monoid: str
    model: Literal["implicit", "explicit"]
    train: Split
    test: Split
    mode: str
    source: str
    mark: Mark
    num_layers: int = 1
    f_evaluations_per_token: float | None = None
    note: str | None = None

    def is_beside(self, point: Group) -> bool:
        """Whether a measured point has the same task, model kind, depth, lengths, shares of hard tokens and mode."""
        return (
            (self.group, self.monoid, self.mode) == (point.group, point.monoid, point.mode)
            and (self.model == "implicit") == point.is_implicit
            and self.num_layers == point.num_layers
            and self.test == Split(point.length, point.hard_fraction)
            and self.train == Split(point.train_length, point.train_hard_fraction)
        )


@dataclass(frozen=True)
class PublishedPerplexity:
    """Perplexity of a language model on held-out text.

    `family` is Mamba2 or Llama, `solver` is None for an explicit model; `train_data` and
    `test_data` are the paper's names of the corpora.
    """

    id: str
    family: str
    num_parameters: float
    solver: PublishedSolver | None
    train_data: str
    train_tokens: float
    test_data: str
    length: int
    value: float
    source: str
    mark: Mark
    note: str | None = None

    def is_beside(self, point: Group) -> bool:
        """Whether a measured point has the same family, solver, length, and size and tokens within 10 %.

        The tokens stand for the corpus: nobody trains a model of this size on so many tokens of another one here.
        """
        return (
            self.train_data == self.test_data
            and self.family == FAMILIES.get(point.model_type or "")
            and is_same_solver(self.solver, point.solver)
            and (self.solver is not None) == point.is_implicit
            and self.length == point.length
            and is_near(self.num_parameters, point.num_parameters)
            and is_near(self.train_tokens, point.train_tokens)
        )


@dataclass(frozen=True)
class PublishedDuality:
    """Share of tokens on which simultaneous and sequential mode of an implicit language model agree."""

    id: str
    family: str
    num_parameters: float
    num_tokens: float
    value: float
    source: str
    mark: Mark

    def is_beside(self, point: Group) -> bool:
        """Whether a measured point has the same family, modes, and size within 10 %."""
        return (
            (point.eval_mode, point.against) == ("simultaneous", "sequential")
            and self.family == FAMILIES.get(point.model_type or "")
            and is_near(self.num_parameters, point.num_parameters)
        )


@dataclass(frozen=True)
class BabiYardstick:
    """Accuracy of another model at all questions of CatbAbI (test), in percent: to see where ours stand.

    `training` is "qa" where only answers were trained, "lm" where all words were.
    """

    id: str
    model: str
    training: Literal["qa", "lm"]
    value: float
    source: str
    mark: Mark
    num_layers: int | None = None


@dataclass(frozen=True)
class PublishedFact:
    """A setting, a size or a statement; `value` None and the mark not_known for what was not found."""

    id: str
    part: str
    what: str
    value: str | None
    source: str
    mark: Mark

    def __post_init__(self) -> None:
        if (self.value is None) != (self.mark == NOT_KNOWN):
            raise ValueError(f"{self.id}: the mark {NOT_KNOWN} goes with the value null, and no other mark does")


Entry = PublishedNumber | PublishedPerplexity | BabiYardstick | PublishedDuality | PublishedDownstream | PublishedFact


@dataclass(frozen=True)
class Published:
    """All published numbers and what the marks mean."""

    marks: Mapping[str, str]
    numbers: tuple[PublishedNumber, ...]
    perplexities: tuple[PublishedPerplexity, ...] = ()
    babi: tuple[BabiYardstick, ...] = ()
    downstream: tuple[PublishedDownstream, ...] = ()
    duality: tuple[PublishedDuality, ...] = ()
    facts: tuple[PublishedFact, ...] = ()

    def beside(self, point: Group, metric: str) -> PublishedNumber | None:
        """The published number of the same thing, None where there is none."""
        return next((number for number in self.numbers if number.metric == metric and number.is_beside(point)), None)

    def perplexity_beside(self, point: Group) -> PublishedPerplexity | None:
        """The published perplexity of the same thing, None where there is none."""
        return next((number for number in self.perplexities if number.is_beside(point)), None)

    def duality_beside(self, point: Group) -> PublishedDuality | None:
        """The published agreement of the same thing, None where there is none."""
        return next((number for number in self.duality if number.is_beside(point)), None)

    @property
    def all_marks(self) -> set[str]:
        return {entry.mark for entry in self.entries}

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (*self.numbers, *self.perplexities, *self.babi, *self.duality, *self.downstream, *self.facts)


def load_published(path: Path = FOLDER / "published.yaml") -> Published:
    """Read the file. Raises: UserError naming file and key."""
    content: Any = read_yaml(path)
    published = fill(Published, content, str(path))
    _check_unique((entry.id for entry in published.entries), path)
    unknown = published.all_marks - set(published.marks)
    if unknown:
        raise ReportError(f"{path}: the mark {sorted(unknown)[0]} is not explained; add it under marks")
    return published


def _check_unique(ids: Iterable[str], path: Path) -> None:
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise ReportError(f"{path}: the id {name} stands twice; give every entry an id of its own")
        seen.add(name)
