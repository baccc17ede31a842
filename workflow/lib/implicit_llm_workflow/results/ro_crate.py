"""A result with its provenance as an RO-Crate, profile Workflow Run Crate: a folder that explains itself.

In it lie the files of the result, manifest, provenance and accepted exceptions of every run behind it, and the rules of
the workflow. Data and weights of earlier runs do not: the manifests name them by sha256.
Source: RO-Crate 1.1; Process Run Crate, Workflow Run Crate 0.5; Workflow RO-Crate 1.0.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.manifest import FileRecord, sha256_of
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS, PROVENANCE, work_directory
from implicit_llm_workflow.planning.accepted import ACCEPTED
from implicit_llm_workflow.project_dirs import PROJECT_DIR
from implicit_llm_workflow.results.lineage import Ancestor, Lineage

METADATA = "ro-crate-metadata.json"
CONTEXT = ["https://w3id.org/ro/crate/1.1/context", "https://w3id.org/ro/terms/workflow-run/context"]
CRATE = "https://w3id.org/ro/crate/1.1"
PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": ("Workflow RO-Crate", "1.0"),
}
WORKFLOW, SNAKEMAKE = "workflow/Snakefile", "https://w3id.org/workflowhub/workflow-ro-crate#snakemake"
LICENSE = "The workflow is under the Apache License 2.0; data keep the licences of their sources."
Entity = dict[str, Any]


class CrateError(UserError):
    """The crate cannot be written."""


def write_crate(lineage: Lineage, folder: Path) -> int:
    """Fill the new folder; the metadata last. Returns: the number of files. Raises: CrateError."""
    if folder.exists() and any(folder.iterdir()):
        raise CrateError(f"{folder}: is not empty; name a new folder")
    files: list[Entity] = []
    for target, source, sha256 in _contents(lineage):
        files.append(_copy(source, folder, target, sha256))
    metadata = {"@context": CONTEXT, "@graph": [*_entities(lineage, files), *files]}
    write_atomic(folder / METADATA, json.dumps(metadata, indent=1, ensure_ascii=False) + "\n")
    return len(files) + 1


def _contents(lineage: Lineage) -> Iterator[tuple[str, Path, str | None]]:
    """Path in the crate, file, and its sha256 where a manifest vouches for it."""
    rules = sorted((PROJECT_DIR / "workflow" / "rules").glob("*.smk"))
    for path in [PROJECT_DIR / "Snakefile", *rules]:
        yield f"workflow/{path.name if path.parent == PROJECT_DIR else f'rules/{path.name}'}", path, None
    for run in lineage.runs.values():
        yield _manifest_id(run), run.path, None
        work = work_directory(run.run_dir, run.fingerprint)
        for path in (work / PROVENANCE, run.run_dir / ACCEPTED):
            if path.is_file() and (path.name != ACCEPTED or run.acceptances):
                yield f"{_folder(run)}{path.name}", path, None
    top = lineage.runs[lineage.top]
    for file in _result_files(lineage):
        yield f"{_folder(top)}{file.path}", top.run_dir / file.path, file.sha256


def _result_files(lineage: Lineage) -> list[FileRecord]:
    files = lineage.runs[lineage.top].files
    return [file for file in files if lineage.artifact in (None, file.path)]


def _copy(source: Path, folder: Path, name: str, sha256: str | None) -> Entity:
    target = folder / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        found = sha256_of(target)
    except OSError as error:
        raise CrateError(
            f"{source}: cannot be copied to {target} ({error.strerror}); free some space, or name another folder"
        ) from error
    if sha256 not in (None, found):
        raise CrateError(f"{source}: is not what its manifest says; type `implicit-llm lineage --verify`")
    entity: Entity = {"@id": name, "@type": "File", "name": target.name, "sha256": found}
    entity["contentSize"] = str(target.stat().st_size)
    if name == WORKFLOW:
        entity["@type"] = ["File", "SoftwareSourceCode", "ComputationalWorkflow"]
        entity |= {"name": "implicit-llm", "programmingLanguage": {"@id": SNAKEMAKE}}
    return entity


def _entities(lineage: Lineage, files: list[Entity]) -> Iterator[Entity]:
    top = lineage.runs[lineage.top]
    runs = list(lineage.runs.values())
    yield {
        "@id": METADATA,
        "@type": "CreativeWork",
        "conformsTo": [{"@id": CRATE}, {"@id": "https://w3id.org/workflowhub/workflow-ro-crate/1.0"}],
        "about": {"@id": "./"},
    }
    yield {
        "@id": "./",
        "@type": "Dataset",
        "name": f"{top.key} {top.fingerprint[:FINGERPRINT_DIGITS]}",
        "description": f"{lineage.artifact or top.key} with the provenance of the {len(runs)} runs behind it",
        "datePublished": datetime.now(UTC).isoformat(timespec="seconds"),
        "license": LICENSE,
        "conformsTo": _ids(PROFILES),
        "hasPart": [{"@id": file["@id"]} for file in files],
        "mainEntity": {"@id": WORKFLOW},
        "mentions": [{"@id": "#workflow-run"}, *({"@id": _action_id(run)} for run in runs)],
    }
    for profile, (name, version) in PROFILES.items():
        yield {"@id": profile, "@type": "CreativeWork", "name": name, "version": version}
    yield {
        "@id": SNAKEMAKE,
        "@type": "ComputerLanguage",
        "name": "Snakemake",
        "identifier": {"@id": "https://doi.org/10.1093/bioinformatics/bts480"},
        "url": {"@id": "https://snakemake.github.io"},
    }
    yield _workflow_run(lineage)
    for run in runs:
        yield _action(lineage, run)
        yield from _exceptions(run)
    for stage in dict.fromkeys(map(_stage, runs)):
        yield {"@id": f"#implicit-llm-{stage}", "@type": "SoftwareApplication", "name": f"implicit-llm {stage}"}


def _workflow_run(lineage: Lineage) -> Entity:
    """The whole of it: from the data, which nothing was made from here, to the result."""
    top, runs = lineage.runs[lineage.top], lineage.runs.values()
    starts = [start for run in runs if (start := _started(run))]
    ends = [run.provenance["finished"] for run in runs if run.provenance.get("finished")]
    results = [f"{_folder(top)}{file.path}" for file in _result_files(lineage)]
    entity: Entity = {
        "@id": "#workflow-run",
        "@type": "CreateAction",
        "name": f"Run of the workflow for {top.key}",
        "instrument": {"@id": WORKFLOW},
        "object": _ids(_manifest_id(run) for run in runs if not run.upstream),
        "result": _ids([_manifest_id(top), *results]),
    }
    return entity | _times(min(starts, default=None), max(ends, default=None))


def _action(lineage: Lineage, run: Ancestor) -> Entity:
    made_from = [lineage.runs[item] for item in run.upstream.values() if item in lineage.runs]
    git, about = run.provenance.get("git") or {}, [f"fingerprint {run.fingerprint}", f"code {run.code}"]
    for name, value in (("commit", git.get("commit")), ("MLflow run", run.mlflow_run_id)):
        about += [f"{name} {value}"] if value else []
    about += [f"device {run.provenance['device']}"] if run.provenance.get("device") else []
    entity: Entity = {
        "@id": _action_id(run),
        "@type": "CreateAction",
        "name": run.key,
        "description": "; ".join(about),
        "instrument": {"@id": f"#implicit-llm-{_stage(run)}"},
        "object": _ids(_manifest_id(source) for source in made_from),
        "result": _ids([_manifest_id(run)]),
    }
    return entity | _times(_started(run), run.provenance.get("finished"))


def _exceptions(run: Ancestor) -> Iterator[Entity]:
    """That somebody accepted the result with other code, as a comment on its manifest."""
    for number, acceptance in enumerate(run.acceptances):
        yield {
            "@id": f"#accepted-{run.fingerprint[:FINGERPRINT_DIGITS]}-{number}",
            "@type": "Comment",
            "about": {"@id": _manifest_id(run)},
            "dateCreated": acceptance.when,
            "text": f"accepted with code {acceptance.recorded_code} for {acceptance.wanted_code}: {acceptance.why}",
        }


def _started(run: Ancestor) -> str | None:
    attempts = run.provenance.get("attempts") or [{}]
    started = attempts[0].get("started")
    return started if isinstance(started, str) else None


def _times(start: str | None, end: str | None) -> Entity:
    return {name: time for name, time in (("startTime", start), ("endTime", end)) if time}


def _ids(names: Any) -> list[dict[str, str]]:
    return [{"@id": name} for name in names]


def _folder(run: Ancestor) -> str:
    return f"runs/{run.key}/{run.fingerprint[:FINGERPRINT_DIGITS]}/"


def _manifest_id(run: Ancestor) -> str:
    return f"{_folder(run)}{MANIFEST}"


def _action_id(run: Ancestor) -> str:
    return f"#run-{run.fingerprint[:FINGERPRINT_DIGITS]}"


def _stage(run: Ancestor) -> str:
    return run.key.partition("/")[0]
