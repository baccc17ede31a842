"""A run as MLflow is told of it, the finished runs that it reads, and the invocation of Snakemake that it belongs to.

All runs of a results directory are found by their manifests and journals alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from implicit_llm_contracts.runs import (
    IDENTITY_KEYS,
    JOURNAL,
    MANIFEST,
    WORK,
    JournalError,
    Manifest,
    read_records,
    run_and_phase,
    run_directories,
    work_directory,
)
from implicit_llm_jobs.tracking.mlflow_store import default_uri

VARIABLE = "IMPLICIT_LLM_INVOCATION"
TAG = "invocations"  # of a run: the ids of all that worked on it, the first one first


@dataclass(frozen=True)
class Invocation:
    """`started`: ISO time in UTC; `command`: what was typed; `commit` of the source tree, None outside of git."""

    id: str
    started: str
    command: str
    commit: str | None = None
    user: str | None = None

    @classmethod
    def current(cls) -> Invocation | None:
        """That of this process; None for a job that was started by hand."""
        try:
            return cls(**json.loads(os.environ[VARIABLE]))
        except (KeyError, ValueError, TypeError):
            return None

    @property
    def name(self) -> str:
        return f"snakemake {self.started[:16].replace('T', ' ')}"

    def tags(self, config: str) -> dict[str, str]:
        """What its run in MLflow carries; `config` is the experiment's name."""
        tags = {
            "stage": "workflow",
            "config": config,
            "invocation": self.id,
            "command": self.command,
            "mlflow.source.name": self.command,
            "mlflow.source.type": "PROJECT",
            "mlflow.note.content": f"`{self.command}`\n\nRuns that began here are nested below this one. All it worked "
            f"on, those that another one had begun included: search for `tags.{TAG} LIKE '%{self.id}%'`.",
        }
        if self.commit:
            tags["mlflow.source.git.commit"] = self.commit
        return tags | ({"mlflow.user": self.user} if self.user else {})


MODEL_ROLE = "model"
MANY_INPUTS = 200  # shards of a large text: their own runs say where they came from
_OF_MODELS = ("train", "checkpoint")
_MODEL_CONFIG = re.compile(r"(^|/)model/config\.json$")

