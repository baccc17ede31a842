"""Recompute the digests of everything in a lineage."""

from __future__ import annotations

from pathlib import Path

from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_workflow.results.lineage import Ancestor, Lineage
from implicit_llm_workflow.results.verify import Broken, Progress, VouchedFile, verify_files, vouched_files


def lineage_files(lineage: Lineage) -> tuple[list[VouchedFile], list[Broken]]:
    """The files that the manifests vouch for; and manifests that are no good, inputs that are not there."""
    files: list[VouchedFile] = []
    broken = [
        Broken(key, Path(role), f"expected an input with fingerprint {fingerprint[:16]}, found none")
        for key, role, fingerprint in lineage.missing()
    ]
    for run in lineage.runs.values():
        try:
            files += vouched_files(run.key, run.run_dir, run.path.read_bytes(), _is_published(run))
        except (OSError, ValueError, KeyError, TypeError) as error:
            broken.append(Broken(run.key, run.path, str(error) or type(error).__name__))
    return files, broken


def verify_lineage(lineage: Lineage, progress: Progress = lambda size: None) -> tuple[int, list[Broken]]:
    """Number of files read, and what is wrong. `progress`: told of every block of bytes."""
    files, broken = lineage_files(lineage)
    return len(files), [*broken, *verify_files(files, progress)]


def _is_published(run: Ancestor) -> bool:
    """Whether it is the result that the workflow sees in this place now."""
    published = run.run_dir / MANIFEST
    return published.is_file() and published.read_bytes() == run.path.read_bytes()
