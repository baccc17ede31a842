"""The evaluations of an experiment, and its peers: models that were trained elsewhere."""

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
from implicit_llm_workflow.experiment_files.yaml_files import matches, read_yaml, selected
from implicit_llm_workflow.project_dirs import REPORT, package_dir

SUITES_FILE = package_dir(REPORT) / "inputs/downstream.yaml"


@dataclass(frozen=True)
class Evaluation:
    """`runs`: patterns of the runs it is done for. `settings`: those of its kind, as its job reads them.

    `split`: the held-out sets that it reads, of word problems and text also their validation sets.
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
        """Values of a mode's fields, each of which is evaluated."""
        return getattr(self.settings, "sweep", None)

    def repeats(self, other: Evaluation, *, is_implicit: bool | None) -> bool:
        """Whether both evaluations give the same number of a model that both apply to; `is_implicit` None: not known.

        An explicit model has one mode, whatever the modes are called.
        """
        if (self.kind, self.split) != (other.kind, other.split) or self.sweep or other.sweep or not self.modes:
            return False
        mine, theirs = (getattr(item.settings, self.kind.parts, None) for item in (self, other))
        is_same_part = mine is None or theirs is None or not set(mine).isdisjoint(theirs)
        names = {mode.name for mode in self.modes}
        return is_same_part and (not is_implicit or any(mode.name in names for mode in other.modes))


def build_evaluation(name: str, item: Mapping[str, Any], source: str, kinds: Kinds) -> Evaluation:
    """An evaluation from its values. Raises: UserError that starts with `source`, the file."""
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
    """Return the settings for the job; those of lm-eval have `tasks` as a list, and the digests of task files.

    Raises: ConfigError that starts with `at`, file and key of the evaluation.
    """
    if kind != LM_EVAL:
        return settings
    suites = {suite["name"]: suite for suite in read_yaml(SUITES_FILE)["suites"]}
    tasks = settings.get("tasks", "")
    names = [tasks] if isinstance(tasks, str) else tasks
    if len(names) == 1 and names[0] in suites:
        names = list(dict.fromkeys(column["task"] for column in suites[names[0]]["columns"]))
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


CHECKPOINT = "checkpoint"  # also the phase of its evaluations
# What evaluates an explicit model in its one mode, whatever modes the evaluation has, and so says something of every
# model. The others compare modes or look into implicit layers, and are to be asked for.
ONE_MODE_KINDS = (WORD_PROBLEM, CATBABI, PERPLEXITY, LM_EVAL)


@dataclass(frozen=True)
class Peer:
    """`data`: the data set on which it is evaluated; the model must have been trained with its tokens.

    `evaluations`: patterns of their names. By default those of the kinds word_problem, catbabi, perplexity and lm_eval
    that fit its data and have no sweep.
    """

    name: str
    data: str
    checkpoint: CheckpointConfig
    evaluations: Annotated[tuple[Text, ...], SOME] | None = None

    is_implicit = None  # not known before its import

    def takes(self, evaluation: Evaluation) -> bool:
        """Whether this evaluation, which fits the data, runs on the model."""
        if self.evaluations is None:
            return evaluation.settings.kind in ONE_MODE_KINDS and evaluation.sweep is None
        return matches(evaluation.name, self.evaluations)
