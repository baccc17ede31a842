"""Find results that no job wants."""

import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS, JOURNAL, WORK, run_directories
from implicit_llm_workflow.planning.code_digest import STAGES
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.job_states import SILENT_S, holder_of

FORMER, UNKNOWN = "of former settings or code", "of no job of the experiment"


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
    used = {identity.fingerprint for identity in plan.identities.values()}
    for status in plan.statuses.values():
        if status.recorded is not None:
            used |= {status.recorded.fingerprint, *status.recorded.upstream.values()}
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
