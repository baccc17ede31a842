"""Define the evaluations of an experiment, and its external baselines: models that were trained elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.checkpoint import CheckpointConfig
from implicit_llm_contracts.config.evaluation import ModeConfig, SweepConfig, modes_of
from implicit_llm_contracts.config.evaluation_kinds import LM_EVAL, PERPLEXITY, EvaluationKind
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.tasks import CATBABI, WORD_PROBLEM
from implicit_llm_contracts.config.values import SOME, Text
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.plugins import Kinds
from implicit_llm_contracts.runs.places import TASK_FOLDERS, file_digests, find_task_folder
from implicit_llm_report.config import VALIDATION, VALIDATION_KINDS
from implicit_llm_report.inputs.suites import load_suites
from implicit_llm_workflow.experiment_files.yaml_files import matches, selected


@dataclass(frozen=True)
class Evaluation:
    """An evaluation. `runs`: patterns of the names of the runs that it evaluates.

    `settings`: the settings of the evaluation's kind, as its jobs get them. `split`: the held-out sets that it uses;
    word problems and text can also have validation sets.
    """

    name: str
    settings: Any
    kind: EvaluationKind
    runs: Annotated[tuple[Text, ...], SOME] = ("*",)
    split: Literal["test", "validation"] = "test"

    @property
    def modes(self) -> tuple[ModeConfig, ...]:
        return getattr(self.settings, "modes", ())

    @property
    def sweep(self) -> SweepConfig | None:
        """The fields of the modes that are swept, with their values; None for no sweep."""
        return getattr(self.settings, "sweep", None)

    def repeats(self, other: Evaluation, *, is_implicit: bool | None) -> bool:
        """Return whether both evaluations compute the same number for a model; `is_implicit` is None if not known.

        This requires the same kind and split, a common part of the data, such as a length, and a common mode. Modes of
        an implicit model are equal if their names are; for any other model, all modes count as equal. An evaluation
        with a sweep or without modes repeats no other.
        """
        if (self.kind, self.split) != (other.kind, other.split) or self.sweep or other.sweep or not self.modes:
            return False
        mine, theirs = (getattr(item.settings, self.kind.parts, None) for item in (self, other))
        is_same_part = mine is None or theirs is None or not set(mine).isdisjoint(theirs)
        names = {mode.name for mode in self.modes}
        return is_same_part and (not is_implicit or any(mode.name in names for mode in other.modes))


def build_evaluation(name: str, item: Mapping[str, Any], source: str, kinds: Kinds) -> Evaluation:
    """Return an evaluation from its values. Raises: UserError that starts with `source`, the file."""
    at = f"{source}: evaluations.{name}"
    kind = selected(kinds.evaluations, "kind", item, at)
    own = {key: item[key] for key in ("runs", "split") if key in item}
    given = completed_settings(item["kind"], {key: item[key] for key in item if key not in own}, at)
    filled: Any = fill(kind.config, given, at)
    if kind.has_modes:
        modes_of(filled.modes, filled.sweep, at)
    found = fill(Evaluation, {"name": name, "settings": filled, "kind": kind, **own}, at)
    if found.split == VALIDATION and item["kind"] not in VALIDATION_KINDS:
        raise ConfigError(
            f"{at}.split: only evaluations of kind {' or '.join(VALIDATION_KINDS)} read {VALIDATION}; remove the key"
        )
    return found


def completed_settings(kind: str, settings: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    """Return the settings for the job; only those of lm-eval change.

    The name of a suite in `tasks` becomes the list of its tasks. With `task_path`, the digests of the files in this
    folder are added. Raises: ConfigError that starts with `at`, the place of the evaluation.
    """
    if kind != LM_EVAL:
        return settings
    suites = {suite.name: suite for suite in load_suites()}
    tasks = settings.get("tasks", "")
    names = [tasks] if isinstance(tasks, str) else tasks
    if len(names) == 1 and names[0] in suites:
        names = list(dict.fromkeys(column.task for column in suites[names[0]].columns))
    elif isinstance(tasks, str):
        raise ConfigError(f"{at}.tasks: give a list of tasks, or the name of a suite; {nearest(tasks, suites)}")
    if "task_path" not in settings:
        return {**settings, "tasks": names}
    path = settings["task_path"]
    folder = find_task_folder(path)
    if folder is None:
        folders = [item.name for item in TASK_FOLDERS.iterdir() if item.is_dir()]
        raise ConfigError(f"{at}.task_path: there is no folder {path!r}; {nearest(path, folders)}")
    return {**settings, "tasks": names, "task_files": file_digests(folder)}


CHECKPOINT = "checkpoint"  # the stage that imports a baseline; also the phase in the names of a baseline's evaluations
# These kinds evaluate an explicit model in its one mode, whatever modes the evaluation has, so they apply to every
# model. The other kinds compare modes or inspect implicit layers, so a baseline has them only if it names them.
ONE_MODE_KINDS = (WORD_PROBLEM, CATBABI, PERPLEXITY, LM_EVAL)


@dataclass(frozen=True)
class Peer:
    """An external baseline. `data`: the data set on which it is evaluated; the model must use the same tokens.

    `evaluations`: patterns of names of evaluations. The default is all evaluations of the kinds word_problem, catbabi,
    perplexity and lm_eval that fit its data and have no sweep.
    """

    name: str
    data: str
    checkpoint: CheckpointConfig
    evaluations: Annotated[tuple[Text, ...], SOME] | None = None

    is_implicit = None  # not known before its import

    def takes(self, evaluation: Evaluation) -> bool:
        """Return whether this evaluation, which fits the data, applies to the model."""
        if self.evaluations is None:
            return evaluation.settings.kind in ONE_MODE_KINDS and evaluation.sweep is None
        return matches(evaluation.name, self.evaluations)
