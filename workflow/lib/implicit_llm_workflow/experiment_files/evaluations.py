"""The evaluations of an experiment, and its peers: models that were trained elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from implicit_llm_contracts.config.evaluation import modes_of
from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS, LM_EVAL, PERPLEXITY, EvaluationKind
from implicit_llm_contracts.config.tasks import CATBABI, WORD_PROBLEM
from implicit_llm_contracts.config.values import SOME, Digest, Text
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs import TASK_FOLDERS, ConfigError, file_digests, fill, find_task_folder
from implicit_llm_report.config import VALIDATION
from implicit_llm_workflow.experiment_files.yaml_files import (
    as_given,
    fill_entry,
    matches,
    read_yaml,
    selected,
)
from implicit_llm_workflow.project_dirs import REPORT, package_dir

SUITES_FILE = package_dir(REPORT) / "inputs/downstream.yaml"


@dataclass(frozen=True)
class Evaluation:
    """`runs`: patterns of the runs it is done for. `config`: what its job is told; the rest keeps the job's default.

    `split`: the held-out sets that it reads, of word problems also their validation sets.
    """

    name: str
    config: dict[str, Any]
    runs: Annotated[tuple[Text, ...], SOME] = ("*",)
    split: Literal["test", "validation"] = "test"

    @property
    def kind(self) -> EvaluationKind:
        return EVALUATION_KINDS[self.config["kind"]]

    @property
    def modes(self) -> list[dict[str, Any]]:
        return self.config.get("modes", [])

    @property
    def sweep(self) -> dict[str, list[Any]]:
        """Values of a mode's fields, each of which is evaluated."""
        return self.config.get("sweep", {})

    def repeats(self, other: Evaluation, *, is_implicit: bool | None) -> bool:
        """Whether both give the same number of a model they are done for; `is_implicit` None: not known.

        An explicit model has one mode, whatever the modes are called.
        """
        if (self.kind, self.split) != (other.kind, other.split) or self.sweep or other.sweep or not self.modes:
            return False
        mine, theirs = (item.config.get(self.kind.parts) for item in (self, other))
        is_same_part = mine is None or theirs is None or not set(mine).isdisjoint(theirs)
        names = {mode["name"] for mode in self.modes}
        return is_same_part and (not is_implicit or any(mode["name"] in names for mode in other.modes))


def build_evaluation(name: str, item: Mapping[str, Any], source: str) -> Evaluation:
    """An evaluation from its values. Raises: UserError that starts with `source`, the file."""
    at = f"{source}: evaluations.{name}"
    kind = selected(EVALUATION_KINDS, "kind", item, at)
    own = {key: item[key] for key in ("runs", "split") if key in item}
    given = completed_settings(item["kind"], {key: item[key] for key in item if key not in own}, at)
    lengths = {"lengths": [2]} if kind.lengths is not None else {}  # which the data give where the file does not
    filled: Any = fill(kind.config, {**lengths, **given}, at)
    if kind.has_modes:
        modes_of(filled.modes, filled.sweep, at)
    found = fill(Evaluation, {"name": name, "config": as_given(filled, given), **own}, at)
    if found.split == VALIDATION and item["kind"] != WORD_PROBLEM:
        raise ConfigError(f"{at}.split: only evaluations of kind {WORD_PROBLEM} read {VALIDATION}; remove the key")
    return found


def completed_settings(kind: str, settings: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    """The settings as the job is given them: of lm-eval with `tasks` as a list and the digests of task files.

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
class FolderCheckpoint:
    """A folder, below the downloads or the working directory, in the format of transformers, in the published layout,
    or of the original Mamba2 release. `sha256`: digests that files must have; a pickle is read only if it is named.
    """

    path: Text
    sha256: dict[str, Digest] = field(default_factory=dict)


@dataclass(frozen=True)
class HubCheckpoint:
    """A model of the hub. `revision`: a commit; null takes the newest, and the report says that it is not pinned."""

    hub: Text
    revision: str | None
    sha256: dict[str, Digest] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """`data`: the data set on which it is evaluated; the model must have been trained with its tokens.

    `evaluations`: patterns of their names. By default those of the kinds word_problem, catbabi, perplexity and lm_eval
    that fit its data and have no sweep.
    """

    name: str
    data: str
    checkpoint: FolderCheckpoint | HubCheckpoint
    evaluations: Annotated[tuple[Text, ...], SOME] | None = None

    is_implicit = None  # not known before its import

    def takes(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation for its kind of data is done for it."""
        if self.evaluations is None:
            return evaluation.config["kind"] in ONE_MODE_KINDS and not evaluation.sweep
        return matches(evaluation.name, self.evaluations)


def build_peer(name: str, item: Mapping[str, Any], source: str) -> Peer:
    """A peer from its values. Raises: ConfigError that starts with `source`, the file."""
    at, checkpoint = f"{source}: peers.{name}", item.get("checkpoint", {})
    is_known = isinstance(checkpoint, Mapping) and ("path" in checkpoint) != ({"hub", "revision"} <= checkpoint.keys())
    if not is_known:
        raise ConfigError(
            f"{at}.checkpoint: needs either path (a folder), or hub (a name on the hub) and revision (a commit, or "
            "null for the newest, which is then not pinned)"
        )
    cls = HubCheckpoint if "hub" in checkpoint else FolderCheckpoint
    return fill_entry(Peer, name, {**item, "checkpoint": fill(cls, checkpoint, f"{at}.checkpoint")}, at)
