"""Recompute the digests of all files that finished jobs recorded, and show how to rebuild broken files.

The stream of a whole training split only points to the files of its shards, which belong to the jobs of the shards.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from implicit_llm_contracts.runs.identity import compute_fingerprint
from implicit_llm_contracts.runs.manifest import MANIFEST, FileRecord, Manifest, ManifestError
from implicit_llm_contracts.runs.run_directory import COMMIT, DECLARED, FREED, WORK, committed, work_directory
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import pointed_to

MAX_THREADS = 8  # one core hashes 1 to 2 GB/s, so the disk limits more threads


@dataclass(frozen=True)
class RecordedFile:
    """A file that the manifest of the job `job` records."""

    job: str
    path: Path
    record: FileRecord


@dataclass(frozen=True)
class Broken:
    """A broken file of a job, or an input that was not found (`path` is then its role), and the reason.

    `is_unreadable`: whether this user may not read the file, which may be whole.
    """

    job: str
    path: Path
    why: str
    is_unreadable: bool = False


def recorded_files(manifests: Iterable[tuple[str, Path]]) -> tuple[list[RecordedFile], list[Broken]]:
    """Return the files that manifests record, and the damaged manifests. `manifests`: pairs of job and path."""
    files: list[RecordedFile] = []
    broken = []
    for job, path in manifests:
        try:
            files += _files_of(job, path)
        except ManifestError as error:
            why = str(error).removeprefix(f"{path}: ").partition("; type")[0]
            broken.append(Broken(job, path, why, isinstance(error.__cause__, PermissionError)))
    return files, broken


def check_files(files: Sequence[RecordedFile]) -> list[Broken]:
    """Return the files that are missing or differ from their records, in order; show the progress on a terminal."""
    from tqdm import tqdm

    size = sum(file.record.size for file in files)
    bar = tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc="verify", disable=None)
    broken = []
    with bar, ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for file, found in zip(files, pool.map(_check, files), strict=True):
            bar.update(file.record.size)
            broken += [found] if found is not None else []
    return broken


def rebuild_commands(plan: Plan, jobs: Iterable[str], targets: Iterable[str] = ()) -> list[str]:
    """Return shell commands that rebuild the broken files of these jobs, and then make the targets or else everything.

    Snakemake starts a job whose run directory has no manifest. The job verifies its files and rebuilds those that
    differ. Its manifest is then the same as before, so finished jobs that read its files do not rerun.
    """
    manifests = [str(plan.run_dir(plan.nodes[job]) / MANIFEST) for job in dict.fromkeys(jobs)]
    wanted = [plan.nodes[target] for target in dict.fromkeys(targets)]
    return [shlex.join(["rm", "-f", *manifests]), plan.command_for(wanted)]


def with_shards(plan: Plan, targets: Iterable[str]) -> list[Node]:
    """Return the jobs of the targets; a token stream comes after its shards, because it may point to their files."""
    found = [plan.find(target).key for target in targets]
    keys = dict.fromkeys(name for key in found for name in (*pointed_to(plan.nodes, key), key))
    return [plan.nodes[key] for key in keys]


def _files_of(job: str, path: Path) -> Iterator[RecordedFile]:
    """Yield the files that a manifest records and that were not freed. Raises: ManifestError.

    The copy of a declared file in the run directory is yielded too, but only if the run directory publishes this
    manifest, because otherwise the copy belongs to another result.
    """
    manifest = Manifest.read(path)
    if compute_fingerprint(manifest.stage, manifest.config, manifest.code, manifest.upstream) != manifest.fingerprint:
        raise ManifestError("its fingerprint is not that of its identity", path)
    run_dir = run_dir_of(path)
    work = work_directory(run_dir, manifest.fingerprint)
    original = committed(work)
    if original is None or not _are_equal(path, original):
        raise ManifestError(f"differs from its copy {original or work / COMMIT}", path)
    is_published, is_freed = _are_equal(path, run_dir / MANIFEST), (work / FREED).exists()
    for record in manifest.files:
        places = [run_dir / record.path]
        if is_published and places[0].is_relative_to(work / DECLARED):
            places.append(run_dir / places[0].relative_to(work / DECLARED))
        yield from (RecordedFile(job, place, record) for place in places if place.exists() or not is_freed)


def run_dir_of(manifest: Path) -> Path:
    """Return the run directory of a manifest, which is in that directory or below its work/."""
    return manifest.parents[2] if manifest.parent.parent.name == WORK else manifest.parent


def _are_equal(one: Path, other: Path) -> bool:
    try:
        return one == other or one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _check(file: RecordedFile) -> Broken | None:
    """Return how the file differs from its record, or None if it does not."""
    try:
        why = file.record.difference(file.path)
    except OSError as error:
        why = f"cannot be read ({os.strerror(error.errno or 0)})"
        return Broken(file.job, file.path, why, isinstance(error, PermissionError))
    return Broken(file.job, file.path, why) if why else None
