"""Find and delete results that no job wants, and the larger files of finished jobs."""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import write_json
from implicit_llm_contracts.runs.manifest import MANIFEST
from implicit_llm_contracts.runs.run_directory import COMMIT, FINGERPRINT_DIGITS, FREED, JOURNAL, WORK, run_directories
from implicit_llm_workflow.planning.code_digest import STAGES
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import PAGES, payload, pointed_to, readers
from implicit_llm_workflow.results.accept import chosen_jobs
from implicit_llm_workflow.results.job_states import SILENT_S, holder_of

FORMER, UNKNOWN = "of former settings or code", "of no job of the experiment"


class NotFreeable(UserError):
    """The files of this job cannot be freed."""


@dataclass(frozen=True)
class Garbage:
    """A folder that no plan wants. `why`: FORMER or UNKNOWN."""

    path: Path
    why: str
    size: int


def find_garbage(plan: Plan) -> list[Garbage]:
    """Run directories of no job, and work folders of other fingerprints than those that are wanted or in use.

    A fingerprint is in use if a manifest names it as its own or as an input, so a stale result keeps its lineage. Run
    directories in which a process works are left out, also those that another machine has lately written to.
    """
    recorded = [status.recorded for status in plan.statuses.values() if status.recorded is not None]
    used = {identity.fingerprint for identity in plan.identities.values()}
    used.update(*({manifest.fingerprint, *manifest.upstream.values()} for manifest in recorded))
    names = {fingerprint[:FINGERPRINT_DIGITS] for fingerprint in used}
    known = {plan.run_dir(node) for node in plan.nodes.values()}
    found = []
    for run_dir in chain.from_iterable(run_directories(plan.root / stage) for stage in STAGES):
        if not _is_worked_in(run_dir):
            works = (path for path in sorted((run_dir / WORK).glob("*")) if path.is_dir())
            # A folder "<digits>.previous" is in use if the result of these digits is.
            former = [(path, FORMER) for path in works if path.name.partition(".")[0] not in names]
            paths = former if run_dir in known else [(run_dir, UNKNOWN)]
            found += [Garbage(path, why, _size(path)) for path, why in paths]
    return found


def freeable(plan: Plan, targets: Iterable[str]) -> list[str]:
    """Jobs whose larger files can be deleted. Raises: NotFreeable for one that is named and cannot be freed."""
    found = []
    for key, is_named in chosen_jobs(plan, targets).items():
        obstacle = _obstacle(plan, key)
        if obstacle is None:
            found.append(key)
        elif is_named:
            raise NotFreeable(f"{key}: {obstacle}")
    return found


def _obstacle(plan: Plan, key: str) -> str | None:
    """Why a job cannot be freed: it is not fresh, has no larger files, or a job that is still to run reads them."""
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
    """Delete the larger files of a finished job and keep its manifest. Returns: how many files, and their bytes."""
    work = Path(plan.work[key])
    files = payload(work)
    size = sum(path.stat().st_size for path in files)
    about = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "files": len(files), "bytes": size}
    pointing = [name for name in plan.nodes if key in pointed_to(plan.nodes, name)]
    for freed in (*(Path(plan.work[name]) for name in pointing), work) if files else ():
        write_json(freed / FREED, about)  # first: what a kill leaves half deleted is freed as well
        with suppress(FileNotFoundError):
            (freed / MANIFEST).replace(freed / COMMIT)  # equal; an old result has only the first
    for path in files:
        path.unlink()
    for folder in sorted((path for path in work.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    return len(files), size


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
