"""Define the settings of the report, which belong to its identity because they change the page."""

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
MOST_FIGURES = 5  # on the first page
VALIDATION = "validation"  # the split on which runs are chosen
# Numbers on validation sets have their own kinds in the frame (inputs/frame.py), here by the kind of the evaluation.
VALIDATION_KINDS = {WORD_PROBLEM: VALIDATION, PERPLEXITY: "validation_perplexity"}
FOLDER = Path(__file__).resolve().parent  # this package, which contains templates, captions, claims, published numbers


class ReportError(UserError):
    """The report cannot be made from its inputs, settings and YAML files; the message names the wrong one."""


@dataclass(frozen=True)
class MinimumLayersConfig:
    """The settings of Merrill's protocol, which finds the fewest layers that solve a group at the training length.

    A length is solved if the mean of `measure` over the seeds reaches `threshold`, an accuracy in (0, 1].
    `hard_fraction`: only tests with this share of hard tokens count; with None, the hardest test of each depth counts.
    Tests that are harder than training never count. Raises: ValueError for a threshold outside (0, 1].
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
    """A missing result. `state`: the state of its job in `implicit-llm status`; `command`: the command that makes it.

    Only evaluations have the other fields. `config`: the settings of the evaluation. `data`: the settings of its data
    sets by name. `is_implicit`: whether its model is implicit; None if this is unknown until the model is imported.
    `training`: the fields of its records that follow from the training settings; empty unless the evaluation or a job
    before it is running or queued.
    """

    job: str
    role: str
    state: str
    why: str
    command: str
    config: dict[str, Any] = field(default_factory=dict)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_implicit: bool | None = None
    training: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportJob:
    """The workflow's description of an input or a missing result, so that no name has to be parsed.

    A model that was trained elsewhere has no seed, and its phase is "checkpoint". `evaluation` is None for a training
    job. `solver` has the settings of the phase's solver, and is None for an explicit model.
    """

    run: str
    seed: int | None = None
    phase: str | None = None
    evaluation: str | None = None
    solver: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class DataPart:
    """The name of a data set, and its part `split`: "train", "valid", "validation", "test" or "tokenizer"."""

    data: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Front:
    """The settings of the first page, which shows at most five figures and compact tables of selected models.

    figures: the names of the figures, the most important one first. If empty, the page shows the first five that have
    data, from the list in page/front.py and then from plugins. models: patterns of the names that readers see, such as
    "S5, *". Figures show only these models (except FEW_LINES in page/front.py), and tables with many rows prefer them.
    If empty, figures show the first six models of each test. Raises: ValueError for more than five figures.
    """

    figures: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.figures) > MOST_FIGURES:
            raise ValueError(f"figures: {len(self.figures)} are more than the {MOST_FIGURES} that the first page shows")


@dataclass(frozen=True)
class ReportConfig:
    """The settings of a report; `experiment` (demo, miniature, paper, ...) decides which claims can be judged.

    `note`: a text that readers need before the numbers, such as how a seed was chosen. `names`: by run, the name that
    readers see. `jobs`: by role, the description of each input and each missing result. `data`: by the name of a data
    job, the data set and split that it makes. `own_figures`: the figures of plugins whose `needs` the experiment meets.
    """

    experiment: str
    jobs: Mapping[str, ReportJob] = field(default_factory=dict)
    data: Mapping[str, DataPart] = field(default_factory=dict)
    title: str | None = None
    note: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    front: Front = field(default_factory=Front)
    missing: tuple[MissingResult, ...] = ()  # the planned results that do not exist
    minimum_layers: MinimumLayersConfig | None = None
    figures: tuple[str, ...] | None = None  # names of the figures to show; None for all, or for none if `tables` is set
    own_figures: tuple[str, ...] = ()
    tables: tuple[str, ...] | None = None  # names of the tables to show; None for all, or for none if `figures` is set

    @property
    def is_whole(self) -> bool:
        """Whether the report shows everything, not only some figures or tables."""
        return self.figures is None and self.tables is None

    def shows(self, part: Literal["figures", "tables"], name: str) -> bool:
        return self.is_whole or name in (getattr(self, part) or ())


# PyYAML's loader in C is ten times as fast as its loader in Python.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path, cls: type[T]) -> T:
    """Return the content of a YAML file as a `cls`.

    Raises: UserError that names the file, and the line or key; OSError for an unreadable file.
    """
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        raise ReportError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from error
    return fill(cls, found, str(path))