_SIZE = re.compile(r"(?:^|[-_])(\d+(?:\.\d+)?[kmb])(?=[-_]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class TrackedInput:
    """A finished run that another one reads."""

    run_dir: Path
    fingerprint: str

    @property
    def work(self) -> Path:
        return work_directory(self.run_dir, self.fingerprint)

    @cached_property
    def manifest(self) -> Manifest | None:
        """None when it is not there any more."""
        return Manifest.find(self.work / MANIFEST)


@dataclass(frozen=True)
class TrackedRun:
    """`inputs` by role; `commit` of the source tree that the run is made with."""

    run_dir: Path
    work: Path
    stage: str
    name: str
    fingerprint: str
    config: Mapping[str, Any]
    inputs: Mapping[str, TrackedInput] = field(default_factory=dict)
    commit: str | None = None

    @property
    def journal(self) -> Path:
        return self.work / JOURNAL

    @property
    def machine_journal(self) -> Path:
        """Metrics of the machine."""
        return self.work / "machine.jsonl"

    @property
    def config_dir(self) -> Path:
        """results/<config>; for a run directory of another shape, its parent."""
        return self.run_dir.parents[(self._depth or 1) - 1]

    @property
    def _depth(self) -> int | None:
        """Folders from results/<config> down to the run directory; None if it lies elsewhere."""
        tail = Path(self.stage, self.name).parts
        return next((len(parts) for parts in (tail, tail[:1]) if self.run_dir.parts[-len(parts) :] == parts), None)

    @property
    def experiment(self) -> str:
        return self.config_dir.name

    @property
    def title(self) -> str:
        return f"{self.stage}/{self.name}".rstrip("/")

    @property
    def uri(self) -> str:
        return default_uri(self.config_dir.parent)

    @property
    def manifest(self) -> Manifest | None:
        """None before the run has finished."""
        return Manifest.find(self.work / MANIFEST)

    @property
    def summary(self) -> Mapping[str, Any]:
        """Headline numbers of the finished run."""
        return {} if self.manifest is None else self.manifest.summary

    def times(self) -> tuple[str | None, str | None]:
        """The first and the last sign of life in the journal, as ISO times."""
        records = read_records(self.journal)
        return (records[0]["time"], records[-1]["time"]) if records else (None, None)

    def invocations(self) -> list[Invocation]:
        """Those that worked on the run, in their order; a run that was begun by hand belongs to none."""
        starts = [record for record in read_records(self.journal) if record.get("name") == "stage_started"]
        found = [Invocation(**start["invocation"]) if start.get("invocation") else None for start in starts]
        if not found or found[0] is None:
            return []
        return list({item.id: item for item in found if item is not None}.values())

    def labels(self) -> dict[str, str]:
        """Tags to group by: of the model that the run makes or evaluates; else, and then too, its kind as `task`."""
        if self.stage in _OF_MODELS:
            return model_labels(self.stage, self.name, self.config, self.summary)
        model = self.inputs.get(MODEL_ROLE) if self.stage == "evaluate" else None
        given = None if model is None else model.manifest
        of_model = {} if given is None else model_labels(given.stage, given.name, given.config, given.summary)
        return of_model | ({"task": str(self.config["kind"])} if self.config.get("kind") else {})

    def tags(self, upstream: Mapping[str, str]) -> dict[str, str]:
        """All tags; `upstream` gives the MLflow run of each input that has one."""
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
        if self.commit:
            tags["mlflow.source.git.commit"] = self.commit
        invocations = self.invocations()
        if invocations:
            tags[TAG] = " ".join(item.id for item in invocations)
            if invocations[0].user:
                tags["mlflow.user"] = invocations[0].user
        return tags | self.labels() | {f"upstream.{role}": run_id for role, run_id in upstream.items()}

    def data_sets(self) -> dict[str, TrackedInput]:
        """The inputs that are data, by role."""
        if len(self.inputs) > MANY_INPUTS:
            return {}
        return {
            role: given
            for role, given in self.inputs.items()
            if given.manifest is not None and given.manifest.stage == "data"
        }

    def weights(self) -> tuple[Path, dict[str, str]] | None:
        """The folder of the model that the finished run vouches for, and the digests of its weights by file name."""
        paths = {PurePosixPath(record.path): record.sha256 for record in self.manifest.files} if self.manifest else {}
        folder = next((path.parent for path in paths if _MODEL_CONFIG.search(str(path))), None)
        if folder is None:
            return None
        digests = {p.name: sha for p, sha in paths.items() if p.parent == folder and p.suffix == ".safetensors"}
        return self.run_dir / folder, digests

    def relative(self, path: Path) -> str:
        """The path relative to the folder that holds the results; unchanged for a path outside it."""
        folder = self.config_dir.parent.parent
        is_below = self._depth is not None and path.is_relative_to(folder)
        return path.relative_to(folder).as_posix() if is_below else path.as_posix()


def model_labels(stage: str, name: str, config: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """Tags of a run that makes a model (stages train and checkpoint); what is not known has no tag.

    run: the name without its seed, the same for all seeds. size: as in the name (130m), else layers x width (2x64).
    family: mamba2, llama3, or the type of the Hugging Face model. phase: "checkpoint" for an imported model.
    """
    run, phase = run_and_phase(name, config)
    model = config.get("model")
    model = model if isinstance(model, Mapping) else {}
    model_type = str(model.get("model_type") or summary.get("model_type") or "")
    seed, is_implicit = config.get("seed"), model.get("is_implicit")
    if is_implicit is None and model_type and not model_type.startswith("implicit_"):
        is_implicit = False
    found = {
        "task": config.get("task"),
        "family": model_type.removeprefix("implicit_"),
        "size": _size(run, model),
        "run": run,
        "phase": phase or ("checkpoint" if stage == "checkpoint" else None),
        "seed": None if seed is None else str(seed),
        "is_implicit": None if is_implicit is None else str(bool(is_implicit)).lower(),
    }
    return {key: str(value) for key, value in found.items() if value}


def _size(run: str, model: Mapping[str, Any]) -> str | None:
    found = _SIZE.search(run)
    if found is not None:
        return found.group(1).lower()
    layers, width = model.get("num_hidden_layers"), model.get("hidden_size")
    return f"{layers}x{width}" if layers and width else None


# How the stage ended that wrote such an event last; one that was killed has written nothing.
_STATUS = {
    "stage_started": None,
    "stage_finished": None,  # the manifest is still to come
    "stage_failed": "FAILED",
    "stage_stopped": "KILLED",
    "stage_preempted": "SCHEDULED",
}


class KeptRuns:
    """The runs below a directory, those of former settings too."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def in_order(self, works: Iterable[Path] | None = None) -> Iterator[TrackedRun]:
        """The runs in these work directories, by default all, each after those that it reads.

        A directory that does not say whose it is has no run.
        """
        done: set[Path] = set()
        for work in self.works if works is None else works:
            yield from self._with_inputs(work, done)

    def run_in(self, work: Path) -> TrackedRun | None:
        """The run of a work directory; None when neither manifest nor journal names it."""
        manifest = Manifest.find(work / MANIFEST)
        start = _start_of(work / JOURNAL)
        about = start.get("identity") if manifest is None else {key: getattr(manifest, key) for key in IDENTITY_KEYS}
        if not about:
            return None
        inputs = {role: self._input(given, work) for role, given in about.pop("upstream").items()}
        known = {role: given for role, given in inputs.items() if given is not None}
        return TrackedRun(work.parents[1], work, **about, inputs=known, commit=start.get("commit"))

    def _with_inputs(self, work: Path, done: set[Path]) -> Iterator[TrackedRun]:
        run = None if work in done else self.run_in(work)
        done.add(work)
        if run is not None:
            for given in run.inputs.values():
                yield from self._with_inputs(given.work, done)
            yield run

    def _input(self, fingerprint: str, work: Path) -> TrackedInput | None:
        """Of several runs that are called so, one of the same experiment."""
        found = self._by_name.get(work_directory(Path(), fingerprint).name, [])
        nearest = max(found, key=lambda other: len(os.path.commonpath([other, work])), default=None)
        return None if nearest is None else TrackedInput(nearest.parents[1], fingerprint)

    @cached_property
    def works(self) -> list[Path]:
        """Work directories with a journal."""
        return [path.parent for run in run_directories(self._root) for path in sorted(run.glob(f"{WORK}/*/{JOURNAL}"))]

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for work in self.works:
            found.setdefault(work.name, []).append(work)
        return found


def status_of(run: TrackedRun) -> str | None:
    """How the run ended, as far as its files tell; None for one that may still be going on."""
    if Manifest.find(run.work / MANIFEST) is not None:
        return "FINISHED"
    names = [record.get("name") for record in read_records(run.journal)]
    return next((_STATUS[name] for name in reversed(names) if name in _STATUS), None)


def _start_of(journal: Path) -> Mapping[str, Any]:
    """The last start that tells who it is; nothing of a damaged journal, which whoever brings it will name."""
    try:
        starts = [record for record in read_records(journal) if record.get("name") == "stage_started"]
    except JournalError:
        return {}
    return next((record for record in reversed(starts) if record.get("identity")), {})
