"""Recompute the digests of everything that finished jobs vouch for, and say how to put right what is broken.

The files of a data set that others only point to (the shards of a token stream) belong to the jobs that wrote them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from implicit_llm_contracts.runs.identity import digest
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.run_directory import DECLARED, FREED, work_directory
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan

BLOCK_BYTES = 1 << 22
MAX_THREADS = 8  # one core hashes 1 to 2 GB/s; more of them wait for the disk
Progress = Callable[[int], None]


@dataclass(frozen=True)
class VouchedFile:
    """A file as a manifest has it; `job` is the key of the node that made it."""

    job: str
    path: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class Broken:
    """What is wrong with a file of a job."""

    job: str
    path: Path
    why: str


@dataclass(frozen=True)
class Inventory:
    """What there is to verify: files of finished jobs, manifests that are no good, jobs that have not been done."""

    files: list[VouchedFile]
    broken: list[Broken]
    finished: list[str]
    unfinished: list[str]


def take_inventory(plan: Plan, nodes: Iterable[Node]) -> Inventory:
    """Read the manifests of the nodes."""
    found = Inventory([], [], [], [])
    for node in nodes:
        manifest = plan.run_dir(node) / MANIFEST
        try:
            files = vouched_files(node.key, plan.run_dir(node), manifest.read_bytes())
        except FileNotFoundError:
            found.unfinished.append(node.key)
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            found.broken.append(Broken(node.key, manifest, str(error) or type(error).__name__))
            files = []
        found.finished.append(node.key)
        found.files.extend(files)
    return found


def verify_files(files: Iterable[VouchedFile], progress: Progress) -> list[Broken]:
    """Those files that are missing or differ, in their order. progress: told of every block of bytes, read or not."""
    lock = threading.Lock()

    def counted(number: int) -> None:
        with lock:
            progress(number)

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        return [broken for broken in pool.map(lambda file: _check(file, counted), files) if broken is not None]


def rebuild_commands(plan: Plan, jobs: Iterable[str], targets: Iterable[str] = ()) -> list[str]:
    """Shell commands that make the broken files of these jobs again, on the way to the targets (none: all jobs).

    A job whose manifest is gone is started; it verifies what it has, sets aside what differs and makes that again. Its
    manifest is then what it was, so that no finished job that follows from it runs.
    """
    manifests = [plan.manifest(plan.nodes[job]) for job in dict.fromkeys(jobs)]
    wanted = [plan.nodes[target] for target in dict.fromkeys(targets)]
    return [shlex.join(["rm", "-f", *manifests]), plan.command_for(wanted)]


def vouched_files(job: str, run_dir: Path, content: bytes, is_published: bool = True) -> list[VouchedFile]:
    """The files of a manifest, without those that were freed. If the manifest is not the one that the run publishes,
    also without the copies of declared files.

    Raises: ValueError, KeyError or TypeError for one that is no good.
    """
    values = json.loads(content)
    identity = {key: values["identity"][key] for key in ("config", "code", "upstream")}
    if digest({"stage": values["stage"], **identity}) != values["fingerprint"]:
        raise ValueError("its fingerprint is not that of its identity")
    work = work_directory(run_dir, values["fingerprint"])
    if _read(work / MANIFEST) != content:
        raise ValueError(f"differs from its copy {work / MANIFEST}")
    files = [file for record in values["files"] for file in _records(job, run_dir, work, record)]
    if (work / FREED).exists():
        files = [file for file in files if file.path.exists()]
    return [file for file in files if is_published or file.path.is_relative_to(work)]


def _records(job: str, run_dir: Path, work: Path, record: Mapping[str, Any]) -> Iterator[VouchedFile]:
    """A file, and its copy where the workflow looks for it if it is a declared one."""
    path = PurePosixPath(record["path"])
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"the path {record['path']!r} leads out of the run directory")
    yield VouchedFile(job, run_dir / path, int(record["size"]), record["sha256"])
    declared = work / DECLARED
    if (run_dir / path).is_relative_to(declared):
        copy = run_dir / (run_dir / path).relative_to(declared)
        yield VouchedFile(job, copy, int(record["size"]), record["sha256"])


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _check(file: VouchedFile, progress: Progress) -> Broken | None:
    try:
        size = file.path.stat().st_size
        if size != file.size:
            progress(file.size)
            return Broken(file.job, file.path, f"expected {file.size} bytes, found {size}")
        found = sha256_of(file.path, progress)
    except FileNotFoundError:
        progress(file.size)
        return Broken(file.job, file.path, f"expected {file.size} bytes, found no file")
    except OSError as error:
        return Broken(file.job, file.path, f"cannot be read ({error.strerror})")
    if found == file.sha256:
        return None
    return Broken(file.job, file.path, f"expected sha256 {file.sha256[:16]}, found {found[:16]}")


def sha256_of(path: Path, progress: Progress = lambda size: None) -> str:
    """sha256 (hexadecimal) of a file."""
    total = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(BLOCK_BYTES):
            total.update(block)
            progress(len(block))
    return total.hexdigest()
