"""Trace a result back to its data, or forward to the results made from it, by the fingerprints in manifests.

This needs no experiment file: inputs and readers of a result are found by fingerprint among all results in the folder
of its experiment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.text import Text
from rich.tree import Tree

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import read_object
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest
from implicit_llm_contracts.runs.run_directory import (
    COMMIT,
    DECLARED,
    FINGERPRINT_DIGITS,
    MLFLOW,
    PROVENANCE,
    WORK,
    committed,
    committed_below,
    experiment_folder,
    job_key,
    run_directories,
    work_directory,
)
from implicit_llm_workflow.planning.staleness import Acceptance, read_acceptance
from implicit_llm_workflow.results.verify import Broken, RecordedFile, recorded_files, run_dir_of

COMMIT_DIGITS = 10


class NoLineage(UserError):
    """The given file was recorded by no finished job, or the given MLflow run belongs to none."""


@dataclass(frozen=True)
class Result:
    """The result of a job, as the manifest `path` records it."""

    run_dir: Path
    path: Path
    manifest: Manifest

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a result from its manifest, which is in the run directory or below work/. Raises: ManifestError."""
        return cls(run_dir_of(path), path, Manifest.read(path))

    @property
    def key(self) -> str:
        """The job's path below the folder of the experiment; for a run directory that was moved, the recorded one."""
        return self._recorded_key if self._folder is None else self.run_dir.relative_to(self._folder).as_posix()

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def root(self) -> Path:
        """The folder of the experiment; for a run directory that was moved, the folder that contains it."""
        return self._folder or self.run_dir.parent

    @property
    def _recorded_key(self) -> str:
        return job_key(self.manifest.stage, self.manifest.name)

    @property
    def _folder(self) -> Path | None:
        return experiment_folder(self.run_dir, self._recorded_key)

    @cached_property
    def provenance(self) -> Mapping[str, Any]:
        return read_object(work_directory(self.run_dir, self.fingerprint) / PROVENANCE)

    @property
    def mlflow_run_id(self) -> str | None:
        return _mlflow_id(work_directory(self.run_dir, self.fingerprint))

    @property
    def accepted(self) -> Acceptance | None:
        """The acceptance of this result, if there is one."""
        found = read_acceptance(self.run_dir)
        return found if found is not None and found.recorded == self.fingerprint else None


@dataclass(frozen=True)
class Lineage:
    """The lineage of a result: the runs from which it was made, or, if `readers` is set, the runs made from it.

    `runs`: by fingerprint, from the result itself to the most distant run; runs that were not found are absent.
    `artifact`: the path of the traced file, relative to the run directory; None for the whole result. `readers`: for
    each fingerprint, the fingerprints of the runs that read this result; None in a lineage of inputs.
    """

    top: Result
    artifact: str | None
    runs: Mapping[str, Result]
    readers: Mapping[str, Sequence[str]] | None = None

    def next_to(self, run: Result) -> list[tuple[str, str]]:
        """Return role and fingerprint of each input of a run; if `readers` is set, of each run that reads it."""
        if self.readers is None:
            return list(run.manifest.upstream.items())
        return [("reader", fingerprint) for fingerprint in self.readers.get(run.fingerprint, ())]

    def missing(self) -> list[tuple[str, str, str]]:
        """Return run, role and fingerprint of each input, or of each reader, that was not found."""
        inputs = [(run.key, *item) for run in self.runs.values() for item in self.next_to(run)]
        return [item for item in inputs if item[2] not in self.runs]

    def gap(self) -> str:
        """If an input was not found, return what may have happened and what to do; else ""."""
        missing = self.missing()
        if not missing:
            return ""
        return (
            f"{len(missing)} of its inputs are not below {self.top.root}: they were deleted, or the result was moved "
            "without them; move the whole folder of its experiment, and name the result there"
        )

    def files(self) -> tuple[list[RecordedFile], list[Broken]]:
        """Return the files that the manifests record, and the missing inputs and damaged manifests."""
        files, damaged = recorded_files((run.key, run.path) for run in self.runs.values())
        gone = [
            Broken(key, Path(role), f"expected an input with fingerprint {fingerprint[:16]}, found none")
            for key, role, fingerprint in self.missing()
        ]
        return files, [*gone, *damaged]


def of_mlflow_run(run_id: str, results: Path) -> Path:
    """Return the work folder of the job whose run in MLflow has this id, in any experiment below `results`.

    Raises: NoLineage, also if the job has not finished.
    """
    works = [work for run_dir in run_directories(results) for work in run_dir.glob(f"{WORK}/*/")]
    found = next((work for work in works if _mlflow_id(work) == run_id), None)
    if found is None:
        raise NoLineage(
            f"{run_id}: no job below {results} is this run of MLflow; a call of Snakemake has no lineage; to search "
            "another folder, name it by --results"
        )
    if committed(found) is None:
        raise NoLineage(f"{run_id}: is the run of {found.parents[1]}, which has not finished")
    return found


def _mlflow_id(work: Path) -> str | None:
    """Return the id of a job's run in MLflow; None if it has no run there."""
    return read_object(work / MLFLOW).get("run_id")


