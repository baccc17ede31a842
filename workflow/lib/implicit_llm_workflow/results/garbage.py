"""Find and delete results that no job wants, and the larger files of finished jobs."""

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import fsync_directory, storage_errors, temporary_name
from implicit_llm_contracts.runs.run_directory import (
    FINGERPRINT_DIGITS,
    FREED,
    JOURNAL,
    WORK,
    RunDirectoryBusy,
    find_committed,
    locked,
    run_directories,
)
from implicit_llm_workflow.planning.code_digest import STAGES
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import PAGES, payload, pointed_to, readers, remove_declared
from implicit_llm_workflow.results.accept import chosen_jobs
from implicit_llm_workflow.results.job_states import SILENT_S, holder_of

FORMER, UNKNOWN = "of former settings or code", "of no job of the experiment"


class NotFreeable(UserError):
    """The larger files of this job cannot be deleted now."""


@dataclass(frozen=True)
class Garbage:
    """A folder that no job of the plan needs. `why`: FORMER or UNKNOWN."""

    path: Path
    why: str
    size: int


def find_garbage(plan: Plan) -> list[Garbage]:
    """Return run directories that belong to no job, and work folders whose fingerprints are neither wanted nor in use.

    A fingerprint is in use if it belongs to a recorded result of a job, or to a direct or indirect input of a recorded
    or wanted result. So a stale result keeps its lineage, except for inputs whose run directories belong to no job. Run
    directories in which a process works are omitted. A process on another machine counts as working until SILENT_S
    after its last write. `kept_links` are omitted too, because they may lead to results of another experiment.
    """
    recorded = [status.recorded for status in plan.statuses.values() if status.recorded is not None]
    used = set(plan.fingerprints)
    used.update(*({manifest.fingerprint, *manifest.upstream.values()} for manifest in recorded))
    names = _with_inputs(plan, {fingerprint[:FINGERPRINT_DIGITS] for fingerprint in used})
    known = {plan.run_dir(node) for node in plan.nodes.values()}
    found = []
    for run_dir in chain.from_iterable(run_directories(plan.root / stage) for stage in STAGES):
        if _link_to(run_dir, plan.root) is None and not _is_worked_in(run_dir):
            works = (path for path in sorted((run_dir / WORK).glob("*")) if path.is_dir())
            # A folder "<digits>.previous" is in use if the result with these digits is in use.
            former = [(path, FORMER) for path in works if path.name.partition(".")[0] not in names]
            paths = former if run_dir in known else [(run_dir, UNKNOWN)]
            found += [Garbage(path, why, _size(path)) for path, why in paths]
    return found


def delete(garbage: Garbage) -> None:
    """Delete the folder while holding the lock of its run directory.

    Raises: RunDirectoryBusy if a job holds the lock, such as a silent job on another machine.
    """
    run_dir = garbage.path if garbage.why == UNKNOWN else garbage.path.parent.parent

    def busy(holder: str) -> RunDirectoryBusy:
        return RunDirectoryBusy(f"{run_dir}: kept, {holder} is writing here")

    with locked(run_dir / WORK / ".lock", busy, "gc: "):
        # The folder is renamed first, so that a kill during the deletion leaves no part of a result.
        shutil.rmtree(garbage.path.rename(temporary_name(garbage.path)))


def _with_inputs(plan: Plan, names: set[str]) -> set[str]:
    """Return `names` (first digits of fingerprints) and the first digits of all their direct and indirect inputs."""
    run_dirs = chain.from_iterable(run_directories(plan.root / stage) for stage in STAGES)
    works = [path for run_dir in run_dirs for path in (run_dir / WORK).glob("*")]
    found, new = set(names), set(names)
    while new:
        manifests = [find_committed(path) for path in works if path.name.partition(".")[0] in new]
        inputs = {value[:FINGERPRINT_DIGITS] for one in manifests if one for value in one.upstream.values()}
        new = inputs - found
        found |= new
    return found


def freeable(plan: Plan, targets: Iterable[str]) -> list[str]:
    """Return the jobs of the targets whose larger files can be deleted.

    A job that only a pattern matches is skipped if it cannot be freed. Raises: NotFreeable if a job that is named in
    full cannot be freed; UnknownTarget for an unknown name; NotAcceptable for a pattern without a match.
    """
    found = []
    for key, is_named in chosen_jobs(plan, targets).items():
        obstacle = _obstacle(plan, key)
        if obstacle is None:
            found.append(key)
        elif is_named:
            raise NotFreeable(f"{key}: {obstacle}")
    return found


def _obstacle(plan: Plan, key: str) -> str | None:
    """Return why a job cannot be freed, or None if it can.

    The reasons: it is not fresh, has no larger files, or a job that must run reads them.
    """
    node = plan.nodes[key]
    if plan.statuses[key].state != "fresh":
        return f"is {plan.statuses[key].state}; run the workflow first: {plan.command_for([node])}"
    if node.stage in (*PAGES, "evaluate"):
        return "has small files alone; name a job of data, train or checkpoint"
    waiting = next((name for name in readers(plan.nodes, key) if plan.statuses[name].state != "fresh"), None)
    if waiting is None:
        return None
    return f"{waiting} has still to read its files; run the workflow first: {plan.command_for([plan.nodes[waiting]])}"


def free(plan: Plan, key: str) -> tuple[int, int]:
    """Delete the larger files of a finished job, but not commit.json; return the number of files and their bytes.

    The job and the streams that point to its files are marked as freed, and their declared manifests are removed.
    """
    work = Path(plan.work[key])
    files = payload(work)
    size = sum(path.stat().st_size for path in files)
    pointing = [name for name in plan.nodes if key in pointed_to(plan.nodes, name)]
    # The marks come first, so that a kill during the deletion leaves freed results. Empty files fit on a full disk.
    for freed in (*(Path(plan.work[name]) for name in pointing), work) if files else ():
        with storage_errors(freed / FREED):
            (freed / FREED).touch()
            fsync_directory(freed)
        remove_declared(freed)
    for path in files:
        path.unlink()
    for folder in sorted((path for path in work.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    return len(files), size


def kept_links(plan: Plan) -> list[Path]:
    """Return the links in the experiment's folder that lead to run directories, in the order of their paths."""
    run_dirs = chain.from_iterable(run_directories(plan.root / stage) for stage in STAGES)
    return sorted({link for run_dir in run_dirs if (link := _link_to(run_dir, plan.root)) is not None})


def _link_to(run_dir: Path, root: Path) -> Path | None:
    """Return the first link on the path from `root` to the run directory, or None if there is none."""
    folders = [run_dir, *run_dir.parents]
    below = folders[: folders.index(root)]
    return next((path for path in reversed(below) if path.is_symlink()), None)


def _is_worked_in(run_dir: Path) -> bool:
    holder = holder_of(run_dir / WORK / ".lock")
    if holder is None:
        return False
    if holder.is_alive is not None:
        return holder.is_alive
    journals = (run_dir / WORK).glob(f"*/{JOURNAL}")
    return any(time.time() - path.stat().st_mtime < SILENT_S for path in journals)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
