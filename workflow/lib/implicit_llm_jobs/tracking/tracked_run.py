"""Describe a run for MLflow, with the finished runs that it reads and the invocation of Snakemake that started it.

All runs of a results directory are found by their manifests and journals alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from implicit_llm_contracts.runs.identity import run_and_phase
from implicit_llm_contracts.runs.journal import JournalError, read_records
from implicit_llm_contracts.runs.manifest import IDENTITY_KEYS, Manifest
from implicit_llm_contracts.runs.run_directory import (
    JOURNAL,
    WORK,
    committed,
    experiment_folder,
    find_committed,
    job_key,
    run_directories,
)
from implicit_llm_contracts.runs.stage_context import MODEL_ROLE
from implicit_llm_jobs.tracking.mlflow_store import default_uri

VARIABLE = "IMPLICIT_LLM_INVOCATION"


def current_invocation() -> dict[str, str | None] | None:
    """Return id, command and user of the call of Snakemake that started this process; None without one."""
    try:
        found = json.loads(os.environ[VARIABLE])
        return {"id": found["id"], "command": found["command"], "user": found.get("user")}
    except (KeyError, ValueError, TypeError):
        return None


# A run with more inputs reads the shards of a large text. They are not logged, because their own runs log their origin.
MANY_INPUTS = 200
_OF_MODELS = ("train", "checkpoint")


@dataclass(frozen=True)
class TrackedRun:
    """A run as its manifest describes it, or its journal if there is no manifest yet; both are in `work`."""

    work: Path
    stage: str
    name: str
    fingerprint: str
    config: Mapping[str, Any]
    _starts: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def find(cls, work: Path) -> TrackedRun | None:
        """Return the run of a work directory, or None if neither manifest nor journal names it."""
        manifest = find_committed(work)
        starts = [] if manifest is not None else starts_in(work / JOURNAL)
        about = vars(manifest) if manifest is not None else starts[-1].get("identity") if starts else None
        return cls(work, **{key: about[key] for key in IDENTITY_KEYS}) if about else None

    @property
    def run_dir(self) -> Path:
        return self.work.parents[1]

    @property
    def journal(self) -> Path:
        return self.work / JOURNAL

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The records of the stage's starts; one empty record if the journal has none, for example on a full disk."""
        if not self._starts:
            self._starts.extend(starts_in(self.journal))
        return self._starts or [{}]

    @property
    def _start(self) -> dict[str, Any]:
        """The record of the last start; empty if the journal has none."""
        return self.starts[-1]

    @property
    def inputs(self) -> dict[str, Path]:
        """The work directories of the finished runs that this run reads, by role."""
        paths = self._start.get("inputs", {})
        return {role: Path(os.path.normpath(self.work / path)) for role, path in paths.items()}

    def given(self, role: str) -> TrackedRun | None:
        """Return the run of the input `role`, or None if there is no such input or its run no longer exists."""
        return TrackedRun.find(self.inputs[role]) if role in self.inputs else None

    @property
    def config_dir(self) -> Path:
        """The folder results/<config>; for a run directory elsewhere, its parent."""
        return experiment_folder(self.run_dir, self.title) or self.run_dir.parent

    @property
    def experiment(self) -> str:
        return self.config_dir.name

    @property
    def title(self) -> str:
        return job_key(self.stage, self.name)

    @property
    def uri(self) -> str:
        return default_uri(self.config_dir.parent)

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None before the run has finished."""
        return find_committed(self.work)

    @property
    def summary(self) -> Mapping[str, Any]:
        """The main numbers of the finished run; empty before it has finished."""
        return {} if self.manifest is None else self.manifest.summary

    def times(self) -> tuple[str | None, str | None]:
        """Return the times of the first and the last record in the journal, in ISO format; None without records."""
        records = read_records(self.journal)
        return (records[0]["time"], records[-1]["time"]) if records else (None, None)

    def status(self, records: Iterable[Mapping[str, Any]]) -> str | None:
        """Return MLflow's status of the run after these records of its journal; None if they do not determine it."""
        if committed(self.work) is not None:
            return "FINISHED"  # also if it was stopped after the commit of its manifest
        return next(reversed([_STATUS[record["name"]] for record in records if record.get("name") in _STATUS]), None)

    def invocations(self) -> list[dict[str, Any]]:
        """Return the calls of Snakemake that worked on the run, in order; empty if another command started it first."""
        found = [start.get("invocation") for start in self.starts]
        return list({item["id"]: item for item in found if item}.values()) if found and found[0] else []

    def labels(self) -> dict[str, str]:
        """Return tags for grouping: those of the run's model, if any, and the kind of data or evaluation as `task`."""
        if self.stage in _OF_MODELS:
            return model_labels(self.stage, self.name, self.config, self.summary)
        model = self.given(MODEL_ROLE) if self.stage == "evaluate" else None
        of_model = {} if model is None else model.labels()
        return of_model | ({"task": str(self.config["kind"])} if self.config.get("kind") else {})

    def tags(self, upstream: Mapping[str, str]) -> dict[str, str]:
        """Return all tags; `upstream` has the MLflow run of each input that has one."""
        path = self.relative(self.run_dir)
        tags = {
            "config": self.experiment,
            "stage": self.stage,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "run_dir": path,
            "mlflow.note.content": f"Its files: `{path}`\n\nIts lineage:\n\n    implicit-llm lineage {path}\n",
            "mlflow.source.name": f"implicit-llm {self.stage}",
            "mlflow.source.type": "JOB",
        }
        if self._start.get("commit"):
            tags["mlflow.source.git.commit"] = self._start["commit"]
        if invocations := self.invocations():
            tags |= {"invocations": " ".join(item["id"] for item in invocations), "command": invocations[0]["command"]}
            tags |= {"mlflow.user": user} if (user := invocations[0].get("user")) else {}
        return tags | self.labels() | {f"upstream.{role}": run_id for role, run_id in upstream.items()}

    def data_sets(self) -> dict[str, TrackedRun]:
        """Return the inputs that are data, by role; empty if there are more than MANY_INPUTS inputs."""
        if len(self.inputs) > MANY_INPUTS:
            return {}
        given = {role: self.given(role) for role in self.inputs}
        return {role: run for role, run in given.items() if run is not None and run.stage == "data"}

    def weights(self) -> tuple[Path, dict[str, str]] | None:
        """Return the model folder of the finished run and the weights' digests by file name; None without a model."""
        manifest = self.manifest
        if manifest is None or (folder := manifest.model_folder) is None:
            return None
        paths = {PurePosixPath(record.path): record.sha256 for record in manifest.files}
        digests = {p.name: sha for p, sha in paths.items() if str(p.parent) == folder and p.suffix == ".safetensors"}
        return self.run_dir / folder, digests

    def relative(self, path: Path) -> str:
        """Return the path relative to the parent of the results folder; unchanged if the path or the run is outside."""
        folder = self.config_dir.parent.parent
        is_below = experiment_folder(self.run_dir, self.title) is not None and path.is_relative_to(folder)
        return path.relative_to(folder).as_posix() if is_below else path.as_posix()