def trace(artifact: Path, *, is_forward: bool = False) -> Lineage:
    """Return the lineage of a run directory, of a manifest, or of a file that a manifest records.

    is_forward: trace the results made from this result instead of its inputs. Raises: NoLineage, ManifestError.
    """
    artifact = artifact.absolute()
    manifest = next(filter(None, map(committed, (artifact, *artifact.parents))), None)
    if manifest is None:
        raise NoLineage(f"{artifact}: is in no run directory of a finished job; name a job, its folder or a file in it")
    top = Result.read(manifest)
    # All finished results of the experiment by the first digits of their fingerprints, also those of former settings.
    # Results that are set aside (`<digits>.previous`) while their job computes them again do not count.
    paths: dict[str, Path] = {}
    for found in committed_below(top.root):
        if not found.parent.suffix:
            paths.setdefault(found.parent.name, found)  # not a copy to which a link leads
    runs = {top.fingerprint: top}
    lineage = Lineage(top, _record_of(artifact, top), runs, _readers(paths.values()) if is_forward else None)
    waiting = [top]
    for run in waiting:
        for _, fingerprint in lineage.next_to(run):
            path = paths.get(fingerprint[:FINGERPRINT_DIGITS])
            if fingerprint not in runs and path is not None:
                result = Result.read(path)
                if result.fingerprint == fingerprint:
                    runs[fingerprint] = result
                    waiting.append(result)
    return lineage


def _readers(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Return, for each fingerprint, the fingerprints of the results that have it as input; skip damaged manifests."""
    readers: dict[str, list[str]] = {}
    for manifest in filter(None, map(Manifest.find, paths)):
        for fingerprint in dict.fromkeys(manifest.upstream.values()):
            readers.setdefault(fingerprint, []).append(manifest.fingerprint)
    return readers


def _record_of(artifact: Path, run: Result) -> str | None:
    """Return the artifact's path in the manifest, or None for a folder or a manifest.

    If the artifact is the run directory's copy of a file in work/<digits>/declared/, return the path of that file.
    Raises: NoLineage if the file is not recorded.
    """
    if artifact.is_dir() or artifact.name in (COMMIT, MANIFEST):
        return None
    given = artifact.relative_to(run.run_dir).as_posix()
    declared = f"{WORK}/{run.fingerprint[:FINGERPRINT_DIGITS]}/{DECLARED}/{given}"
    found = next((file.path for file in run.manifest.files if file.path in (given, declared)), None)
    if found is None:
        raise NoLineage(f"{artifact}: {run.key} did not record this file; {run.path} lists the files that it did")
    return found


def tree_of(lineage: Lineage) -> Tree:
    """Return a tree of the result and its inputs or readers; later mentions of a run have only its name and digits."""
    seen: set[str] = set()

    def add(branch: Tree, run: Result) -> None:
        seen.add(run.fingerprint)
        for role, fingerprint in lineage.next_to(run):
            source, digits = lineage.runs.get(fingerprint), fingerprint[:FINGERPRINT_DIGITS]
            if source is None:
                branch.add(Text.assemble((f"{role}: not found", "red"), f"  {digits}"))
            elif fingerprint in seen:
                branch.add(Text(f"{source.key}  {digits}{', see above' if lineage.next_to(source) else ''}"))
            else:
                add(branch.add(Text(_run_text(source))), source)

    top, record = lineage.top, lineage.artifact
    tree = branch = Tree(Text(_run_text(top)))
    if record is not None:
        sha256 = next(file.sha256 for file in top.manifest.files if file.path == record)
        name = record.rpartition(f"/{DECLARED}/")[2]
        tree = Tree(Text(f"{name} (sha256 {sha256[:FINGERPRINT_DIGITS]})"))
        branch = tree.add(branch.label)
    add(branch, top)
    return tree


def _run_text(run: Result) -> str:
    """Return key, fingerprint, MLflow run, commit, device and time of a run in one line; an acceptance adds a line."""
    parts = [run.key, run.fingerprint[:FINGERPRINT_DIGITS], f"mlflow {run.mlflow_run_id or 'none'}"]
    about, git = run.provenance, run.provenance.get("git") or {}
    edited = " (edited)" if git.get("is_dirty") else ""  # files differed from the commit
    commit = f"commit {git['commit'][:COMMIT_DIGITS]}{edited}" if git.get("commit") else "no commit"
    made = [commit, str(about.get("device")), str(about.get("finished"))]
    text = "  ".join([*parts, *(made if about else ["provenance not recorded"])])
    if (it := run.accepted) is None:
        return text
    changed = "what changed is not recorded" if it.changed is None else ", ".join(it.changed)
    codes = f"{it.recorded_code[:12]} -> {it.wanted_code[:12]}"
    return f"{text}\naccepted {it.when[:10]} with other code ({codes}; {changed}): {it.why}"


def as_json(lineage: Lineage) -> dict[str, Any]:
    """Return each run once, and the inputs or readers that were not found; runs name their inputs by fingerprint."""
    return {
        "top": lineage.top.fingerprint,
        "artifact": lineage.artifact,
        "runs": [
            {
                "job": run.key,
                "fingerprint": run.fingerprint,
                "run_dir": run.run_dir,
                "manifest": run.path,
                "code": run.manifest.code,
                "config": run.manifest.config,
                "inputs": run.manifest.upstream,
                "mlflow_run_id": run.mlflow_run_id,
                "provenance": run.provenance or None,
                "accepted": run.accepted,
            }
            for run in lineage.runs.values()
        ],
        "not_found": [dict(zip(("run", "role", "fingerprint"), item, strict=True)) for item in lineage.missing()],
    }
