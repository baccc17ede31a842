"""Read the published numbers in published.yaml, and match our numbers with those for the same conditions."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from implicit_llm_contracts.hints import nearest
from implicit_llm_report.config import FOLDER, ReportError, read_yaml
from implicit_llm_report.inputs.frame import METRIC_WORDS, Group, is_close, kind_of, short_count
from implicit_llm_report.inputs.suites import load_suites

SAME = 0.1  # sizes and training tokens with at most this relative difference count as equal
NEAR = ("num_parameters", "train_tokens")

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
# The columns in which the number of a model trained here must agree with a published one, by kind of evaluation.
COMPARED = {
    "word_problem": (
        "group", "monoid", "mode", "is_implicit", "num_layers", "length", "hard_fraction", "train_length",
        "train_hard_fraction",
    ),
    "perplexity": ("family", "num_parameters", "train_tokens", "solver", "length"),
    "lm_eval": ("family", "num_parameters", "train_tokens", "solver", "task"),
    "duality": ("family", "num_parameters", "eval_mode", "against"),
}  # fmt: skip
# For each list of published.yaml: the kind of evaluation, default metric, default part of the page, and number format.
PARTS = {
    "numbers": ("word_problem", "accuracy_last10", "word problems", ".3f"),
    "perplexities": ("perplexity", "perplexity", "perplexity", ".2f"),
    "downstream": ("lm_eval", "", "downstream", ".4f"),
    "babi": (None, "", "CatbAbI", ".2f"),
    "duality": ("duality", "token_agreement", "duality", ".3f"),
    "facts": (None, "", "", ""),
}


@dataclass(frozen=True, kw_only=True)
class PublishedEntry:
    """A published number or statement and its conditions.

    mark: the kind of the source, which shows how reliable the number is. It must be "not_known" if the entry has no
    `value` and no `values`, and only then. The conditions in COMPARED are columns of the frame (inputs/frame.py);
    `solver` has the keys max_iter and phantom_steps. values: a row of a downstream table, by the column labels of the
    suite. hub: the released model to which the number belongs. Raises: ValueError for a wrong mark.
    """

    id: str
    source: str
    mark: Mark
    value: float | str | None = None
    part: str = ""
    what: str = ""
    note: str | None = None
    kind: str | None = None
    metric: str = ""
    form: str = ""
    group: str | None = None
    monoid: str | None = None
    mode: str | None = None
    is_implicit: bool | None = None
    num_layers: int | None = None
    length: int | None = None
    hard_fraction: float | None = None
    train_length: int | None = None
    train_hard_fraction: float | None = None
    f_evaluations_per_token: float | None = None
    family: str | None = None
    num_parameters: float | None = None
    solver: Mapping[str, int] | None = None
    train_data: str | None = None
    test_data: str | None = None
    train_tokens: float | None = None
    eval_mode: str | None = None
    against: str | None = None
    num_tokens: float | None = None
    task: str | None = None
    suite: str = "paper"
    hub: str | None = None
    values: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.value is None and not self.values) != (self.mark == NOT_KNOWN):
            raise ValueError(f"{self.id}: the mark {NOT_KNOWN} goes with the value null, and no other mark does")
        if self.solver is not None and self.solver.keys() != {"max_iter", "phantom_steps"}:
            raise ValueError(f"{self.id}: solver: give max_iter and phantom_steps, and nothing else")

    def is_beside(self, cell: Group) -> bool:
        """Return whether the entry has the kind, task, training corpus and COMPARED conditions of our number.

        If our number is of a model that was trained elsewhere, only kind and task count, and the model must be `hub`.
        """
        if cell.kind != self.kind or cell.task != self.task:
            return False
        if cell.source is not None:
            return self.hub is not None and self.hub == cell.source.get("hub")
        # All models of this project are trained on the corpus of their test, or on D-Pile for downstream tasks.
        if self.train_data != (self.test_data or ("D-Pile" if self.values else self.train_data)):
            return False
        return all(self._agrees(column, getattr(cell, column)) for column in COMPARED[self.kind or ""])

    def _agrees(self, column: str, value: Any) -> bool:
        mine = getattr(self, column)
        if column == "solver" and value is not None:
            value = {"max_iter": value.max_iter, "phantom_steps": value.phantom_steps}
        return is_close(mine, value, SAME) if column in NEAR else bool(mine == value)

    @property
    def text(self) -> str:
        """The published value as text; "" if it is not known."""
        return f"{self.value:{self.form}}" if isinstance(self.value, float | int) else self.value or ""


def _words(entry: PublishedEntry) -> str:
    """Return a description of an entry for a word problem or a perplexity, which serves as its `what`."""
    if entry.kind == "word_problem":
        if entry.metric not in METRIC_WORDS:
            raise ReportError(f"{entry.id}: there is no metric {entry.metric!r}; {nearest(entry.metric, METRIC_WORDS)}")
        task = entry.group if entry.monoid == "none" else f"{entry.group} × {entry.monoid}"
        trained = f"{entry.train_length} with {100 * (entry.train_hard_fraction or 0):g} % hard"
        tested = f"{entry.length} with {100 * (entry.hard_fraction or 0):g} % hard"
        model = (
            f"{task}, {entry.num_layers}-layer {kind_of(entry)}, trained at {trained}, tested at {tested}, {entry.mode}"
        )
        return f"{model}: {METRIC_WORDS[entry.metric]}"
    return f"{_model(entry)}: perplexity on {entry.test_data}, rows of {entry.length}"


def _model(entry: PublishedEntry) -> str:
    kind = "({max_iter}+{phantom_steps})".format(**entry.solver) if entry.solver else "explicit"
    size, tokens = (short_count(count or 0) for count in (entry.num_parameters, entry.train_tokens))
    return f"{entry.family} {kind}, {size}, {tokens} tokens of {entry.train_data}"


@dataclass(frozen=True)
class Published:
    """The published numbers and statements by table, and the meanings of their marks.

    numbers: only those of word problems. facts: statements, which are text.
    """

    marks: Mapping[str, str]
    numbers: tuple[PublishedEntry, ...] = ()
    perplexities: tuple[PublishedEntry, ...] = ()
    downstream: tuple[PublishedEntry, ...] = ()
    babi: tuple[PublishedEntry, ...] = ()
    duality: tuple[PublishedEntry, ...] = ()
    facts: tuple[PublishedEntry, ...] = ()

    def beside(self, cell: Group, metric: str) -> PublishedEntry | None:
        """Return the first published entry of this metric that matches our number, or None."""
        return next((entry for entry in self.entries if entry.metric == metric and entry.is_beside(cell)), None)

    @property
    def entries(self) -> tuple[PublishedEntry, ...]:
        return tuple(entry for name in PARTS for entry in getattr(self, name))


def load_published(path: Path = FOLDER / "inputs/published.yaml") -> Published:
    """Read a file of published numbers; each number of a downstream table becomes an entry of its own.

    Raises: UserError, which names file and key.
    """
    published = read_yaml(path, Published)
    try:
        placed: dict[str, Any] = {name: _placed(name, getattr(published, name)) for name in PARTS}
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from error
    return replace(published, **placed)


def _placed(name: str, entries: tuple[PublishedEntry, ...]) -> tuple[PublishedEntry, ...]:
    """Return the entries of the list `name` with the kind and format, and the default metric and part, from PARTS.

    Rows of downstream tables are split into numbers. An entry without a description gets one.
    """
    kind, metric, part, form = PARTS[name]
    found = [
        replace(entry, kind=kind, metric=entry.metric or metric, part=entry.part or part, form=form)
        for entry in entries
        for entry in (_split(entry) if name == "downstream" else [entry])
    ]
    return tuple(replace(entry, what=entry.what or _words(entry)) for entry in found)


def _split(row: PublishedEntry) -> list[PublishedEntry]:
    """Return an entry for each number in a row of a downstream table. Raises: ReportError for an unknown column."""
    columns = {
        column.label: column for suite in load_suites() if suite.name == row.suite for column in suite.all_columns
    }
    for label in row.values.keys() - columns.keys():
        hint = nearest(label, columns) if columns else "there is no such suite in inputs/downstream.yaml"
        raise ReportError(f"{row.id}: suite {row.suite} has no column {label!r}; {hint}")
    return [
        replace(row, id=f"{row.id}-{label.lower().replace(' ', '-')}", value=value, what=f"{_model(row)}: {label}",
                task=columns[label].task, metric=columns[label].metric)
        for label, value in row.values.items()
    ]  # fmt: skip
