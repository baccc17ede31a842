"""What the report shows: identity, since it changes the page."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from implicit_llm_contracts.config.evaluation_kinds import PERPLEXITY
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.tasks import WORD_PROBLEM
from implicit_llm_contracts.errors import UserError

T = TypeVar("T")
MOST_FIGURES = 5  # of the first page
VALIDATION = "validation"  # the split on which one chooses
# The kind of its numbers, by that of the evaluation.
VALIDATION_KINDS = {WORD_PROBLEM: VALIDATION, PERPLEXITY: "validation_perplexity"}
FOLDER = Path(__file__).resolve().parent  # of the templates, captions, claims and published numbers too


class ReportError(UserError):
    """The report cannot be made from what it was given."""


@dataclass(frozen=True)
class MinimumLayersConfig:
    """Merrill's protocol: the fewest layers that solve a group at the length they were trained on.

    A length is solved from the accuracy `threshold` on, in (0, 1], in the `measure` named. `hard_fraction` takes the
    tests with this share of hard tokens only; None takes the hardest that is no harder than training.
    """

    group: str
    monoid: str = "none"
    hard_fraction: float | None = None
    threshold: float = 0.98
    measure: Literal["accuracy_last10", "accuracy_token", "accuracy_sequence"] = "accuracy_last10"

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold: {self.threshold} is outside (0, 1]; it is an accuracy such as 0.98")


@dataclass(frozen=True)
class MissingResult:
    """A result that is not there: `state` is the word of `implicit-llm status` for its job, `command` makes it.

    `config` and `data` (by role) are those of an evaluation; `is_implicit` None: not known before it is there.
    """

    job: str
    role: str
    state: str
    why: str
    command: str
    config: dict[str, Any] = field(default_factory=dict)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_implicit: bool | None = None


@dataclass(frozen=True)
class ReportJob:
    """What the workflow knows of an input or of a missing result, so that nothing is read out of names.

    A model that was trained elsewhere has no seed and the phase "checkpoint"; `evaluation` is None for training.
    `solver` is that of the phase, None for an explicit model.
    """

    run: str
    seed: int | None = None
    phase: str | None = None
    evaluation: str | None = None
    solver: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class DataPart:
    """A split of a data set of the experiment: "train", "valid", "validation", "test", or "tokenizer"."""

    data: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Front:
    """What the first page shows: at most five figures, the hero first, and the models in them, at most six a panel.

    figures: their names; none for those of sections.py. models: patterns of the names that readers see, such as
    "S5, *"; none for the first six of each test.
    """

    figures: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.figures) > MOST_FIGURES:
            raise ValueError(f"figures: {len(self.figures)} are more than the {MOST_FIGURES} that the first page shows")


@dataclass(frozen=True)
class ReportConfig:
    """`experiment` (demo, miniature, state-tracking, paper, ...) says which claims can be judged.

    `note` is what a reader must know before the numbers, such as how a seed was chosen; it heads the page. `names` are
    those of runs for the reader, `front` is what the first page shows.
    `jobs` says by role what each input and each missing result is, `data` what each data set is by its name.
    """

    experiment: str
    jobs: Mapping[str, ReportJob] = field(default_factory=dict)
    data: Mapping[str, DataPart] = field(default_factory=dict)
    title: str | None = None
    note: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    front: Front = field(default_factory=Front)
    missing: tuple[MissingResult, ...] = ()  # the results that it does without
    minimum_layers: MinimumLayersConfig | None = None
    figures: tuple[str, ...] | None = None  # those that are made, by name; None for all
    tables: tuple[str, ...] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether everything is shown, not one figure or table for itself."""
        return self.figures is None and self.tables is None

    def shows(self, part: Literal["figures", "tables"], name: str) -> bool:
        return self.is_whole or name in (getattr(self, part) or ())


# The one in C reads ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path, cls: type[T]) -> T:
    """A YAML file as a dataclass. Raises: UserError naming the file, and its line or key."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        raise ReportError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from error
    return fill(cls, found, str(path))
