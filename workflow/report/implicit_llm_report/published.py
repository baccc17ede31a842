"""The numbers that others reported: published.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from implicit_llm_contracts.runs.fill import fill
from implicit_llm_report.config import FOLDER, ReportError, read_yaml
from implicit_llm_report.frame import Group
from implicit_llm_report.measures import METRIC_WORDS
from implicit_llm_report.model_groups import short_count

TOLERANCE = 0.1  # of sizes and tokens that count as the same

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


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A number or statement, and how far to trust it.

    `mark`: "paper" stands in the paper; "secondary" in a reading note of it; "reference_run" was measured with the
    published code. `kind` is that of the evaluations whose `metric` it stands beside, None where there is none.
    """

    kind: ClassVar[str | None] = None
    metric: str = ""
    form: ClassVar[str] = ".3f"

    id: str
    source: str
    mark: Mark
    value: float | str | None = None
    part: str = ""
    what: str = ""
    note: str | None = None

    def is_beside(self, point: Group) -> bool:
        """Whether a measured point is of the same thing under the same conditions."""
        return False

    @property
    def words(self) -> str:
        return self.what


@dataclass(frozen=True)
class PublishedSolver:
    """The most iterations of the phase that a published model ended with, and its phantom steps."""

    max_iter: int
    phantom_steps: int


@dataclass(frozen=True)
class Split:
    """Sequences of `length` tokens with this share of hard tokens."""

    length: int
    hard_fraction: float


@dataclass(frozen=True, kw_only=True)
class PublishedNumber(Entry):
    """A number of a word problem; `mode` is the name used here, "parallel" for explicit models."""

    kind = "word_problem"

    metric: str
    value: float
    group: str
    monoid: str
    model: Literal["implicit", "explicit"]
    train: Split
    test: Split
    mode: str
    part: str = "word problems"
    num_layers: int = 1
    f_evaluations_per_token: float | None = None

    def is_beside(self, point: Group) -> bool:
        """Whether a measured point has the same task, model kind, depth, lengths, shares of hard tokens and mode."""
        return (
            (self.group, self.monoid, self.mode) == (point.group, point.monoid, point.mode)
            and (self.model == "implicit") == point.is_implicit
            and self.num_layers == point.num_layers
            and self.test == Split(point.length, point.hard_fraction)
            and self.train == Split(point.train_length, point.train_hard_fraction)
        )

    @property
    def words(self) -> str:
        task = self.group if self.monoid == "none" else f"{self.group} × {self.monoid}"
        trained, tested = (f"{s.length} with {100 * s.hard_fraction:g} % hard" for s in (self.train, self.test))
        model = f"{task}, {self.num_layers}-layer {self.model}, trained at {trained}, tested at {tested}, {self.mode}"
        return f"{model}: {METRIC_WORDS.get(self.metric, self.metric)}"


@dataclass(frozen=True, kw_only=True)
class PublishedModel(Entry):
    """A number of a language model: `family` is Mamba2 or Llama, `solver` None for an explicit model."""

    family: str
    num_parameters: float
    solver: PublishedSolver | None
    train_data: str
    train_tokens: float

    def is_of(self, point: Group) -> bool:
        """Whether the point is of a model of the same family, solver, and size and tokens within 10 %.

        The tokens stand for the corpus: nobody trains a model of this size on so many tokens of another one here.
        """
        solver = point.solver and PublishedSolver(point.solver.max_iter, point.solver.phantom_steps)
        sizes = (self.num_parameters, point.num_parameters), (self.train_tokens, point.train_tokens)
        return (self.family, self.solver) == (point.family, solver) and all(is_near(*size) for size in sizes)

    @property
    def model_words(self) -> str:
        kind = f"({self.solver.max_iter}+{self.solver.phantom_steps})" if self.solver else "explicit"
        count, tokens = short_count(self.num_parameters), short_count(self.train_tokens)
        return f"{self.family} {kind}, {count}, {tokens} tokens of {self.train_data}: "


@dataclass(frozen=True, kw_only=True)
class PublishedPerplexity(PublishedModel):
    """Perplexity on held-out text; the names of the corpora are the paper's."""

    kind, form = "perplexity", ".2f"

    value: float
    test_data: str
    length: int
    metric: str = "perplexity"
    part: str = "perplexity"

    def is_beside(self, point: Group) -> bool:
        return self.train_data == self.test_data and self.length == point.length and self.is_of(point)

    @property
    def words(self) -> str:
        return f"{self.model_words}perplexity on {self.test_data}, rows of {self.length}"


@dataclass(frozen=True, kw_only=True)
class PublishedDownstream(PublishedModel):
    """A row of a table: `values` by the labels of the suite. `hub` names the released model that they belong to."""

    values: Mapping[str, float]
    suite: str = "paper"
    part: str = "downstream"
    hub: str | None = None

    def is_beside(self, point: Group) -> bool:
        """Whether it is the same released model, or one that was trained alike on D-Pile."""
        if point.source is not None:
            return self.hub is not None and self.hub == point.source.get("hub")
        return self.train_data == "D-Pile" and self.is_of(point)


@dataclass(frozen=True, kw_only=True)
class PublishedDuality(Entry):
    """Share of tokens on which simultaneous and sequential mode of an implicit language model agree."""

    kind = "duality"

    family: str
    num_parameters: float
    num_tokens: float
    value: float
    metric: str = "token_agreement"
    part: str = "duality"

    def is_beside(self, point: Group) -> bool:
        is_pair = (point.eval_mode, point.against) == ("simultaneous", "sequential")
        return is_pair and self.family == point.family and is_near(self.num_parameters, point.num_parameters)

    @property
    def words(self) -> str:
        model = f"{self.family} {short_count(self.num_parameters)}"
        return f"{model}: share of tokens alike in simultaneous and sequential mode"


@dataclass(frozen=True, kw_only=True)
class BabiYardstick(Entry):
    """Accuracy of another model at all questions of CatbAbI (test), in percent: to see where ours stand.

    `training` is "qa" where only answers were trained, "lm" where all words were.
    """

    form = ".2f"

    model: str
    training: Literal["qa", "lm"]
    value: float
    part: str = "CatbAbI"
    num_layers: int | None = None

    @property
    def words(self) -> str:
        layers = f", {self.num_layers} layer{'s' if self.num_layers != 1 else ''}" if self.num_layers else ""
        trained = "answers only" if self.training == "qa" else "all words"
        return f"{self.model}{layers}, trained on {trained}: accuracy at all questions in percent"


@dataclass(frozen=True, kw_only=True)
class PublishedFact(Entry):
    """A setting, a size or a statement; `value` None and the mark not_known for what was not found."""

    part: str
    what: str
    value: str | None

    def __post_init__(self) -> None:
        if (self.value is None) != (self.mark == NOT_KNOWN):
            raise ValueError(f"{self.id}: the mark {NOT_KNOWN} goes with the value null, and no other mark does")


def is_near(first: float, second: float | None) -> bool:
    """Whether a measured size or number of tokens counts as the published one; None does not."""
    return second is not None and abs(first - second) <= TOLERANCE * first


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

    def beside(self, point: Group, metric: str) -> Any:
        """The published entry of the same thing, None where there is none."""
        mine = (entry for entry in self.entries if (entry.kind, entry.metric) == (point.kind, metric))
        return next((entry for entry in mine if entry.is_beside(point)), None)

    @property
    def all_marks(self) -> set[str]:
        return {entry.mark for entry in self.entries}

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (*self.numbers, *self.perplexities, *self.downstream, *self.babi, *self.duality, *self.facts)


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
