"""Makes a store show what the results hold: all of it after a loss or an outage, or what jobs have left to do.

`python -m implicit_llm_jobs.tracking.rebuild results/demo` does the latter: a call of Snakemake ends with it.
"""

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.logs import without_password
from implicit_llm_jobs.tracking.mlflow_bridge import Bridge, is_complete
from implicit_llm_jobs.tracking.mlflow_store import TrackingError, default_uri, repair
from implicit_llm_jobs.tracking.tracked_run import KeptRuns, TrackedRun, status_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rebuilt:
    """`set_aside`: where a damaged store lies now; `failed`: names of runs whose files or store refused."""

    uri: str
    num_runs: int
    set_aside: Path | None
    failed: tuple[str, ...] = ()


def rebuild(results: Path) -> Rebuilt:
    """Bring every run below `results` to the store, which is made, or made anew, where that is needed.

    Runs that the store has keep their ids; the others get new ones, with the same tags. May be repeated, and done
    while jobs run. Raises: TrackingError, StorageError; when no run can be brought, what the last one raised.
    """
    if not results.is_dir():
        raise TrackingError(f"{results}: no such directory; give that of the results with --results")
    uri = default_uri(results)
    set_aside = repair(uri)
    runs = list(KeptRuns(results).in_order())
    failed = _bring(tqdm(runs, desc="runs", disable=None), len(runs))
    return Rebuilt(uri, len(runs) - len(failed), set_aside, failed)


def late_works(experiment: Path) -> list[Path]:
    """Work directories below results/<experiment> whose journals MLflow does not have, or not all of them."""
    return [work for work in KeptRuns(experiment).works if not is_complete(work)]


def bring_late(experiment: Path) -> None:
    """Bring the runs below results/<experiment> that have ended and left MLflow to the call of Snakemake.

    Raises: as `rebuild`.
    """
    late = late_works(experiment)
    runs = [run for run in KeptRuns(experiment).in_order(late) if run.work in late and status_of(run) is not None]
    _bring(runs, len(runs))


def _bring(runs: Iterable[TrackedRun], count: int) -> tuple[str, ...]:
    """Titles of the runs that could not be brought. Raises: the last error, if all could not."""
    failed: list[str] = []
    for run in runs:
        try:
            Bridge(run).bring(status_of(run))
        except Exception as error:  # one damaged journal is no reason to leave out the others
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            log.warning("%s: not brought to MLflow: %s", run.title, without_password(reason).partition("\n")[0][:300])
            failed.append(run.title)
            if len(failed) == count:
                raise
    return tuple(failed)


if __name__ == "__main__":
    bring_late(Path(sys.argv[1]).absolute())
