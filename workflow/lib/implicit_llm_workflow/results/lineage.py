"""Where a result came from: the runs behind it, back to the data, by the fingerprints in their manifests.

Needs no experiment file: what a manifest was made from is looked for, by fingerprint, among the results beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.manifest import FileRecord, Manifest, ManifestError
from implicit_llm_contracts.runs.run_directory import DECLARED, FINGERPRINT_DIGITS, PROVENANCE, WORK, work_directory
from implicit_llm_workflow.planning.accepted import Acceptance, read_acceptances
from implicit_llm_workflow.planning.recorded import MLFLOW, read_object


class NoLineage(UserError):
    """The artifact is not one that a finished job vouches for."""


@dataclass(frozen=True)
class Ancestor:
    """A run of the tree. `path`: its manifest, as committed; `upstream`: fingerprints by role.

    `files` are the manifest's records; `acceptances` those that were given for this result.
    """

    key: str
    fingerprint: str
    run_dir: Path
    path: Path
    config: Mapping[str, Any]
    code: str
    upstream: Mapping[str, str]
    files: tuple[FileRecord, ...]
    provenance: Mapping[str, Any]
    mlflow_run_id: str | None
    acceptances: tuple[Acceptance, ...] = ()


@dataclass(frozen=True)
class Lineage:
    """`runs` by fingerprint, those that others were made from after them; an input that is not found is in none.

    `artifact`: path, below the run directory, of the file whose lineage it is; None for the whole result.
    """

    top: str
    artifact: str | None
    runs: Mapping[str, Ancestor] = field(default_factory=dict)

    def missing(self) -> Iterator[tuple[str, str, str]]:
        """Run, role and fingerprint of each input that was not found."""
        for run in self.runs.values():
            for role, fingerprint in run.upstream.items():
                if fingerprint not in self.runs:
                    yield run.key, role, fingerprint


def trace(artifact: Path) -> Lineage:
    """The lineage of a run directory, a manifest, or a file that a manifest vouches for. Raises: NoLineage."""
    artifact = artifact.absolute()
    run_dir = _run_dir_of(artifact)
    manifest = _manifest_of(artifact, run_dir)
    top = read_run(run_dir, manifest)
    name = _record_of(artifact, top)
    shelf = Shelf(root_of(run_dir, top.key))
    runs: dict[str, Ancestor] = {}
    waiting = [top]
    while waiting:
        run = waiting.pop(0)
        if run.fingerprint not in runs:
            runs[run.fingerprint] = run
            waiting.extend(found for item in run.upstream.values() if (found := shelf.find(item)) is not None)
    return Lineage(top.fingerprint, name, runs)


class Shelf:
    """All results of an experiment, also those of former settings, by fingerprint."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, fingerprint: str) -> Ancestor | None:
        """The run with this fingerprint. Raises: NoLineage if its manifest is damaged."""
        run_dir = self._run_dirs.get(fingerprint[:FINGERPRINT_DIGITS])
        if run_dir is None:
            return None
        run = read_run(run_dir, work_directory(run_dir, fingerprint) / MANIFEST)
        return run if run.fingerprint == fingerprint else None

    @cached_property
    def _run_dirs(self) -> dict[str, Path]:
        """By the first digits of the fingerprint."""
        found: dict[str, Path] = {}
        waiting = [self._root]
        while waiting:
            folder = waiting.pop()
            for path in sorted(item for item in folder.iterdir() if item.is_dir()):
                if path.name != WORK:
                    waiting.append(path)
                    continue
                found.update({work.name: folder for work in path.iterdir() if (work / MANIFEST).is_file()})
        return found


def read_run(run_dir: Path, manifest: Path) -> Ancestor:
    """One run by its manifest. Raises: NoLineage."""
    try:
        recorded = Manifest.read(manifest)
    except ManifestError as error:
        raise NoLineage(str(error)) from error
    fingerprint, work = recorded.fingerprint, work_directory(run_dir, recorded.fingerprint)
    provenance = read_object(work / PROVENANCE)
    return Ancestor(
        key=recorded.stage if recorded.stage == recorded.name else f"{recorded.stage}/{recorded.name}",
        fingerprint=fingerprint,
        run_dir=run_dir,
        path=manifest,
        config=recorded.config,
        code=recorded.code,
        upstream=recorded.upstream,
        files=recorded.files,
        provenance=provenance,
        mlflow_run_id=read_object(work / MLFLOW).get("run_id") or provenance.get("mlflow_run_id"),
        acceptances=tuple(item for item in read_acceptances(run_dir) if item.recorded == fingerprint),
    )


def _run_dir_of(artifact: Path) -> Path:
    """The nearest folder with a manifest of its own; a work directory belongs to its run."""
    for folder in [artifact, *artifact.parents]:
        if folder.is_dir() and (folder / MANIFEST).is_file() and folder.parent.name != WORK:
            return folder
        if folder.parent.name == WORK and (folder / MANIFEST).is_file():
            return folder.parent.parent
    raise NoLineage(f"{artifact}: is in no run directory of a finished job; name a job, its folder or a file in it")


def _manifest_of(artifact: Path, run_dir: Path) -> Path:
    """Of a file below work/<fingerprint>/ the manifest there, which may be of former settings."""
    parts = artifact.relative_to(run_dir).parts
    below = run_dir.joinpath(*parts[:2]) / MANIFEST
    return below if parts[:1] == (WORK,) and len(parts) > 1 and below.is_file() else run_dir / MANIFEST


def _record_of(artifact: Path, run: Ancestor) -> str | None:
    """The path in the manifest of the artifact, or of what it is a copy of. Raises: NoLineage."""
    if artifact.is_dir() or artifact.name == MANIFEST:
        return None
    given = artifact.relative_to(run.run_dir).as_posix()
    declared = f"{WORK}/{run.fingerprint[:FINGERPRINT_DIGITS]}/{DECLARED}/{given}"
    for file in run.files:
        if file.path in (given, declared):
            return file.path
    raise NoLineage(f"{artifact}: {run.key} does not vouch for this file; {run.path} lists those that it vouches for")


def root_of(run_dir: Path, key: str) -> Path:
    """The folder of the experiment."""
    return run_dir.parents[key.count("/")] if run_dir.as_posix().endswith(f"/{key}") else run_dir.parent
