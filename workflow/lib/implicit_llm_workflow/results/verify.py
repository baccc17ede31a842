"""Recompute the digests of all files that finished jobs recorded, and say how to repair what is broken.

The files of a data set that others only point to (the shards of a token stream) belong to the jobs that wrote them.
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

MAX_THREADS = 8  # one core hashes 1 to 2 GB/s; more of them wait for the disk


@dataclass(frozen=True)
class RecordedFile:
    """A file of the job `job`, which its manifest records."""

    job: str
    path: Path
    record: FileRecord


@dataclass(frozen=True)
class Broken:
    """What is wrong with a file of a job."""

    job: str
    path: Path
    why: str


def recorded_files(manifests: Iterable[tuple[str, Path]]) -> tuple[list[RecordedFile], list[Broken]]:
    """Files of the manifests, which are given with their job; and the manifests that are damaged."""
    files: list[RecordedFile] = []
    broken = []
    for job, path in manifests:
        try:
            files += _files_of(job, path)
        except ManifestError as error:
            broken.append(Broken(job, path, str(error).removeprefix(f"{path}: ").partition("; type")[0]))
    return files, broken


def check_files(files: Sequence[RecordedFile]) -> list[Broken]:
    """Files that are missing or differ from their record, in order; a terminal shows the progress."""
    from tqdm import tqdm

    size = sum(file.record.size for file in files)
    bar = tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc="verify", disable=None)
    broken = []
    with bar, ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for file, why in zip(files, pool.map(_difference, files), strict=True):
            bar.update(file.record.size)
            broken += [Broken(file.job, file.path, why)] if why else []
    return broken


def rebuild_commands(plan: Plan, jobs: Iterable[str], targets: Iterable[str] = ()) -> list[str]:
    """Shell commands that make the broken files of these jobs again, on the way to the targets (none: all jobs).

    A job whose run directory shows no manifest is started; it verifies what it has, sets aside what differs and makes
    that again. Its manifest is then what it was, so that no finished job that follows from it runs.
    """
    manifests = [str(plan.run_dir(plan.nodes[job]) / MANIFEST) for job in dict.fromkeys(jobs)]
    wanted = [plan.nodes[target] for target in dict.fromkeys(targets)]
    return [shlex.join(["rm", "-f", *manifests]), plan.command_for(wanted)]


def with_shards(plan: Plan, targets: Iterable[str]) -> list[Node]:
    """The targets' jobs; before a stream of tokens the jobs of its shards, to whose files it points."""
    found = [plan.find(target).key for target in targets]
    keys = dict.fromkeys(name for key in found for name in (*pointed_to(plan.nodes, key), key))
    return [plan.nodes[key] for key in keys]


def _files_of(job: str, path: Path) -> Iterator[RecordedFile]:
    """Files of a manifest, without those that were freed. A declared file has a copy where the workflow looks for it,
    which a later result may have replaced: it counts only for the manifest that the run directory publishes.

    Raises: ManifestError.
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
    """The run directory of a manifest, which lies in it or below work/."""
    return manifest.parents[2] if manifest.parent.parent.name == WORK else manifest.parent


def _are_equal(one: Path, other: Path) -> bool:
    try:
        return one == other or one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _difference(file: RecordedFile) -> str:
    """How the file differs from its record, "" if it does not."""
    try:
        return file.record.difference(file.path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