def model_labels(stage: str, name: str, config: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a run that produces a model (stages train and checkpoint); unknown values have no tag.

    run: the name without its seed, the same for all seeds. size: layers x width (2x64). family: mamba2, llama3, or the
    type of the Hugging Face model. phase: "checkpoint" for an imported model.
    """
    run, phase = run_and_phase(name, config)
    model = config.get("model") or {}
    model_type = str(model.get("model_type") or summary.get("model_type") or "")
    seed, is_implicit = config.get("seed"), model.get("is_implicit")
    layers, width = model.get("num_hidden_layers"), model.get("hidden_size")
    if is_implicit is None and model_type and not model_type.startswith("implicit_"):
        is_implicit = False
    found = {
        "task": config.get("task"),
        "family": model_type.removeprefix("implicit_"),
        "size": f"{layers}x{width}" if layers and width else None,
        "run": run,
        "phase": phase or ("checkpoint" if stage == "checkpoint" else None),
        "seed": None if seed is None else str(seed),
        "is_implicit": None if is_implicit is None else str(bool(is_implicit)).lower(),
    }
    return {key: str(value) for key, value in found.items() if value}


# MLflow's status by the last of these events in the journal; a stage killed by SIGKILL remains RUNNING.
_STATUS = {
    "stage_started": "RUNNING",
    "stage_failed": "FAILED",
    "stage_stopped": "KILLED",
    "stage_preempted": "SCHEDULED",
}


def works_below(root: Path) -> list[Path]:
    """Return the work directories below `root` that have a journal, including those of former settings."""
    found = run_directories(root.absolute())
    return [path.parent for run in found for path in sorted(run.glob(f"{WORK}/*/{JOURNAL}"))]


def in_order(works: Iterable[Path], done: set[Path] | None = None) -> Iterator[TrackedRun]:
    """Yield the runs in these work directories and all runs that they read: each once, after the runs that it reads.

    A directory that does not name its run is left out. done: the directories already visited, to which new ones are
    added.
    """
    done = set() if done is None else done
    for work in works:
        run = None if work in done else TrackedRun.find(work)
        done.add(work)
        if run is not None:
            yield from in_order(run.inputs.values(), done)
            yield run


def starts_in(journal: Path) -> list[dict[str, Any]]:
    """Return the records of the stage's starts; none for a damaged journal, which `Bridge.bring` reports later."""
    try:
        return [record for record in read_records(journal) if record.get("name") == "stage_started"]
    except JournalError:
        return []
